"""Runs a function before each operation of this process on files of a folder, as Python's audit events tell them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}
_acting = threading.local()
_watched: Watched | None = None
_is_installed = False


@dataclass(frozen=True)
class Watched:
    """A watch over file operations of this process.

    Args:
        folder: Whose files they are.
        before: Called with whether the operation is to change a file.
    """

    folder: str
    before: Callable[[bool], None]


@contextmanager
def before_operations(folder: str | os.PathLike[str], before: Callable[[bool], None]) -> Iterator[None]:
    """Return a context in which a function runs before each operation. Arguments as of :class:`Watched`."""
    global _watched, _is_installed
    if not _is_installed:  # for good: there is no way to remove it
        sys.addaudithook(_before_event)
        _is_installed = True
    _watched = Watched(os.fspath(folder), before)
    try:
        yield
    finally:
        _watched = None


def _before_event(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched is None or getattr(_acting, "now", False):
        return
    _acting.now = True
    try:
        if arguments and _path_in(event, arguments).startswith(_watched.folder):
            _watched.before(event in _CHANGES or (event == "open" and _opens_to_write(arguments)))
    finally:
        _acting.now = False


def _path_in(event: str, arguments: tuple[Any, ...]) -> str:
    """Return the path that an event is about, or nothing."""
    path = arguments[0]
    if not isinstance(path, str | os.PathLike):
        return ""
    # What removes a folder names what is in it relative to a descriptor.
    within = arguments[1] if event in ("os.remove", "os.rmdir") else -1
    return os.path.join(_path_of(within), os.fspath(path)) if within >= 0 else str(path)


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


def _opens_to_write(arguments: tuple[Any, ...]) -> bool:
    return bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
