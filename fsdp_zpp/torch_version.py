"""The versions of torch that the adapters were checked on."""

from __future__ import annotations

import torch

SUPPORTED = ((2, 11), (2, 13))


def check_torch_version(adapter: str, version: str | None = None) -> None:
    """Raise unless torch is one that ``adapter`` supports.

    Raises:
        RuntimeError: If it is not.
    """
    version = torch.__version__ if version is None else version
    major_minor = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if not SUPPORTED[0] <= major_minor <= SUPPORTED[1]:
        lowest, highest = (".".join(map(str, bound)) for bound in SUPPORTED)
        raise RuntimeError(
            f"fsdp_zpp's adapter for {adapter} reaches into torch and was checked on torch {lowest} to {highest}, "
            f"but this is torch {version}"
        )
