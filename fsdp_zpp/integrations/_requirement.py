"""Which version of a framework an integration needs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from torch.torch_version import TorchVersion


def require(distribution: str, least: str, *, purpose: str = "") -> None:
    """Check that a framework is installed, before it is imported.

    Args:
        distribution: Its name on PyPI, which is also the name of this package's extra.
        least: The oldest version that the integration works with.
        purpose: What needs that version, if the integration itself works with an older one.

    Raises:
        ImportError: If it is not installed, or is older; says what to install.
    """
    install = f"pip install 'fsdp_zpp[{distribution}]'"
    try:
        found = version(distribution)
    except PackageNotFoundError:
        raise ImportError(f"fsdp_zpp.integrations.{distribution} needs {distribution}: {install}") from None
    if TorchVersion(found) < least:
        needs = f"{distribution} {least} or later" + (f" {purpose}" if purpose else "")
        raise ImportError(
            f"fsdp_zpp.integrations.{distribution} needs {needs}, and {found} is installed: {install} --upgrade"
        )
