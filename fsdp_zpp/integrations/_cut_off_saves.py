"""Checkpoints whose saves were cut off.

Frameworks write file by file, over what is there. If a save is cut off, weights, optimizer and codec state may be of
two saves, which nothing in them tells. So a mark lies in the checkpoint, or beside one that is a file, from before the
first write until after the last. A checkpoint with a mark is refused. Where it is not known whether a new checkpoint is
to be a file or a folder, it has no mark: what it lacks is missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from fsdp_zpp.collectives.agreement import from_first_rank, run_on_first_rank

_TEXT = "This checkpoint is being saved, or its save was cut off. Its files may then be of two saves.\n"


@contextmanager
def saving(checkpoint: Path, *, is_folder: bool = False) -> Iterator[None]:
    """A context in which a framework saves, perhaps over an earlier checkpoint. Collective.

    Args:
        checkpoint: The framework's file or folder, the same on all ranks.
        is_folder: Whether it is to be a folder.
    """
    mark_incomplete(checkpoint, is_folder=is_folder)
    yield
    mark_complete(checkpoint)


def mark_incomplete(checkpoint: Path, *, is_folder: bool = False) -> None:
    """Mark a checkpoint that is to be saved. Collective, before anything is written. Arguments as of :func:`saving`.

    Raises:
        OSError: On every rank, if rank 0 can't write the mark.
    """
    run_on_first_rank(lambda: _mark(checkpoint.resolve(), is_folder))


def mark_complete(checkpoint: Path) -> None:
    """Take the mark away. Collective, after all is written."""
    dist.barrier()
    run_on_first_rank(lambda: remove_marks(checkpoint))


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
    lacks = written_last is not None and checkpoint.is_dir() and not (checkpoint / written_last).is_file()
    mark = next((mark for mark in _marks(checkpoint.resolve()) if mark.is_file()), None)
    found, lacks = from_first_rank((mark, lacks))
    if found is not None:
        raise ValueError(
            f"the last save of {checkpoint} was cut off, so that its weights, optimizer and codec state may be of two "
            f"saves, or missing: resume from another checkpoint. To load it as it is, remove {found}; codec state that "
            "was not saved with its weights is dropped then, with a warning"
        )
    if lacks:
        raise ValueError(
            f"{checkpoint} has no {written_last}, which is written last, so that its save was cut off: remove it, and "
            "resume from another checkpoint"
        )


def _mark(target: Path, is_folder: bool) -> None:
    inside, beside = _marks(target)
    if is_folder:
        target.mkdir(parents=True, exist_ok=True)
    if is_folder or target.exists():
        (inside if target.is_dir() else beside).write_text(_TEXT)


def _marks(target: Path) -> tuple[Path, Path]:
    return target / "save_was_cut_off", target.with_name(f"{target.name}.save_was_cut_off")
