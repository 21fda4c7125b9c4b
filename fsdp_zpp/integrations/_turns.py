"""Lets one job at a time save a checkpoint: frameworks would leave a mixture of what several jobs write.

While a job saves, each of its ranks locks the byte at its rank of one file. A job begins when its rank 0 holds the lock
on the whole file, that is, when every process of the previous job has finished or died: the system releases the locks
of a process that ends. Where a file system has no locks, jobs don't wait for each other; see _cut_off_saves.py for how
a mixture is then detected.

Locks are POSIX's, on bytes; those of flock, which frozen/files/drafts.py takes, are on whole files. A process loses all
POSIX locks that it has on a file when it closes any descriptor of that file, so it opens it once.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
from pathlib import Path
from time import sleep
from typing import IO

import torch.distributed as dist

from fsdp_zpp.collectives.agreement import agree, from_first_rank

logger = logging.getLogger("fsdp_zpp")

_HELD_BY_OTHERS = (errno.EACCES, errno.EAGAIN)
_HAS_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
PAUSE = 1.0
"""Seconds between two tries to begin."""


class Turn:
    """This job's turn to save, until it is released; making it waits for the turns of other jobs. Collective.

    Args:
        file: The file that ranks lock, the same on all of them; it exists as long as the turn.
        text: The content of the file.

    Raises:
        OSError: On every rank, if rank 0 can't write the file.
        RuntimeError: On every rank, if a rank finds its byte locked.
    """

    def __init__(self, file: Path, text: str = "") -> None:
        self._path, self._text, self._rank = file, text.encode(), dist.get_rank()
        self._file: IO[bytes] | None = None
        try:
            self._wait()
            agree(dist.group.WORLD, self._lock_own)  # of all ranks, before any of them writes
        except BaseException:
            self.abandon()
            raise

    def release(self) -> None:
        """Let other jobs save; call it on each rank when that has written, and on rank 0 when all have."""
        if self._rank == 0 and self.is_alone():
            self._path.unlink(missing_ok=True)
        self.abandon()

    def is_alone(self) -> bool:
        """Return whether no other job has begun since, as one may where there are no locks; call it on rank 0."""
        assert self._file is not None
        return _is_still(self._path, self._file) and os.pread(self._file.fileno(), 4096, 0) == self._text

    def abandon(self) -> None:
        """Let other jobs save, since this one can't complete its save."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _wait(self) -> None:
        # In short collectives: in one long one, the other ranks would run into the process group's timeout.
        for tries in itertools.count():
            # By the word of rank 0 alone, so that all ranks raise, begin or wait.
            outcome = from_first_rank(self._outcome() if self._rank == 0 else False)
            if isinstance(outcome, OSError):
                raise outcome
            if outcome:
                return
            if self._rank == 0 and tries % 600 == 0:
                logger.warning(
                    "another job is saving to %s, and this one waits until that is done; give each job a folder of its "
                    "own. If no other job runs, remove %s",
                    self._path.parent,
                    self._path,
                )
            sleep(PAUSE)

    def _outcome(self) -> bool | OSError:
        """Try to begin, on rank 0; return whether this job has begun, or the error."""
        try:
            self._try()
        except OSError as error:
            return error
        return self._file is not None

    def _try(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("a+b")
        try:
            if not (_locks_all(file) and _is_still(self._path, file)):
                file.close()  # another job has it, or has just removed it
                return
            file.truncate(0)
            file.write(self._text)
            file.flush()
        except BaseException:
            file.close()
            raise
        self._file = file

    def _lock_own(self) -> None:
        if self._file is not None:
            return
        try:
            self._file = self._path.open("r+b")
        except FileNotFoundError:  # a folder that rank 0 does not share, or whose change is not seen here yet
            return
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._rank)
        except OSError as error:
            if error.errno in _HELD_BY_OTHERS:  # rank 0 has ended since
                raise RuntimeError(
                    f"another job has begun to save to {self._path.parent} in place of this one, whose rank 0 has "
                    "ended: start this job again"
                ) from None
            if error.errno not in _HAS_NO_LOCKS:
                raise


def is_locked(file: Path) -> bool:
    """Return whether a job holds its turn, as far as this machine can tell."""
    try:
        mark = file.open("rb")
    except OSError:
        return False
    with mark:
        try:
            fcntl.lockf(mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in _HELD_BY_OTHERS
    return False


def _locks_all(file: IO[bytes]) -> bool:
    """Lock all bytes but that of rank 0 for a moment, and that of rank 0 for good; False if another job holds any."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.lockf(file, fcntl.LOCK_UN, 0, 1)
    except OSError as error:
        if error.errno in _HELD_BY_OTHERS:
            return False
        if error.errno not in _HAS_NO_LOCKS:
            raise
    return True


def _is_still(path: Path, file: IO[bytes]) -> bool:
    """Return whether the open ``file`` is still the one at ``path``, and was not removed."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return False
        raise
