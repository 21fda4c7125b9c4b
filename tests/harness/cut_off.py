"""What a save leaves on the disk if it is cut off, at each moment at which a file is made, renamed or removed."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_WRITES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}
_lock = threading.Lock()
_copying = threading.local()
_watched: tuple[Path, Path] | None = None
"""The folder, and where its copies go."""
_is_installed = False


@contextmanager
def copies_of(folder: Path, copies: Path, rank: int) -> Iterator[None]:
    """A context in which ``folder`` is copied into ``copies`` before this process changes a file of it.

    What comes after the last write of a file is among them if a file is changed later, or the context ends.
    """
    global _watched, _is_installed
    copies.mkdir(parents=True, exist_ok=True)
    if not _is_installed:  # for good: there is no way to remove it
        sys.addaudithook(_before_event)
        _is_installed = True
    _watched = folder, copies / f"rank{rank}"
    try:
        yield
    finally:
        _watched = None


def _before_event(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched is None or getattr(_copying, "now", False):
        return
    writes = event in _WRITES or (event == "open" and _opens_to_write(arguments))
    if writes and isinstance(arguments[0], str | os.PathLike) and str(arguments[0]).startswith(str(_watched[0])):
        _copy(*_watched)


def _opens_to_write(arguments: tuple[Any, ...]) -> bool:
    return bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _copy(folder: Path, to: Path) -> None:
    with _lock:
        _copying.now = True
        try:
            number = len(list(to.parent.glob(f"{to.name}-*")))
            with suppress(shutil.Error, FileNotFoundError):  # files that another rank removes meanwhile
                shutil.copytree(folder, to.with_name(f"{to.name}-{number}"), symlinks=True)
        finally:
            _copying.now = False
