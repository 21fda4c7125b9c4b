"""Two saves of one checkpoint at once: they take turns, or what they leave is known for a mixture."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from harness import jobs, llama
from harness.hugging_face import new_job
from harness.jobs import Job, Moment
from harness.messages import collected
from harness.pool import Pool, device_type, start_method

from fsdp_zpp import Strategy
from fsdp_zpp.integrations import accelerate
from fsdp_zpp.integrations._cut_off_saves import MarkedSave, check_complete, saving

NO_LOCKS = mock.patch.object(fcntl, "lockf", side_effect=OSError(errno.ENOLCK, "No locks available"))
"""A file system that has none."""


def refusal(checkpoint: Path) -> str:
    """What is said of a checkpoint when it is to be loaded; nothing if it is whole."""
    try:
        check_complete(checkpoint)
    except ValueError as error:
        return str(error)
    return ""


def within_another(checkpoint: Path, is_folder: bool, first_ends_first: bool) -> tuple[list[tuple[str, str]], str]:
    """In a worker: what is said if a save begins within another, and of what both leave."""
    with NO_LOCKS, collected() as records:
        saves = [MarkedSave(checkpoint, is_folder=is_folder) for _ in range(2)]
        if dist.get_rank() == 0 and not is_folder:
            checkpoint.write_text("of both")
        for save in saves if first_ends_first else reversed(saves):
            save.complete()
    return records, refusal(checkpoint)


@pytest.mark.parametrize("is_folder", [True, False], ids=["folder", "file"])
@pytest.mark.parametrize("first_ends_first", [True, False], ids=["first ends first", "first ends last"])
def test_without_locks_a_mixture_is_told(
    pool: Callable[[int], Pool], tmp_path: Path, is_folder: bool, first_ends_first: bool
) -> None:
    checkpoint = tmp_path / "checkpoint"
    replies = pool(2).run(within_another, checkpoint, is_folder, first_ends_first)
    assert "another job has saved" in replies[0][0][0][1]
    for _, said in replies:
        assert said.startswith(f"two jobs have saved {checkpoint} at the same time")
        assert "resume from another checkpoint" in said
    assert pool(2).run(saved, checkpoint, is_folder) == ["", ""]
    assert {path.name for path in tmp_path.rglob("*")} == {"checkpoint"}


def saved(checkpoint: Path, is_folder: bool) -> str:
    """In a worker: what is said of a checkpoint after a save."""
    with saving(checkpoint, is_folder=is_folder):
        pass
    return refusal(checkpoint)


def saved_without_locks(checkpoint: Path) -> str:
    """In a worker: likewise, on a file system that has no locks."""
    with NO_LOCKS:
        return saved(checkpoint, True)


def test_saves_go_without_locks(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    assert pool(2).run(saved_without_locks, tmp_path / "checkpoint") == ["", ""]
    assert list((tmp_path / "checkpoint").iterdir()) == []


_held: Any = None


def begin(checkpoint: Path) -> None:
    """In a worker: begin to save."""
    global _held
    _held = MarkedSave(checkpoint, is_folder=True)


def complete() -> None:
    """In a worker: complete that."""
    _held.complete()


def fail() -> None:
    """In a worker: end it because of an error."""
    _held.abandon()


def test_what_is_being_saved_is_not_said_to_be_cut_off(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    pool(2).run(begin, tmp_path)
    assert refusal(tmp_path) == (
        f"{tmp_path} is being saved by another job: wait until it is done, or resume from another checkpoint"
    )
    pool(2).run(complete)
    assert refusal(tmp_path) == ""
    pool(2).run(begin, tmp_path)
    pool(2).run(fail)
    assert refusal(tmp_path).startswith(f"the last save of {tmp_path} was cut off")


def save_named(project: Path) -> None:
    """In a process of a job: save a checkpoint that accelerate names."""
    with new_job():
        configuration = ProjectConfiguration(project_dir=str(project), automatic_checkpoint_naming=True)
        accelerator = Accelerator(cpu=True, project_config=configuration)
        accelerate.use_strategy(accelerator, Strategy("GGG"))
        accelerator.prepare(llama.make_base())
        accelerator.save_state()


@pytest.mark.slow
@pytest.mark.skipif(device_type() == "cuda", reason="a process that has used a GPU can't be forked")
def test_of_jobs_whose_checkpoints_accelerate_names_one_is_refused(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, start_method()) as forker:
        for operation in range(6):
            folder = tmp_path / str(operation)
            folder.mkdir()
            both = [Job(save_named, pauses_at=Moment(0, operation)), Job(save_named)]
            ends = forker.submit(jobs.run, both, folder, folder, tmp_path / f"notes {operation}").result()
            whole, refused = sorted(ends, key=lambda end: end.codes)
            assert whole.codes == [0, 0], whole.errors
            assert all("already exists" in error for error in refused.errors), (operation, refused.errors)
            assert [path.name for path in (folder / "checkpoints").iterdir()] == ["checkpoint_0"]
