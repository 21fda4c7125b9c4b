"""Manifests of benchmarks: those of ``fsdp_zpp bench``, and the commit."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from fsdp_zpp.bench import results as of_a_run


def manifest(command: list[str] | None = None) -> dict[str, Any]:
    """Return the manifest of this run, with ``commit``, which has ``+dirty`` if tracked files differ from it."""
    return of_a_run.manifest(command) | {"commit": commit()}


def commit() -> str | None:
    """Return the commit that is checked out, ``+dirty`` if tracked files have changed since; None without git."""
    head = _git("rev-parse", "HEAD")
    return f"{head}+dirty" if head and _git("status", "--porcelain", "--untracked-files=no") else head


def _git(*arguments: str) -> str | None:
    """Return git's output about the repository of this file; None if it fails or is not there."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
