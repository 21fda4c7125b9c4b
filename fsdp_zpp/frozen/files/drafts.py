"""Lets several jobs save into the folder of a base, and removes files that no save needs any more.

A save names its files by a token of its own. As long as it runs it has a *draft*, the file that is to become the index,
and holds a lock on it, which the system releases however the process ends. Renaming the draft to the index completes
the save. So a save is over if it has no draft, or one that nobody locks; what it has written is then of use only if the
index names it, and an index that was replaced never comes back. Locks may not reach from one machine to another. So a
draft's name says which machine made it, and what a save on another machine leaves behind when it is cut off stays.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import secrets
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TextIO

from .tensor_files import BASE_INDEX

logger = logging.getLogger("fsdp_zpp")

_DRAFT = re.compile(rf"{re.escape(BASE_INDEX)}\.([0-9a-f]{{16}})\.([0-9a-f]{{8}})")
# With the token of a save, or without, as before saves had one.
_FILE = re.compile(r"frozen_base-(?:([0-9a-f]{16})-)?[0-9]{5}\.safetensors")


class Draft:
    """An index of a save that is not complete. See the top of this file.

    Args:
        folder: The folder of the base; it is made if there is none.

    Attributes:
        token: Names the files of this save.

    Raises:
        OSError: If the folder can't be written to.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        while True:
            self.token = secrets.token_hex(8)
            self._path = folder / f"{BASE_INDEX}.{self.token}.{_machine()}"
            self._file = self._path.open("x")
            if self._lock():
                return
            self._file.close()  # another save was faster, and takes it for a leftover

    def _lock(self) -> bool:
        """Lock the draft that was just made, and return whether it still exists then."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True  # without locks in the file system, nobody takes it for a leftover
        return self._path.exists()

    def file(self, number: int) -> Path:
        """Return the path of a file of this save, counted from 1."""
        return self._folder / f"frozen_base-{self.token}-{number:05}.safetensors"

    def publish(self, text: str) -> None:
        """Make ``text`` the index. The files that the index names must be on disk."""
        self._file.write(text)
        self._file.flush()
        os.fsync(self._file.fileno())
        to_disk(self._folder)  # the files' names must be on disk before an index that refers to them
        self._path.replace(self._folder / BASE_INDEX)  # atomic: readers see the old index or the new one
        self._file.close()

    def abandon(self) -> None:
        """Remove what this save has written. It ignores errors, since leftover files do no harm."""
        with suppress(OSError):
            for path in self._folder.glob(f"frozen_base-{self.token}-*"):
                path.unlink()
            self._path.unlink()
        self._file.close()


def remove_leftovers(folder: Path) -> None:
    """Remove the files of saves that are over and that the index does not name. See the top of this file.

    It ignores errors, since leftover files do no harm.
    """
    with suppress(OSError, ValueError), ExitStack() as locks:
        # In this order: a save makes its draft before its files, and drops it when the index names them.
        tokens = {path: match[1] for path in folder.iterdir() if (match := _FILE.fullmatch(path.name))}
        drafts = {path: match for path in folder.iterdir() if (match := _DRAFT.fullmatch(path.name))}
        leftovers: list[Path] = []
        running: dict[str, str] = {}
        for path, match in drafts.items():
            if match[2] == _machine() and (lock := _lock_of(path)) is not None:
                locks.enter_context(lock)  # until it is removed, or a save that has just made it would go on with it
                leftovers.append(path)
            else:
                running[match[1]] = match[2]
        needed = set(json.loads((folder / BASE_INDEX).read_text())["weight_map"].values())
        waste = [path for path, token in tokens.items() if token not in running and path.name not in needed]
        for path in waste + leftovers:
            path.unlink(missing_ok=True)
        if foreign := [path.name for path, token in tokens.items() if running.get(token, _machine()) != _machine()]:
            logger.warning(
                "%s has %d files of a save that is running on another machine or was cut off there (%s, ...); if none "
                "is running, remove them",
                folder,
                len(foreign),
                min(foreign),
            )


def to_disk(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock_of(draft: Path) -> TextIO | None:
    """Lock a draft and return its file; None if somebody else has locked it, or if that can't be told."""
    with suppress(OSError):
        file = draft.open("r+")  # NFS locks what is open for writing
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError:
            file.close()
    return None


@functools.cache
def _machine() -> str:
    """Return eight digits for the running kernel, equal in its containers; random ones if it has no identity."""
    try:
        identity = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        identity = secrets.token_bytes()
    return hashlib.sha256(identity).hexdigest()[:8]
