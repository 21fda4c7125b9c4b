"""Several saves into one folder, killed anywhere: what loads is one whole base, and no files pile up."""

from __future__ import annotations

import fcntl
import functools
import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import frozen_files as files
from harness.disk import FILE_SIZE, Killed, at_steps, dying_at, quantized, stored_in
from harness.messages import collected
from harness.pool import Pool, start_method

from fsdp_zpp import save_frozen_params
from fsdp_zpp.frozen.files import drafts, tensor_files
from fsdp_zpp.frozen.files.drafts import Draft

NEVER = 10**6
base_of = functools.cache(quantized)


@pytest.fixture(autouse=True)
def _no_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def save(seed: int, folder: Path) -> None:
    save_frozen_params(base_of(seed), folder, max_file_size=FILE_SIZE)


def outputs(count: int) -> list[torch.Tensor]:
    return [files.output_of(files.rounded(files.make_base(seed))) for seed in range(count)]


def which(found: torch.Tensor, expected: list[torch.Tensor]) -> int:
    """The seed of the base that computes ``found``."""
    (seed,) = (seed for seed, output in enumerate(expected) if torch.equal(found, output))
    return seed


def steps_of_a_save(folder: Path) -> int:
    save(0, folder)
    with at_steps(lambda number: None) as steps:
        save(1, folder)
    return len(steps.begun)


def both(folder: Path, second_at: int, second_dies: int = NEVER, first_dies: int = NEVER) -> int:
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

    with at_steps(happen) as first, suppress(Killed):
        save(1, folder)
    if 1 not in made and "replace" in first.done:
        made.append(1)
    return [0, *made][-1]


def test_a_save_within_any_step_of_another_leaves_one_of_them_whole_and_nothing_else(tmp_path: Path) -> None:
    expected = outputs(3)
    steps = steps_of_a_save(tmp_path / "one")
    files_of_one = len(list((tmp_path / "one").iterdir()))
    for step in range(steps):
        folder = tmp_path / str(step)
        save(0, folder)
        last = both(folder, step)
        assert which(stored_in(folder), expected) == last, step
        assert len(list(folder.iterdir())) == files_of_one, step


def test_saves_that_are_killed_anywhere_leave_one_whole_base_and_the_next_clears_up(tmp_path: Path) -> None:
    expected = outputs(4)
    steps = steps_of_a_save(tmp_path / "one")
    files_of_one = len(list((tmp_path / "one").iterdir()))
    dice = random.Random(0)
    for trial in range(60):
        folder = tmp_path / str(trial)
        save(0, folder)
        second_at, second_dies, first_dies = (dice.randrange(steps) for _ in range(3))
        last = both(folder, second_at, second_dies, first_dies)
        assert which(stored_in(folder), expected) == last, trial
        save(3, folder)
        assert which(stored_in(folder), expected) == 3
        assert len(list(folder.iterdir())) == files_of_one, trial


def test_what_loads_while_a_save_replaces_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, open_file, opened = outputs(2), tensor_files.open_file, []

    def opens(at: int, path: Path, *rest: Any) -> Any:
        opened.append(path)
        if len(opened) == at:
            save(1, tmp_path)
        return open_file(path, *rest)

    save(0, tmp_path)
    count = len(list(tmp_path.glob("*.safetensors")))
    for at in range(1, count + 1):
        save(0, tmp_path)
        opened.clear()
        monkeypatch.setattr(tensor_files, "open_file", functools.partial(opens, at))
        assert which(stored_in(tmp_path), expected) == 1


def saved_at_once(folder: str) -> list[int]:
    """In a worker: which base loads each time after all ranks have saved one of their own into the same folder."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    base, expected = quantized(dist.get_rank(), alone), outputs(2)
    found = []
    for _ in range(10):
        dist.barrier()
        save_frozen_params(base, folder, max_file_size=FILE_SIZE)
        dist.barrier()
        found.append(which(stored_in(Path(folder), alone), expected))
    return found


def test_jobs_that_save_at_once_leave_one_of_their_bases(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    for found in pool(2).run(saved_at_once, str(tmp_path)):
        assert set(found) <= {0, 1}
        assert len(found) == 10


def die_in_a_save(folder: str) -> None:
    """In a process of its own."""
    draft = Draft(Path(folder))
    draft.file(1).write_bytes(b"a part of a base")
    os._exit(1)


def test_files_of_a_process_that_died_are_removed(tmp_path: Path) -> None:
    save(0, tmp_path)
    before = len(list(tmp_path.iterdir()))
    process = start_method().Process(target=die_in_a_save, args=(str(tmp_path),))
    process.start()
    process.join()
    assert len(list(tmp_path.iterdir())) == before + 2
    save(1, tmp_path)
    assert len(list(tmp_path.iterdir())) == before


def test_files_of_another_machine_stay_and_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(drafts, "_machine", lambda: "0" * 8)
        draft = Draft(tmp_path)
    draft.file(1).write_bytes(b"a part of a base")
    with collected() as records:
        save(0, tmp_path)
    assert draft.file(1).exists()
    (said,) = (text for level, text in records if level == "WARNING")
    assert said.startswith(f"{tmp_path} has 1 files of a save that is running on another machine or was cut off there")
    assert draft.file(1).name in said
    draft.publish("{}")


def test_a_draft_that_another_save_locks_first_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, others = fcntl.flock, []

    def slow(file: Any, operation: int) -> None:
        if not others:  # as a save that has found the draft and is about to remove it
            (found,) = tmp_path.iterdir()
            others.append(found.open("r+"))
            flock(others[0], operation)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", slow)
    draft = Draft(tmp_path)
    Path(others[0].name).unlink()
    others[0].close()
    draft.publish("{}")
    assert [path.name for path in tmp_path.iterdir()] == [files.INDEX]
