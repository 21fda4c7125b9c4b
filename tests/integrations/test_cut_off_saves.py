"""A save over an earlier one that is cut off anywhere: what loads is one of both, or all ranks are told what to do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import models
from harness.adapter import Case
from harness.covering import over_each
from harness.cut_off import copies_of
from harness.fsdp2 import Fsdp2
from harness.messages import collected
from harness.pool import Pool
from harness.training import train
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from fsdp_zpp import Int4, Int4Delta, LocalSteps, LoCo, Strategy
from fsdp_zpp.integrations._codec_files import load_codec_state, save_codec_state
from fsdp_zpp.integrations._cut_off_saves import check_complete, saving_over

STRATEGIES = {
    "stateful": Strategy("IIG", weights=Int4Delta(64), gradients=Int4(64), error_feedback=LoCo(), gpus_per_node=1),
    "local steps": Strategy("III", local_steps=LocalSteps(3, codec=Int4(64)), gpus_per_node=1),
}
TOLD = ("remove", "resume from another checkpoint")
Outcome = list[float] | str
"""The losses after a checkpoint was loaded, or the error."""


class Job:
    """A model whose checkpoints are a folder, as of most frameworks, or one file beside that of codec state."""

    def __init__(self, strategy: Strategy) -> None:
        self.model = Fsdp2().make(Case(), strategy)
        self.optimizer = models.make_optimizer("adamw", self.model.parameters())

    def train(self, first: int, steps: int = 2) -> list[float]:
        return train(Fsdp2(), self.model, Case(steps=steps), optimizer=self.optimizer, first_step=first)

    def save(self, checkpoint: Path) -> None:
        with saving_over(checkpoint):
            if checkpoint.suffix:
                weights = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))
                if dist.get_rank() == 0:
                    torch.save(weights, checkpoint)
            else:
                weights, states = get_state_dict(self.model, self.optimizer)
                dcp.save({"model": weights}, checkpoint_id=checkpoint / "model")
                dcp.save({"optimizer": states}, checkpoint_id=checkpoint / "optimizer")
            save_codec_state(self.model, [self.optimizer], checkpoint)

    def load(self, checkpoint: Path) -> None:
        check_complete(checkpoint)
        if checkpoint.suffix:
            options = StateDictOptions(full_state_dict=True)
            set_model_state_dict(self.model, torch.load(checkpoint), options=options)
        else:
            weights, states = get_state_dict(self.model, self.optimizer)
            dcp.load({"model": weights}, checkpoint_id=checkpoint / "model")
            dcp.load({"optimizer": states}, checkpoint_id=checkpoint / "optimizer")
            set_state_dict(self.model, self.optimizer, model_state_dict=weights, optim_state_dict=states)
        load_codec_state(self.model, [self.optimizer], checkpoint)


def outcome(go_on: Callable[[], list[float]]) -> tuple[Outcome, bool]:
    """What comes of loading a checkpoint and training on, and whether this rank warns that codec state starts over."""
    with collected() as records:
        try:
            found: Outcome = go_on()
        except (ValueError, OSError, RuntimeError) as error:
            found = str(error)
    return found, any(level == "WARNING" and "start over" in text for level, text in records)


def cut_off(
    strategy: Strategy, name: str, folder: Path, marked: bool
) -> tuple[list[Outcome], list[tuple[Outcome, bool]]]:
    """In a worker: what comes of both saves, and of each state that the second leaves if it is cut off."""
    checkpoint = folder / "saved" / name
    checkpoint.parent.mkdir(exist_ok=True)
    job = Job(strategy)
    job.train(0)
    job.save(checkpoint)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(checkpoint.parent, folder / "older")
    job.train(2)
    dist.barrier()
    with copies_of(checkpoint.parent, folder / "copies", dist.get_rank()):
        job.save(checkpoint)
    dist.barrier()
    copies = sorted((folder / "copies").iterdir())
    if not marked and dist.get_rank() == 0:
        for mark in folder.glob("copies/**/*save_was_cut_off"):
            mark.unlink()
    dist.barrier()

    def goes_on_from(parent: Path) -> list[float]:
        again = Job(strategy)
        again.load(parent / name)
        return again.train(4)

    whole = [outcome(partial(goes_on_from, parent))[0] for parent in (folder / "older", checkpoint.parent)]
    return whole, [outcome(partial(goes_on_from, copy)) for copy in copies]


def check(by_rank: list[tuple[list[Outcome], list[tuple[Outcome, bool]]]]) -> None:
    """Fail if a cut-off save trains on from anything else than one of both, without a word."""
    older, newer = by_rank[0][0]
    assert isinstance(older, list)
    assert isinstance(newer, list)
    assert older != newer
    for copies in zip(*(copies for _, copies in by_rank), strict=True):
        found = [copy[0] for copy in copies]
        if all(isinstance(each, list) for each in found):
            assert found[0] in (older, newer) or any(warned for _, warned in copies), found
        else:
            assert all(isinstance(each, str) and all(word in each for word in TOLD) for each in found), found


@over_each(strategy=STRATEGIES, name=["folder", "file.ckpt"])
def test_a_mixture_of_two_saves_is_refused(
    pool: Callable[[int], Pool], tmp_path: Path, strategy: Strategy, name: str
) -> None:
    by_rank = pool(2).run(cut_off, strategy, name, tmp_path, True)
    check(by_rank)
    assert len(by_rank[0][1]) > 6


def test_codec_state_of_a_mixture_that_is_loaded_all_the_same_is_dropped(
    pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    """A user has removed the mark, as the error says."""
    check(pool(2).run(cut_off, STRATEGIES["local steps"], "file.ckpt", tmp_path, False))
