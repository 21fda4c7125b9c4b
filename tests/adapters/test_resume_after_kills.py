"""A training in which ranks are killed resumes from its last checkpoint as if none had been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import resumable
import torch
import torch.distributed.checkpoint as dcp
from harness import lora, models
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, over_adapters, over_each
from harness.fsdp1 import Fsdp1
from harness.fsdp2 import Fsdp2
from harness.launch import launch
from harness.pool import Pool
from harness.training import train
from resumable import STRATEGIES, Job
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fsdp_zpp import CodecState


def losses_of(job: Job, world: int) -> list[dict[int, set[str]]]:
    """By rank, what each step's loss was, each time that it was made."""
    by_rank = []
    for rank in range(world):
        losses = defaultdict(set)
        for line in (job.folder / f"losses-{rank}").read_text().splitlines():
            step, loss = line.split()
            losses[int(step)].add(loss)
        by_rank.append(dict(losses))
    return by_rank


def check(job: Job, world: int) -> None:
    """Fail unless ranks were killed as often as they should, and losses and weights are as if they had not been."""
    assert len(list(job.folder.glob("killed-*"))) == job.kills
    uninterrupted = replace(job, folder=job.folder / "uninterrupted", save_every=job.steps, kills=0)
    uninterrupted.folder.mkdir()
    ended = launch(world, *arguments(uninterrupted))
    assert ended.returncode == 0, ended.stderr
    losses = losses_of(job, world)
    assert [sorted(each) for each in losses] == [list(range(job.steps))] * world
    assert losses == losses_of(uninterrupted, world)
    weights, expected = (torch.load(each.folder / "weights") for each in (job, uninterrupted))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def arguments(job: Job) -> list[str]:
    """Its command line."""
    return [
        resumable.__file__,
        job.adapter,
        job.strategy,
        *map(str, (job.folder, job.steps, job.save_every, job.kills)),
    ]


@over_each(adapter=ADAPTERS, strategy=["frozen", "LoCo and Int4Delta"])
def test_a_training_with_a_killed_rank_equals_one_without(tmp_path: Path, adapter: Adapter, strategy: str) -> None:
    job = Job(str(adapter), strategy, tmp_path, steps=6, kills=1)
    ended = [launch(2, *arguments(job)) for _ in range(2)]
    assert [each.returncode for each in ended] == [-signal.SIGKILL, 0], ended[-1].stderr
    check(job, 2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zeropp", "LoCo", "Int4Delta", "frozen"])
@over_adapters
def test_a_training_with_ten_killed_ranks_equals_one_without(tmp_path: Path, adapter: Adapter, strategy: str) -> None:
    job = Job(str(adapter), strategy, tmp_path, steps=24, kills=10)
    agent = [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node=4", "--max-restarts=10"]
    # Or processes that are started again find in torchrun's store the addresses of those that are gone, and gloo fails.
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)  # where harness is
    ended = subprocess.run([*agent, *arguments(job)], env=environment, capture_output=True, text=True, timeout=1800)
    assert ended.returncode == 0, ended.stderr
    check(job, 4)


def resumed_from_one_checkpoint(adapter: Adapter, folder: str) -> None:
    """In a worker: model, optimizer and codecs are loaded together where the last rank has no row of some weights."""
    losses = []
    for run in range(2):
        model = adapter.shard(lora.make_net(blocks=1), Case(), replace(STRATEGIES["LoCo"], gpus_per_node=2))
        optimizer = models.make_optimizer("adamw", (p for p in model.parameters() if p.requires_grad))
        if run == 0:
            train(adapter, model, Case(steps=1), optimizer=optimizer)
        weights, states = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": states, "codecs": CodecState(model)}
        (dcp.load if run else dcp.save)(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        losses.append(train(adapter, model, Case(steps=2), optimizer=optimizer, first_step=1))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("adapter", [Fsdp1(mesh=True), Fsdp2()], ids=str)
def test_resuming_is_exact_where_a_rank_has_no_row_of_a_weight(
    pool: Callable[[int], Pool], tmp_path: Path, adapter: Adapter
) -> None:
    """Without a mesh, FullyShardedDataParallel, stock too, can't load its own checkpoint then."""
    pool(4).run(resumed_from_one_checkpoint, adapter, str(tmp_path))


@over_each(adapter=ADAPTERS, strategy=["LoCo and Int4Delta", "frozen"])
def test_another_number_of_ranks_trains_on_from_the_same_checkpoint(
    tmp_path: Path, adapter: Adapter, strategy: str
) -> None:
    """It says that codecs start anew, and trains on the same samples in the same order."""
    job = Job(str(adapter), strategy, tmp_path, steps=5)
    assert launch(4, *arguments(job)).returncode == 0
    losses = losses_of(job, 4)
    [path.unlink() for path in tmp_path.glob("losses-*")]
    ended = launch(2, *arguments(job))
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("errors start from zero, weights are sent whole") == (strategy != "frozen")
    assert "saved on 4 ranks as 2 nodes x 2, but this is 2 ranks as 2 nodes x 1" in ended.stderr or strategy == "frozen"
    resumed = losses_of(job, 2)
    for step in resumed[0]:
        now, before = (
            sum(float.fromhex(value) for each in ranks for value in each[step]) / len(ranks)
            for ranks in (resumed, losses)
        )
        assert now == pytest.approx(before, rel=1e-2)  # what codecs round in another way
    assert list(resumed[0]) == [3, 4]
