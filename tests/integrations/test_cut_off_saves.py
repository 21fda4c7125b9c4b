"""A save over an earlier one that is cut off anywhere: what loads is one of both, or all ranks are told what to do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from checkpoint_ways import FRAMEWORKS, IN_FILES, STRATEGIES, WAYS, InFolder
from cut_off import copies_of
from harness.covering import over_each
from harness.messages import collected
from harness.pool import Pool

from fsdp_zpp import Strategy

TOLD = ("remove", "resume from another checkpoint")
Outcome = list[float] | str
"""Losses after a checkpoint was loaded, or the error."""


def outcome(go_on: Callable[[], list[float]]) -> tuple[Outcome, bool]:
    """Return what comes of loading a checkpoint and training on, and whether codec state is lost, with a warning."""
    with collected() as records:
        try:
            result: Outcome = go_on()
        except (ValueError, OSError, RuntimeError) as error:
            result = str(error)
    return result, any(level == "WARNING" and "start over" in text for level, text in records)


def cut_off(
    way: InFolder, strategy: Strategy, folder: Path, marked: bool
) -> tuple[list[Outcome], list[tuple[Outcome, bool]]]:
    """In a worker: what comes of both saves, and of each state that the second leaves if it is cut off."""
    saved = folder / "saved"
    saved.mkdir(exist_ok=True)
    way.save(strategy, saved, 2)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(saved, folder / "older")
    dist.barrier()
    with copies_of(saved, folder / "copies", dist.get_rank()):
        way.save(strategy, saved, 4)
    dist.barrier()
    copies = sorted((folder / "copies").iterdir())
    if not marked and dist.get_rank() == 0:
        for mark in folder.glob("copies/**/*save_was_cut_off"):
            mark.unlink()
    dist.barrier()
    whole = [outcome(partial(way.go_on, strategy, each))[0] for each in (folder / "older", saved)]
    return whole, [outcome(partial(way.go_on, strategy, copy)) for copy in copies]


def check(by_rank: list[tuple[list[Outcome], list[tuple[Outcome, bool]]]]) -> None:
    """Fail if a cut-off save trains on from anything else than one of both, without a word."""
    older, newer = by_rank[0][0]
    assert isinstance(older, list)
    assert isinstance(newer, list)
    assert older != newer
    for copies in zip(*(copies for _, copies in by_rank), strict=True):
        outcomes = [copy[0] for copy in copies]
        if all(isinstance(each, list) for each in outcomes):
            assert outcomes[0] in (older, newer) or any(warned for _, warned in copies), outcomes
        else:
            assert all(isinstance(each, str) and all(word in each for word in TOLD) for each in outcomes), outcomes


@over_each(way=WAYS, strategy=STRATEGIES)
def test_a_mixture_of_two_saves_is_refused(
    pool: Callable[[int], Pool], tmp_path: Path, way: InFolder, strategy: Strategy
) -> None:
    by_rank = pool(2).run(cut_off, way, strategy, tmp_path, True)
    check(by_rank)
    assert len(by_rank[0][1]) > 6


@pytest.mark.slow
@over_each(way=FRAMEWORKS, strategy=STRATEGIES)
def test_a_mixture_of_two_saves_by_a_framework_is_refused(
    pool: Callable[[int], Pool], tmp_path: Path, way: InFolder, strategy: Strategy
) -> None:
    check(pool(2).run(cut_off, way, strategy, tmp_path, True))


def cut_off_new(way: InFolder, strategy: Strategy, folder: Path) -> tuple[list[Outcome], list[tuple[Outcome, bool]]]:
    """In a worker: what comes of a save, and of each state that it leaves if it is cut off."""
    saved = folder / "saved"
    saved.mkdir(exist_ok=True)
    dist.barrier()
    with copies_of(saved, folder / "copies", dist.get_rank()):
        way.save(strategy, saved, 2)
    dist.barrier()
    copies = [copy for copy in sorted((folder / "copies").iterdir()) if list(copy.glob("*/*"))]
    whole = outcome(partial(way.go_on, strategy, saved))[0]
    return [[], whole], [outcome(partial(way.go_on, strategy, copy)) for copy in copies]


@pytest.mark.slow
@over_each(way={name: FRAMEWORKS[name] for name in ("accelerate", "Trainer")})
def test_a_new_checkpoint_that_lacks_something_is_refused(
    pool: Callable[[int], Pool], tmp_path: Path, way: InFolder
) -> None:
    check(pool(2).run(cut_off_new, way, STRATEGIES["stateful"], tmp_path))


@over_each(way=IN_FILES)
def test_codec_state_of_a_mixture_that_is_loaded_all_the_same_is_dropped(
    pool: Callable[[int], Pool], tmp_path: Path, way: InFolder
) -> None:
    """Load after a user has removed the mark, as the error says."""
    check(pool(2).run(cut_off, way, STRATEGIES["stateful"], tmp_path, False))
