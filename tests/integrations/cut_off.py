"""Files that a save leaves on the disk if it is cut off, at each moment at which a file is made, renamed or removed."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from file_operations import before_operations

_lock = threading.Lock()


@contextmanager
def copies_of(folder: Path, copies: Path, rank: int) -> Iterator[None]:
    """Return a context in which ``folder`` is copied into ``copies`` before this process changes a file of it.

    What comes after the last write of a file is among them if a file is changed later, or the context ends.
    """
    copies.mkdir(parents=True, exist_ok=True)
    with before_operations(folder, partial(_copy, folder, copies / f"rank{rank}")):
        yield


def _copy(folder: Path, to: Path, changes: bool) -> None:
    if not changes:
        return
    with _lock:
        number = len(list(to.parent.glob(f"{to.name}-*")))
        with suppress(shutil.Error, FileNotFoundError):  # files that another rank removes meanwhile
            shutil.copytree(folder, to.with_name(f"{to.name}-{number}"), symlinks=True)
