"""Saving a frozen base is all or nothing, wherever it is interrupted and whoever else saves into the folder."""

from __future__ import annotations

import functools
import os
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
from fsdp_zpp.frozen import base_files

# ---- the disk, step by step

FILE_SIZE = 20_000  # smaller than a base, so that there are several files
STEPS: list[tuple[Any, str]] = [
    (base_files, "save_file"),
    (os, "fsync"),
    *((Path, name) for name in ("mkdir", "open", "replace")),
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


def test_a_save_that_ends_anywhere_leaves_no_base_or_a_whole_one(tmp_path: Path) -> None:
    step, ended = 0, True
    while ended:
        for end in (dying_at, failing_at):
            folder = tmp_path / f"{end.__name__}{step}"
            with end(step) as steps, suppress(Killed, RuntimeError):
                save(0, folder)
            ended = len(steps.begun) > step
            if "replace" not in steps.done:
                with pytest.raises(ValueError, match="which save_frozen_params writes"):
                    stored_in(folder)
                assert end == dying_at or not folder.exists() or count_files(folder) == 0
                save(0, folder)
            assert which(stored_in(folder), 1) == 0
        step += 1
    assert set(steps.done) == {name for _, name in STEPS}
    to_disk = [name for name in steps.done if name in ("save_file", "fsync", "replace")]
    assert to_disk[-3:] == ["fsync", "fsync", "replace"]
    assert to_disk[:-3] == ["save_file", "fsync"] * (len(to_disk[:-3]) // 2)


def test_a_save_that_can_not_be_made_leaves_what_was_there(tmp_path: Path) -> None:
    for name in ("model.safetensors", "frozen_base-notes.txt", "frozen_base-mine.safetensors"):
        (tmp_path / name).write_text("mine")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, hard))
    try:
        with pytest.raises(RuntimeError, match="could not be saved to"):
            save_frozen_params(base_of(1), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert count_files(tmp_path) == 3
    with pytest.raises(RuntimeError, match="could not be saved to"):
        save(1, tmp_path / "model.safetensors")
    save(0, tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="has a base already, and a base is saved once"):
        save(1, tmp_path)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert which(stored_in(tmp_path), 2) == 0


# ---- several saves


@pytest.mark.parametrize("first_dies", [3, NEVER])
def test_a_save_within_another_leaves_one_whole_base(tmp_path: Path, first_dies: int) -> None:
    with at_steps(lambda number: None) as begun:
        save(0, tmp_path / "one")
    for second_at in range(len(begun.begun)):
        folder = tmp_path / str(second_at)

        def happen(number: int, second_at: int = second_at, folder: Path = folder) -> None:
            if number >= first_dies:
                raise Killed
            if number == second_at:
                with at_steps(lambda number: None):
                    save(2, folder)

        with at_steps(happen) as first, suppress(Killed):
            save(1, folder)
        if (folder / lora.INDEX).exists():
            assert which(stored_in(folder), 3) == (1 if "replace" in first.done else 2)


def saved_at_once(folder: str) -> list[int]:
    """In a worker: which base loads each time after all ranks have saved one of their own into the same folder."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    base = quantized(dist.get_rank(), alone)
    found = []
    for trial in range(5):
        dist.barrier()
        with suppress(ValueError):  # which is raised if the other has been faster
            save_frozen_params(base, Path(folder, str(trial)), max_file_size=FILE_SIZE)
        dist.barrier()
        found.append(which(stored_in(Path(folder, str(trial)), alone), 2))
    return found


def test_jobs_that_save_at_once_leave_one_of_their_bases(pool: Pools, tmp_path: Path) -> None:
    one, other = pool(2).run(saved_at_once, str(tmp_path))
    assert one == other
