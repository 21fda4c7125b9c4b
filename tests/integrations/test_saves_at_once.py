"""Two saves of one checkpoint at once: they take turns, or what they leave is known for a mixture."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest import mock

import killed_jobs
import pytest
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from harness import llama
from harness.messages import collected
from harness.pool import Pool, device_type, start_method
from hugging_face import new_job
from killed_jobs import Job, Moment

from fsdp_zpp import Strategy
from fsdp_zpp.integrations import _turns, accelerate
from fsdp_zpp.integrations._cut_off_saves import MarkedSave, check_complete

NO_LOCKS = mock.patch.object(fcntl, "lockf", side_effect=OSError(errno.ENOLCK, "No locks available"))
"""Patch that makes a file system without locks."""


def refusal(checkpoint: Path) -> str:
    """Return what is said of a checkpoint when it is to be loaded; nothing if it is whole."""
    try:
        check_complete(checkpoint)
    except ValueError as error:
        return str(error)
    return ""


def within_another(checkpoint: Path, place: Any, first_ends_first: bool) -> tuple[list[tuple[str, str]], str]:
    """In a worker: what is said if a save begins within another, and of what both leave."""
    with NO_LOCKS, collected() as records:
        saves = [MarkedSave(checkpoint, place=place) for _ in range(2)]
        if dist.get_rank() == 0 and place != "inside":
            checkpoint.parent.mkdir(exist_ok=True)
            checkpoint.write_text("of both")
        for save in saves if first_ends_first else reversed(saves):
            save.complete()
    return records, refusal(checkpoint)


@pytest.mark.parametrize("place", ["inside", "beside", "above"])
@pytest.mark.parametrize("first_ends_first", [True, False], ids=["first ends first", "first ends last"])
def test_without_locks_a_mixture_is_told(
    pool: Callable[[int], Pool], tmp_path: Path, place: Any, first_ends_first: bool
) -> None:
    checkpoint = tmp_path / "checkpoints" / "checkpoint"
    replies = pool(2).run(within_another, checkpoint, place, first_ends_first)
    assert "another job has saved" in replies[0][0][0][1]
    for _, text in replies:
        assert text.startswith(f"two jobs have saved {checkpoint} at the same time")
        assert "resume from another checkpoint" in text
    assert pool(2).run(saved, checkpoint, place) == ["", ""]
    assert {path.name for path in tmp_path.rglob("*")} == {"checkpoints", "checkpoint"}


def saved(checkpoint: Path, place: Any) -> str:
    """In a worker: what is said of a checkpoint after a save."""
    with MarkedSave(checkpoint, place=place):
        pass
    return refusal(checkpoint)


def saved_without_locks(checkpoint: Path) -> str:
    """In a worker: likewise, on a file system that has no locks."""
    with NO_LOCKS:
        return saved(checkpoint, "inside")


def test_saves_go_without_locks(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    assert pool(2).run(saved_without_locks, tmp_path / "checkpoint") == ["", ""]
    assert list((tmp_path / "checkpoint").iterdir()) == []


_held: Any = None


def begin(checkpoint: Path) -> None:
    """In a worker: begin to save."""
    global _held
    _held = MarkedSave(checkpoint, place="inside")


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
            ends = forker.submit(killed_jobs.run, both, folder, folder, tmp_path / f"notes {operation}").result()
            whole, refused = sorted(ends, key=lambda end: end.codes)
            assert whole.codes == [0, 0], whole.errors
            assert all("already exists" in error for error in refused.errors), (operation, refused.errors)
            assert [path.name for path in (folder / "checkpoints").iterdir()] == ["checkpoint_0"]


def waited(checkpoint: Path, tries: int) -> tuple[list[float], list[str]]:
    """In a worker: the pauses of a save while another job holds its turn for so many tries, and what is said."""
    pauses: list[float] = []
    refusals = [OSError(errno.EAGAIN, "held by others")] * (tries if dist.get_rank() == 0 else 0)
    locks = mock.patch.object(fcntl, "lockf", side_effect=chain(refusals, repeat(None)))
    with locks, mock.patch.object(_turns, "sleep", pauses.append), collected() as records:
        MarkedSave(checkpoint, place="inside").complete()
    return pauses, [text for _, text in records]


def test_a_job_waits_in_short_collectives_and_says_so_now_and_then(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    (pauses, warnings), *others = pool(2).run(waited, tmp_path, 700)
    assert pauses == [_turns.PAUSE] * 700
    assert len(warnings) == 2
    assert all(f"remove {tmp_path / 'save_was_cut_off'}" in text for text in warnings)
    assert others == [(pauses, [])]


def failed_on(checkpoint: Path, rank: int) -> str:
    """In a worker: what is said if a rank can't lock its byte, and that nothing is held afterwards."""
    error = OSError(errno.EIO if dist.get_rank() == rank else errno.ENOLCK, "broken")
    with mock.patch.object(fcntl, "lockf", side_effect=error), pytest.raises((OSError, RuntimeError)) as raised:
        MarkedSave(checkpoint, place="inside")
    MarkedSave(checkpoint, place="inside").complete()
    return str(raised.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_turn_that_cannot_begin_on_one_rank_raises_on_all(
    pool: Callable[[int], Pool], tmp_path: Path, rank: int
) -> None:
    assert all("broken" in error for error in pool(2).run(failed_on, tmp_path, rank))
    assert list(tmp_path.iterdir()) == []


def save_named_one(project: Path, fails: bool) -> str:
    """In a worker: save a checkpoint that accelerate names, and load the last one; returns the error, if any."""
    with new_job():
        configuration = ProjectConfiguration(project_dir=str(project), automatic_checkpoint_naming=True)
        accelerator = Accelerator(cpu=device_type() == "cpu", project_config=configuration)
        accelerate.use_strategy(accelerator, Strategy("GGG", gpus_per_node=1))
        accelerator.prepare(llama.make_base())
        if fails:
            accelerator.register_save_state_pre_hook(mock.Mock(side_effect=RuntimeError("cut off")))
        with pytest.raises(RuntimeError, match="cut off") if fails else nullcontext():
            accelerator.save_state()
        dist.barrier()  # until no rank holds the turn of the save that failed
        try:
            accelerator.load_state()
        except ValueError as error:
            return str(error)
        return ""


def test_a_checkpoint_that_accelerate_names_is_refused_if_it_was_cut_off(
    pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    whole, cut_off = tmp_path / "whole", tmp_path / "cut off"
    assert pool(2).run(save_named_one, whole, False) == ["", ""]
    for error in pool(2).run(save_named_one, cut_off, True):
        assert error.startswith(f"the last save of {cut_off / 'checkpoints' / 'checkpoint_0'} was cut off")
    assert [path.name for path in (cut_off / "checkpoints").iterdir()] == ["checkpoint_0"]
