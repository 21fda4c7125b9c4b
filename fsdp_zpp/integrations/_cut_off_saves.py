"""Checkpoints whose saves were cut off.

Frameworks write file by file, over what is there. If a save is cut off, weights, optimizer and codec state may be of
two saves, and nothing in the files tells. So a mark lies in the checkpoint, or beside one that may be a file, from
before the first write until after the last. A checkpoint with a mark is refused.

Jobs that save into one checkpoint take turns (_turns.py), by locks on the mark. Where there are no locks, a later job
replaces the mark of the earlier one. A job that finds its mark replaced when it is done leaves a mark that says so,
which stays until the checkpoint is saved again.
"""

from __future__ import annotations

import logging
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch.distributed as dist

from fsdp_zpp.collectives.agreement import from_first_rank, run_on_first_rank

from ._companions import companions
from ._turns import Turn, is_locked

logger = logging.getLogger("fsdp_zpp")

_MARK = "save_was_cut_off"
_MIXED = "Two jobs have saved this checkpoint at the same time. Its files may be of both.\n"


class MarkedSave:
    """A context in which a checkpoint is saved, with a mark until that is complete. Collective, before any write.

    It waits until no other job is saving the checkpoint.

    Args:
        checkpoint: The framework's file or folder, the same on all ranks.
        place: Where the mark is: inside of a folder, beside what may be a file, or above, beside the folder that it is
            in, for a framework that refuses to save where anything is and counts what is beside it.
        written_last: The file in it that the framework writes when the mark is gone; an earlier one is removed.

    Raises:
        OSError: On every rank, if rank 0 can't write the mark.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        place: Literal["inside", "beside", "above"] = "beside",
        written_last: str | None = None,
    ) -> None:
        # Lightning's ModelCheckpoint(save_last="link") makes links to checkpoints.
        self._target = checkpoint.resolve()
        text = (
            "This checkpoint is being saved, or its save was cut off. Its files may then be of two saves.\n"
            f"{socket.gethostname()} {secrets.token_hex(8)}\n"
        )
        # Where all jobs find it, whatever they have made of the checkpoint so far.
        self._mark = dict(zip(("inside", "beside", "above"), _marks(self._target), strict=True))[place]
        self._turn = Turn(self._mark, text)
        try:
            run_on_first_rank(lambda: self._begin(text, written_last))
        except BaseException:
            self.abandon()
            raise

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.complete()
        else:
            self.abandon()

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
        else:
            if self._mark.parent.is_dir():  # another job may have removed the checkpoint
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
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    state = from_first_rank(_state_of(checkpoint, written_last) if is_first else _State())
    remedy = (
        "so that its weights, optimizer and codec state may be of two saves, or missing: resume from another "
        f"checkpoint. To load it as it is, remove {state.mark}; codec state that was not saved with its weights is "
        "dropped then, with a warning"
    )
    if state.unreadable:
        raise ValueError(f"whether {checkpoint} is complete can't be told: {state.unreadable}")
    if state.is_being_saved:
        raise ValueError(
            f"{checkpoint} is being saved by another job: wait until it is done, or resume from another checkpoint"
        )
    if state.text == _MIXED:
        raise ValueError(f"two jobs have saved {checkpoint} at the same time, {remedy}")
    if state.mark is not None:
        raise ValueError(f"the last save of {checkpoint} was cut off, {remedy}")
    if state.lacks_last_file:
        raise ValueError(
            f"{checkpoint} has no {written_last}, which is written last, so that its save was cut off: remove it, and "
            "resume from another checkpoint"
        )


@dataclass(frozen=True)
class _State:
    """State of a checkpoint, as its files tell it.

    Attributes:
        mark: Its mark, if there is one.
        text: Content of the mark.
        is_being_saved: Whether a job is saving it now.
        lacks_last_file: Whether the file is missing that a framework writes last.
        unreadable: Reason why nothing can be told, if so.
    """

    mark: Path | None = None
    text: str = ""
    is_being_saved: bool = False
    lacks_last_file: bool = False
    unreadable: str = ""


def _state_of(checkpoint: Path, written_last: str | None) -> _State:
    try:
        marks = [mark for mark in _marks(checkpoint.resolve()) if mark.is_file()]
        mark = next(iter(marks), None)
        lacks = written_last is not None and checkpoint.is_dir() and not (checkpoint / written_last).is_file()
        return _State(mark, "" if mark is None else _text_of(mark), any(map(is_locked, marks)), lacks)
    except OSError as error:
        return _State(unreadable=str(error))


def _text_of(mark: Path) -> str:
    with suppress(OSError):
        return mark.read_text()
    return ""


def _marks(target: Path) -> tuple[Path, Path, Path]:
    """Return the possible marks of a checkpoint: inside of it, beside it, and above."""
    above = target.parent.with_name(f"{target.parent.name}.{target.name}.{_MARK}")
    return *companions(target, _MARK), above
