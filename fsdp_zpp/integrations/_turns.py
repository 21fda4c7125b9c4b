"""Saves of several jobs into one checkpoint, which take turns: frameworks would leave a mixture of what jobs write.

While a job saves, each of its ranks locks a byte of one file, that of its number. A job begins when its rank 0 has got
the lock on all of the file at once, so when the last process of the job before is done or dead: the system releases
what a process has locked, however it ends. Where a file system has no locks, jobs don't wait for each other; see
_cut_off_saves.py for what then tells a mixture.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import torch.distributed as dist

from fsdp_zpp.collectives.agreement import agree, run_on_first_rank

logger = logging.getLogger("fsdp_zpp")

_HELD_BY_OTHERS = (errno.EACCES, errno.EAGAIN)


@contextmanager
def taking_turns(file: Path) -> Iterator[None]:
    """A context in which this job alone saves. Collective. See :class:`Turn`."""
    turn = Turn(file)
    try:
        yield
    except BaseException:
        turn.abandon()
        raise
    dist.barrier()
    turn.release()


class Turn:
    """This job's turn to save. Collective: it waits for the turns of other jobs.

    Args:
        file: What ranks lock, the same on all of them; it is there as long as the turn.
        text: What the file says.

    Raises:
        OSError: On every rank, if rank 0 can't write the file.
        RuntimeError: On every rank, if a rank finds its byte locked.
    """

    def __init__(self, file: Path, text: str = "") -> None:
        self._path, self._text = file, text.encode()
        self._file: IO[bytes] | None = None
        run_on_first_rank(self._lock_all)
        agree(dist.group.WORLD, self._lock_own)  # of all, before any of them writes

    def release(self) -> None:
        """Let other jobs save; for each rank when it has written, and for rank 0 when all have."""
        if dist.get_rank() == 0 and self.is_alone():
            self._path.unlink(missing_ok=True)
        self.abandon()

    def is_alone(self) -> bool:
        """Whether no other job has begun since, as one may where there are no locks; for rank 0."""
        assert self._file is not None
        # Not by the path: to close another descriptor of a file releases all locks on it.
        return _is_still(self._path, self._file) and os.pread(self._file.fileno(), 4096, 0) == self._text

    def abandon(self) -> None:
        """Let other jobs save, since this one can't complete its save."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _lock_all(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        while self._file is None:
            file = self._path.open("a+b")
            has_lock = False
            with suppress(OSError):  # of a file system without locks
                self._wait_for(file)
                fcntl.lockf(file, fcntl.LOCK_UN, 0, 1)  # all bytes but that of rank 0
                has_lock = True
            if not has_lock or _is_still(self._path, file):
                self._file = file
                file.truncate(0)
                file.write(self._text)
                file.flush()
            else:
                file.close()  # the job before has removed it meanwhile

    def _wait_for(self, file: IO[bytes]) -> None:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _HELD_BY_OTHERS:
                raise
            logger.warning(
                "another job is saving to %s, and this one waits until that is done; give each job a folder of its own",
                self._path.parent,
            )
            fcntl.lockf(file, fcntl.LOCK_EX)

    def _lock_own(self) -> None:
        if self._file is not None:
            return
        with suppress(FileNotFoundError):  # as rank 0 alone may see it in a file system without locks
            self._file = self._path.open("r+b")
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, dist.get_rank())
            except OSError as error:
                if error.errno in _HELD_BY_OTHERS:  # rank 0 has ended since
                    raise RuntimeError(
                        f"another job has begun to save to {self._path.parent} in place of this one, whose rank 0 has "
                        "ended: start this job again"
                    ) from None


def is_locked(file: Path) -> bool:
    """Whether a job is at its turn, as far as this machine can tell."""
    try:
        with file.open("rb") as opened:
            fcntl.lockf(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _HELD_BY_OTHERS
    return False


def _is_still(path: Path, file: IO[bytes]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
