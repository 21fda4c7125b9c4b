"""A training in which ranks are killed goes on from its last checkpoint as if none had been."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import lora, models
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, over_adapters, over_each
from harness.messages import collected
from harness.pool import Pool, WorkerError
from harness.training import load, save
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner

from fsdp_zpp import (
    CodecState,
    Int4,
    Int4Delta,
    Int8,
    LoCo,
    Strategy,
    load_frozen_params,
    quantize_frozen_params,
    save_frozen_params,
)

ZEROPP = Strategy.zeropp(weights=Int8(64), gradients=Int4(64))
STRATEGIES = {
    "zeropp": ZEROPP,
    "LoCo": replace(ZEROPP, error_feedback=LoCo(reset_every=7)),
    "Int4Delta": replace(ZEROPP, weights=Int4Delta(64, Int8(64))),
    "frozen": replace(ZEROPP, frozen=Int8(64)),
    "LoCo and Int4Delta": replace(ZEROPP, error_feedback=LoCo(reset_every=7), weights=Int4Delta(64, Int8(64))),
}
BATCH, SAVE_EVERY = 8, 3
MOMENTS = ("saving", "saved", "forward", "loss", "backward", "optimizer")
"""When a rank may be killed, in the order in which they come in a step."""
Death = tuple[int, int, int]
"""The step, the moment by its place, and the rank."""


@dataclass(frozen=True)
class Job:
    """A training, one start of which may be killed.

    Args:
        adapter: How it is sharded.
        strategy: The name of a strategy.
        folder: Where checkpoints go.
        steps: How many.
        death: When a rank is killed, if any is.
        loads_base: Whether a frozen base is loaded from its files rather than quantized anew.
    """

    adapter: Adapter
    strategy: str
    folder: Path
    steps: int
    death: Death | None = None
    loads_base: bool = False

    def make(self) -> Any:
        strategy = replace(STRATEGIES[self.strategy], gpus_per_node=max(1, dist.get_world_size() // 2))
        if strategy.frozen is None:
            return self.adapter.make(Case(model=(("blocks", 2),)), strategy)
        net = lora.make_net(blocks=2, rank=4)  # a row for each rank, or FSDP1, stock too, can't load its checkpoints
        if self.loads_base:
            for parameter in net.parameters():
                if not parameter.requires_grad and parameter.dim() == 2:
                    parameter.zero_()
            load_frozen_params(net, self.folder / "base", gpus_per_node=strategy.gpus_per_node)
        else:
            quantize_frozen_params(net, strategy.frozen, gpus_per_node=strategy.gpus_per_node)
            if not (self.folder / "base").exists():
                save_frozen_params(net, self.folder / "base")
        return self.adapter.shard(net, Case(), strategy)

    def reach(self, step: int, moment: str) -> None:
        """Be killed at the first moment that is not before the one of death."""
        death = self.death
        if death and death[2] == dist.get_rank() and death[:2] <= (step, MOMENTS.index(moment)):
            os.kill(os.getpid(), signal.SIGKILL)

    def step(self, model: Any, optimizer: Any, step: int) -> float:
        self.reach(step, "forward")
        tokens = torch.stack([_sample(BATCH * step + place) for place in range(BATCH)])
        loss = models.loss_of(model, tokens[dist.get_rank() :: dist.get_world_size()])
        self.reach(step, "loss")
        loss.register_hook(lambda gradient: self.reach(step, "backward"))
        loss.backward()
        self.adapter.clip(model, 0.5)
        self.reach(step, "optimizer")
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def save(self, model: Any, optimizer: Any, step: int) -> None:
        self.adapter.before_load(model)
        unfinished = self.folder / f"unfinished-{step}"
        save(model, optimizer, CodecState(model), str(unfinished))
        self.reach(step, "saving")
        dist.barrier()
        if dist.get_rank() == 0:
            unfinished.rename(self.folder / f"step-{step}")
        self.reach(step, "saved")
        dist.barrier()

    def load(self, model: Any, optimizer: Any) -> int:
        """Go on from the newest checkpoint; the step that comes next."""
        if dist.get_rank() == 0:
            for unfinished in self.folder.glob("unfinished-*"):
                shutil.rmtree(unfinished)
        dist.barrier()
        first = max((int(path.name.removeprefix("step-")) for path in self.folder.glob("step-*")), default=0)
        if first:
            load(model, optimizer, None, str(self.folder / f"step-{first}"))
            # Another number of ranks finds no entries of its own.
            planner = DefaultLoadPlanner(allow_partial_load=True)
            dcp.load({"codecs": CodecState(model)}, checkpoint_id=self.folder / f"step-{first}", planner=planner)
        return first


def _sample(i: int) -> Tensor:
    return torch.randint(61, (models.SEQUENCE + 1,), generator=torch.Generator().manual_seed(i)).to(models.device())


def run(job: Job, saves: bool) -> tuple[dict[int, float], dict[str, Tensor], list[str]]:
    """In a worker: run the job from wherever it has come to; the losses of steps, weights in the end, and warnings."""
    losses = {}
    with collected() as records:
        model = job.make()
        optimizer = models.make_optimizer("adamw", (p for p in model.parameters() if p.requires_grad))
        first = job.load(model, optimizer)
        for step in range(first, job.steps):
            if saves and step % SAVE_EVERY == 0 and step > first:
                job.save(model, optimizer, step)
            losses[step] = job.step(model, optimizer, step)
    warnings = [text for level, text in records if level == "WARNING"]
    return losses, job.adapter.full_weights(model), warnings


def check_kills(workers: Pool, job: Job, kills: int) -> list[dict[int, float]]:
    """Fail unless a job whose starts are killed ends as one that is not; return the losses of that, by rank."""
    job.folder.mkdir()
    expected = workers.run(run, job, False)
    chance = random.Random(f"{job.adapter} {job.strategy}")
    deaths = sorted(
        (chance.randrange(1, job.steps), chance.randrange(len(MOMENTS)), chance.randrange(workers.world))
        for _ in range(kills)
    )
    for at, death in enumerate(deaths):
        with pytest.raises(WorkerError):
            workers.run(run, replace(job, death=death, loads_base=at % 2 == 1), True)
    ended = workers.run(run, replace(job, loads_base=kills % 2 == 1), True)
    for (losses, weights, _), (of_job, expected_weights, _) in zip(ended, expected, strict=True):
        assert losses == {step: of_job[step] for step in losses}
        assert models.distance(weights, expected_weights) == 0
    return [losses for losses, _, _ in expected]


@over_each(adapter=ADAPTERS, strategy=["frozen", "LoCo and Int4Delta"])
def test_a_killed_rank_changes_nothing_and_other_ranks_go_on_from_the_same_checkpoint(
    pool: Callable[[int], Pool], tmp_path: Path, adapter: Adapter, strategy: str
) -> None:
    job = Job(adapter, strategy, tmp_path / "job", steps=5)
    before = check_kills(pool(2), job, kills=1)
    after = pool(4).run(run, job, True)
    warnings = [text for _, _, texts in after for text in texts if "errors start from zero" in text]
    assert len(warnings) == (strategy != "frozen")
    for text in warnings:
        assert "weights are sent whole" in text
        assert "saved on 2 ranks as 2 nodes x 1, but this is 4 ranks as 2 nodes x 2" in text
    assert list(after[0][0]) == [3, 4]
    for step in after[0][0]:
        now = sum(losses[step] for losses, _, _ in after) / 4
        assert now == pytest.approx(sum(losses[step] for losses in before) / 2, rel=1e-2)  # what codecs round otherwise


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zeropp", "LoCo", "Int4Delta", "frozen"])
@over_adapters
def test_ten_killed_ranks_change_nothing(
    pool: Callable[[int], Pool], tmp_path: Path, adapter: Adapter, strategy: str
) -> None:
    check_kills(pool(4), Job(adapter, strategy, tmp_path / "job", steps=24), kills=10)
