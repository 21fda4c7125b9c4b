"""Checkpoints whose saves were cut off, over earlier ones of the same name.

Frameworks write over what is there, file by file. If a save is cut off, weights, optimizer and codec state may be of
two saves, which nothing in them tells. So a mark lies in the checkpoint, or beside one that is a file, from before the
first write until after the last. A checkpoint with a mark is refused. A new checkpoint needs none: what it lacks is
missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from fsdp_zpp.collectives.agreement import from_first_rank, run_on_first_rank

_TEXT = "This checkpoint is being saved, or its save was cut off. Its files may then be of two saves.\n"


@contextmanager
def saving_over(checkpoint: Path) -> Iterator[None]:
    """A context in which a framework saves, perhaps over an earlier checkpoint. Collective.

    Args:
        checkpoint: The framework's file or folder, the same on all ranks.
    """
    mark_incomplete(checkpoint)
    yield
    mark_complete(checkpoint)


def mark_incomplete(checkpoint: Path) -> None:
    """Mark a checkpoint that is to be saved over, if there is one. Collective, before anything is written.

    Raises:
        OSError: On every rank, if rank 0 can't write the mark.
    """
    run_on_first_rank(lambda: _mark(checkpoint.resolve()))


def mark_complete(checkpoint: Path) -> None:
    """Take the mark away. Collective, after all is written."""
    dist.barrier()
    run_on_first_rank(lambda: remove_marks(checkpoint))


def remove_marks(checkpoint: Path) -> None:
    """Remove the marks of a checkpoint, if there are any; for one rank alone."""
    for mark in _marks(checkpoint.resolve()):
        if mark.is_file():
            mark.unlink()


def check_complete(checkpoint: Path) -> None:
    """Raise if the last save of a checkpoint was cut off. Collective, before anything is loaded.

    Raises:
        ValueError: On every rank.
    """
    # Rank 0's word counts, since ranks may see a shared folder at different times.
    found = from_first_rank(next((mark for mark in _marks(checkpoint.resolve()) if mark.is_file()), None))
    if found is not None:
        raise ValueError(
            f"the last save of {checkpoint} was cut off, so that its weights, optimizer and codec state may be of two "
            f"saves: resume from another checkpoint. To load it as it is, remove {found}; codec state that was not "
            "saved with its weights is dropped then, with a warning"
        )


def _mark(target: Path) -> None:
    inside, beside = _marks(target)
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        (inside if target.is_dir() else beside).write_text(_TEXT)


def _marks(target: Path) -> tuple[Path, Path]:
    return target / "save_was_cut_off", target.with_name(f"{target.name}.save_was_cut_off")
