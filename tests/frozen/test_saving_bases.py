"""Saving a frozen base is all or nothing, wherever it is interrupted and whoever else saves into the folder."""

from __future__ import annotations

import functools
import os
import random
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import lora, models
from harness.pool import Pools
from torch import Tensor

from fsdp_zpp import load_frozen_params, quantize_frozen_params, save_frozen_params
from fsdp_zpp.frozen import base_files, checkpoint_reading

# ---- the disk, step by step

FILE_SIZE = 20_000  # smaller than a base, so that there are several files
STEPS: list[tuple[Any, str]] = [
    (base_files, "save_file"),
    (os, "fsync"),
    *((Path, name) for name in ("mkdir", "open", "iterdir", "replace", "unlink")),
]
_ORIGINALS = [
    # The order of steps is what matters, and to wait for a disk takes long.
    (owner, name, (lambda descriptor: None) if name == "fsync" else getattr(owner, name))
    for owner, name in STEPS
]


class Killed(BaseException):
    """Ends a process: nothing that it does afterwards has an effect."""


@dataclass
class Steps:
    """The steps of a save that were begun, and those that had an effect."""

    begun: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)


@contextmanager
def at_steps(happen: Callable[[int], None]) -> Iterator[Steps]:
    """Let ``happen(number)`` run before each step of a save; within it, a context like this has its own steps."""
    steps = Steps()

    def watched(name: str, original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            steps.begun.append(name)
            happen(len(steps.begun) - 1)
            result = original(*arguments, **options)
            steps.done.append(name)
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name, original in _ORIGINALS:
            patch.setattr(owner, name, watched(name, original))
        yield steps


def dying_at(step: int) -> AbstractContextManager[Steps]:

    def happen(number: int) -> None:
        if number >= step:
            raise Killed

    return at_steps(happen)


def failing_at(step: int) -> AbstractContextManager[Steps]:

    def happen(number: int) -> None:
        if number == step:
            raise OSError("No space left on device")

    return at_steps(happen)


def quantized(seed: int, group: dist.ProcessGroup | None = None) -> models.Net:
    """A base on the CPU that differs from those of other seeds."""
    base = lora.make_base(seed)
    quantize_frozen_params(base, lora.CODEC, process_group=group, device="cpu")
    return base


def stored_in(folder: Path, group: dist.ProcessGroup | None = None) -> Tensor:
    net = lora.make_empty()
    load_frozen_params(net, folder, process_group=group, device="cpu")
    return lora.output_of(net)


NEVER = 10**6
base_of = functools.cache(quantized)


@pytest.fixture(autouse=True)
def _no_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def save(seed: int, folder: Path) -> None:
    save_frozen_params(base_of(seed), folder, max_file_size=FILE_SIZE)


def which(found: Tensor, count: int) -> int:
    """The seed, of ``count``, of the base that computes ``found``."""
    (seed,) = (seed for seed in range(count) if torch.equal(found, output_of(seed)))
    return seed


@functools.cache
def output_of(seed: int) -> Tensor:
    return lora.output_of(lora.rounded(lora.make_base(seed)))


def count_files(folder: Path) -> int:
    return len(list(folder.iterdir()))


# ---- one save


def test_a_save_that_ends_anywhere_leaves_the_older_base_or_the_newer(tmp_path: Path) -> None:
    step, ended = 0, True
    while ended:
        for end in (dying_at, failing_at):
            folder = tmp_path / f"{end.__name__}{step}"
            save(0, folder)
            with end(step) as steps, suppress(Killed, RuntimeError):
                save(1, folder)
            ended = len(steps.begun) > step
            assert which(stored_in(folder), 2) == ("replace" in steps.done)
            save(1, folder)  # which also clears up
            assert which(stored_in(folder), 2) == 1
            assert count_files(folder) == count_files(tmp_path / "dying_at0")
        step += 1
    assert set(steps.done) == {name for _, name in STEPS}
    to_disk = [name for name in steps.done if name in ("save_file", "fsync", "replace")]
    assert to_disk[-4:] == ["fsync", "fsync", "replace", "fsync"]
    assert to_disk[:-4] == ["save_file", "fsync"] * (len(to_disk[:-4]) // 2)


def test_a_save_that_can_not_be_made_leaves_what_was_there(tmp_path: Path) -> None:
    save_frozen_params(base_of(0), tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    said = r"could not be saved to .*; what was there before still is"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, hard))
    try:
        with pytest.raises(RuntimeError, match=said):
            save_frozen_params(base_of(1), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert which(stored_in(tmp_path), 2) == 0
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RuntimeError, match=said):
        save(1, tmp_path / "file")


def test_a_loaded_base_outlives_its_files_and_other_files_stay(tmp_path: Path) -> None:
    for name in ("model.safetensors", "frozen_base-notes.txt", "frozen_base-mine.safetensors"):
        (tmp_path / name).write_text("mine")
    save_frozen_params(base_of(1), tmp_path)
    save_frozen_params(base_of(0), tmp_path)
    assert count_files(tmp_path) == 5
    net = lora.make_empty()
    load_frozen_params(net, tmp_path)
    save_frozen_params(net, tmp_path)  # over the files that it came from
    assert which(lora.output_of(net), 1) == which(stored_in(tmp_path), 1) == 0


# ---- several saves


@contextmanager
def may_say(error: type[Exception], text: str) -> Iterator[None]:
    """Return a context that may raise an error, if that says ``text``."""
    try:
        yield
    except error as raised:
        if text not in str(raised):
            raise


IS_LATE = RuntimeError, "what was there before still is"
"""Error of a save whose files another one has removed."""


def both(folder: Path, second_at: int, second_dies: int, first_dies: int) -> int:
    """Save base 1, and base 2 within a step of that; returns the one whose index was made last, 0 if none was."""
    made: list[int] = []

    def happen(number: int) -> None:
        if number >= first_dies:
            raise Killed
        if number == second_at:
            made.extend([1] * ("replace" in first.done))
            with dying_at(second_dies) as second, suppress(Killed):
                save(2, folder)
            made.extend([2] * ("replace" in second.done))

    with at_steps(happen) as first, suppress(Killed), may_say(*IS_LATE):
        save(1, folder)
    if 1 not in made and "replace" in first.done:
        made.append(1)
    return [0, *made][-1]


def test_saves_within_each_other_that_end_anywhere_leave_one_whole_base_and_the_next_clears_up(tmp_path: Path) -> None:
    save(0, tmp_path / "one")
    files_of_one = count_files(tmp_path / "one")
    with at_steps(lambda number: None) as begun:
        save(1, tmp_path / "one")
    steps, dice = len(begun.begun), random.Random(0)
    nobody_dies = [(second_at, NEVER, NEVER) for second_at in range(steps)]
    for trial in nobody_dies + [tuple(dice.randrange(steps) for _ in range(3)) for _ in range(30)]:
        folder = tmp_path / "-".join(map(str, trial))
        save(0, folder)
        last = both(folder, *trial)
        assert which(stored_in(folder), 3) == last, trial
        assert count_files(folder) == files_of_one or trial not in nobody_dies
        save(3, folder)
        assert which(stored_in(folder), 4) == 3
        assert count_files(folder) == files_of_one, trial


def test_what_loads_while_a_save_replaces_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_file, opened = checkpoint_reading.open_file, []

    def opens(at: int, path: Path, *rest: Any) -> Any:
        opened.append(path)
        if len(opened) == at:
            save(1, tmp_path)
        return open_file(path, *rest)

    save(0, tmp_path)
    for at in range(1, len(list(tmp_path.glob("*.safetensors"))) + 1):
        save(0, tmp_path)
        opened.clear()
        monkeypatch.setattr(checkpoint_reading, "open_file", functools.partial(opens, at))
        assert which(stored_in(tmp_path), 2) == 1


def saved_at_once(folder: str) -> list[int]:
    """In a worker: which base loads each time after all ranks have saved one of their own into the same folder."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    base = quantized(dist.get_rank(), alone)
    found = []
    for _ in range(5):
        dist.barrier()
        with may_say(*IS_LATE):
            save_frozen_params(base, folder, max_file_size=FILE_SIZE)
        dist.barrier()
        with may_say(ValueError, "there is no file"):
            found.append(which(stored_in(Path(folder), alone), 2))
    return found


def test_jobs_that_save_at_once_leave_one_of_their_bases_or_it_is_refused(pool: Pools, tmp_path: Path) -> None:
    for found in pool(2).run(saved_at_once, str(tmp_path)):
        assert set(found) <= {0, 1}
