"""Skips tests where torchtitan can't be imported."""

from __future__ import annotations

import pytest
from torch.distributed import fsdp


def torchtitan_or_skip() -> None:
    """Skip the test, or the module that calls it, without torchtitan or with a torch that is too old for it."""
    pytest.importorskip("torchtitan")
    if not hasattr(fsdp, "DataParallelMeshDims"):
        pytest.skip("torchtitan 0.3 does not import on this torch", allow_module_level=True)
