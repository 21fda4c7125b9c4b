"""The versions of torch that the adapters are checked on."""

from __future__ import annotations

import torch

SUPPORTED = ((2, 11), (2, 15))


def check_torch_version(adapter: str, version: str | None = None) -> None:
    """Raise unless torch is one that ``adapter`` supports.

    Raises:
        RuntimeError: If it is not.
    """
    version = torch.__version__ if version is None else version
    if not SUPPORTED[0] <= major_minor(version) <= SUPPORTED[1]:
        raise RuntimeError(
            f"fsdp_zpp's adapter for {adapter} uses internals of torch, and this is torch {version}. "
            f"{supported_versions()}"
        )


def major_minor(version: str) -> tuple[int, int]:
    """The first two numbers of a version of torch."""
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def supported_versions() -> str:
    """The versions that work, and the command that installs one, for errors."""
    (low, first), (high, last) = SUPPORTED
    return f'torch {low}.{first} to {high}.{last} work: pip install "torch>={low}.{first},<{high}.{last + 1}"'
