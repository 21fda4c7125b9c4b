"""Versions of frameworks that integrations need."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from torch.torch_version import TorchVersion

from fsdp_zpp.extras import how_to_install


def require(distribution: str, least: str, *, purpose: str = "", install: str = "") -> None:
    """Check that a framework is installed, before it is imported.

    Args:
        distribution: Its name on PyPI, which is also the name of this package's extra.
        least: The oldest version that the integration works with.
        purpose: What needs that version, if the integration itself works with an older one.
        install: What to run, for a framework that no extra can install.

    Raises:
        ImportError: If it is not installed, or is older; says what to install.
    """
    try:
        present = version(distribution)
    except PackageNotFoundError:
        raise absent(distribution, install) from None
    if TorchVersion(present) < least:
        needs = f"{distribution} {least} or later" + (f" {purpose}" if purpose else "")
        install = install or how_to_install(distribution, upgrade=True)
        module = _module(distribution)
        raise ImportError(f"fsdp_zpp.integrations.{module} needs {needs}, and {present} is installed: {install}")


def absent(distribution: str, install: str = "") -> ImportError:
    """Return the error for a framework that is not installed; for arguments see :func:`require`."""
    install = install or how_to_install(distribution)
    return ImportError(f"fsdp_zpp.integrations.{_module(distribution)} needs {distribution}: {install}")


def _module(distribution: str) -> str:
    return distribution.replace("-", "_")
