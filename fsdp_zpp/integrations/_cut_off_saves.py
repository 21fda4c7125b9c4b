"""Checkpoints whose saves were cut off.

Frameworks write file by file, over what is there. If a save is cut off, weights, optimizer and codec state may be of
two saves, which nothing in them tells. So a mark lies in the checkpoint, or beside one that may be a file, from before
the first write until after the last. A checkpoint with a mark is refused.

Jobs that save into one checkpoint take turns (_turns.py), by locks on the mark. Where they can't, since the file system
has no locks, the later has replaced the mark of the earlier when that is done, or removed it. The earlier then leaves a
mark for good, which the later does not remove, since it is not its own.
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from fsdp_zpp.collectives.agreement import from_first_rank, run_on_first_rank

from ._turns import Turn, is_locked

logger = logging.getLogger("fsdp_zpp")

_MARK = "save_was_cut_off"
_MIXED = "Two jobs have saved this checkpoint at the same time. Its files may be of both.\n"


@contextmanager
def saving(checkpoint: Path, *, is_folder: bool = False) -> Iterator[None]:
    """A context in which a framework saves, perhaps over an earlier checkpoint. Collective. See :class:`MarkedSave`."""
    save = MarkedSave(checkpoint, is_folder=is_folder)
    try:
        yield
    except BaseException:
        save.abandon()
        raise
    save.complete()


class MarkedSave:
    """A save of a checkpoint that has a mark until it is complete. Collective, before anything is written.

    It waits until no other job is saving the checkpoint.

    Args:
        checkpoint: The framework's file or folder, the same on all ranks.
        is_folder: Whether it is to be a folder.
        written_last: The file in it that the framework writes when the mark is gone; an earlier one is removed.

    Raises:
        OSError: On every rank, if rank 0 can't write the mark.
    """

    def __init__(self, checkpoint: Path, *, is_folder: bool = False, written_last: str | None = None) -> None:
        # Lightning's ModelCheckpoint(save_last="link") makes links to checkpoints.
        self._target = checkpoint.resolve()
        text = (
            "This checkpoint is being saved, or its save was cut off. Its files may then be of two saves.\n"
            f"{socket.gethostname()} {secrets.token_hex(8)}\n"
        )
        # Where all jobs find it, whatever they have made of the checkpoint so far.
        inside, beside = _marks(self._target)
        self._mark = inside if is_folder else beside
        self._turn = Turn(self._mark, text)
        run_on_first_rank(lambda: self._begin(text, written_last))

    def complete(self) -> None:
        """Take the mark away. Collective, after all is written."""
        dist.barrier()
        run_on_first_rank(self._end)
        self._turn.release()

    def abandon(self) -> None:
        """Leave the mark; other jobs may save."""
        self._turn.abandon()

    def _begin(self, text: str, written_last: str | None) -> None:
        if self._mark.parent != self._target and self._target.is_dir():  # which users may move
            (self._target / _MARK).write_text(text)
        if written_last is not None:
            (self._target / written_last).unlink(missing_ok=True)

    def _end(self) -> None:
        if self._turn.is_alone():
            for mark in _marks(self._target):
                if mark != self._mark and mark.is_file():  # its own goes last, with the turn
                    mark.unlink()
        elif self._mark.parent.is_dir():
            self._mark.write_text(_MIXED)
            logger.warning(
                "another job has saved %s at the same time, so that its files may be of both; give each job a folder "
                "of its own",
                self._target,
            )


def remove_marks(checkpoint: Path) -> None:
    """Remove the marks of a checkpoint, if there are any; for one rank alone."""
    for mark in _marks(checkpoint.resolve()):
        if mark.is_file():
            mark.unlink()


def check_complete(checkpoint: Path, *, written_last: str | None = None) -> None:
    """Raise if the last save of a checkpoint was cut off. Collective, before anything is loaded.

    Args:
        checkpoint: The framework's file or folder.
        written_last: The file in it that the framework writes last.

    Raises:
        ValueError: On every rank.
    """
    # Rank 0's word counts, since ranks may see a shared folder at different times.
    mark, is_saved, text, lacks = from_first_rank(_found(checkpoint, written_last))
    remedy = (
        "so that its weights, optimizer and codec state may be of two saves, or missing: resume from another "
        f"checkpoint. To load it as it is, remove {mark}; codec state that was not saved with its weights is dropped "
        "then, with a warning"
    )
    if is_saved:
        raise ValueError(
            f"{checkpoint} is being saved by another job: wait until it is done, or resume from another checkpoint"
        )
    if text == _MIXED:
        raise ValueError(f"two jobs have saved {checkpoint} at the same time, {remedy}")
    if mark is not None:
        raise ValueError(f"the last save of {checkpoint} was cut off, {remedy}")
    if lacks:
        raise ValueError(
            f"{checkpoint} has no {written_last}, which is written last, so that its save was cut off: remove it, and "
            "resume from another checkpoint"
        )


def _found(checkpoint: Path, written_last: str | None) -> tuple[Path | None, bool, str, bool]:
    """The mark, if there is one, whether a job is saving now, the text of the mark, and whether the last file lacks."""
    target = checkpoint.resolve()
    marks = [mark for mark in _marks(target) if mark.is_file()]
    mark, is_saved = next(iter(marks), None), any(map(is_locked, marks))
    lacks = written_last is not None and checkpoint.is_dir() and not (checkpoint / written_last).is_file()
    return mark, is_saved, "" if mark is None else _text_of(mark), lacks


def _text_of(mark: Path) -> str:
    with suppress(OSError):
        return mark.read_text()
    return ""


def _marks(target: Path) -> tuple[Path, Path]:
    """Where marks may be: in a checkpoint, or beside it."""
    return target / _MARK, target.with_name(f"{target.name}.{_MARK}")
