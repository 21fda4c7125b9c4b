"""A torch that was built for an accelerator, on a machine that has none."""

from __future__ import annotations

import pytest
import torch

from fsdp_zpp.accelerator import accelerator
from fsdp_zpp.frozen.quantize import device_of


@pytest.mark.parametrize("there", [True, False], ids=["there", "not there"])
def test_only_an_accelerator_that_is_there_counts(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: there)
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert accelerator() == (torch.device("cuda") if there else None)
    assert device_of(None, 1) == torch.device("cuda" if there else "cpu", 1)
