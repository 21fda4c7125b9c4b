"""How to install what an optional part of fsdp_zpp needs."""

from __future__ import annotations


def how_to_install(extra: str, *, upgrade: bool = False) -> str:
    """Return the command that installs the packages of ``extra``, to end an error with."""
    # From a clone: no package index has fsdp_zpp.
    return f"run pip install {'--upgrade ' * upgrade}'.[{extra}]' in your clone of fsdp_zpp"
