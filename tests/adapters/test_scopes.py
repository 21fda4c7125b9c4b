"""All fourteen combinations of scopes: what a rank holds of each state, and how far a micro-batch reduces.

test_parity.py has the weights that they train.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter, Case
from harness.covering import over_adapters
from harness.fsdp1 import Fsdp1
from harness.pool import Pool
from harness.training import train, trained_weights
from harness.wiretap import Wiretap, wiretap
from torch import Tensor

from fsdp_zpp import Int4, Int8, Strategy
from fsdp_zpp.config.levels import LEGAL_LEVELS

over_scopes = pytest.mark.parametrize("scopes", LEGAL_LEVELS)
SHARDS = {"N": 1, "I": 2, "G": 4}
"""Into how many shards a scope cuts a state on 2 nodes x 2."""


def shard_sizes(adapter: Adapter, scopes: str) -> tuple[int, int, int, int]:
    """In a worker: elements of the model and, on this rank, of parameters, gradients and optimizer states."""
    case = Case(model=(("width", 24), ("hidden", 36), ("vocabulary", 64)))
    model = adapter.make(case, Strategy(scopes, gpus_per_node=2))
    optimizer = models.make_optimizer("adamw", model.parameters())
    models.loss_of(model, models.batch(0, 0)).backward()
    parameters = list(model.parameters())
    held = sum(adapter.local(p).numel() for p in parameters)
    held_gradients = sum(adapter.local(p.grad).numel() for p in parameters if p.grad is not None)
    optimizer.step()
    states = sum(adapter.local(state["exp_avg"]).numel() for state in optimizer.state.values())
    return sum(p.numel() for p in models.make_net(**dict(case.model)).parameters()), held, held_gradients, states


@over_scopes
@over_adapters
def test_the_optimizer_sees_the_shard_of_its_scope(pool: Callable[[int], Pool], adapter: Adapter, scopes: str) -> None:
    replies = pool(4).run(shard_sizes, adapter, scopes)
    for total, *held in replies:
        for one in held:
            assert one == pytest.approx(total / SHARDS[scopes[2]], rel=0.02)
    # FSDP's alignment belongs to no parameter, so shards differ in size, but together they are the model.
    assert sum(held for _, held, _, _ in replies) == replies[0][0] * 4 / SHARDS[scopes[2]]


def replicas_differ(adapter: Adapter, scopes: str) -> bool:
    """In a worker: whether weights differ between ranks that hold the same part, after training with codecs."""
    strategy = Strategy(scopes, weights=Int8(64), gradients=Int4(32), gpus_per_node=2)
    model = adapter.make(Case(), strategy)
    train(adapter, model, Case(micro_batches=2, clip=None))
    own = torch.cat([adapter.local(p).detach().flatten().cpu() for p in model.parameters()])
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    step = {"N": 1, "I": 2}[scopes[2]]
    return any(not every[dist.get_rank() % step].equal(other) for other in every[dist.get_rank() % step :: step])


@pytest.mark.parametrize("scopes", [scopes for scopes in LEGAL_LEVELS if scopes[2] != "G"])
@over_adapters
def test_replicas_stay_equal_bit_for_bit(pool: Callable[[int], Pool], adapter: Adapter, scopes: str) -> None:
    assert pool(4).run(replicas_differ, adapter, scopes) == [False] * 4


def differently_seeded(adapter: Adapter, scopes: str) -> str:
    """In a worker: what a forward of a net says whose weights are others on every rank."""
    model = adapter.shard(models.make_net(seed=dist.get_rank()), Case(), Strategy(scopes, gpus_per_node=2))
    try:
        models.loss_of(model, models.batch(0, 0))
    except ValueError as error:
        return str(error)
    return ""


@over_scopes
@over_adapters
def test_replicas_must_start_equal(pool: Callable[[int], Pool], adapter: Adapter, scopes: str) -> None:
    for said in pool(4).run(differently_seeded, adapter, scopes):
        assert ("they hold different weights" in said) == (scopes[2] != "G")


def reduced_bytes(adapter: Adapter, scopes: str, synced: bool) -> list[Wiretap]:
    """In a worker: what the backward of each of three micro-batches reduces."""
    model = adapter.make(Case(), Strategy(scopes, gpus_per_node=2))
    taps = []
    for micro_batch in range(3):
        with adapter.micro_batch(model, micro_batch == 2, synced):
            loss = models.loss_of(model, models.batch(0, micro_batch))
            with wiretap(2) as tap:
                loss.backward()
        taps.append(tap)
    return taps


@over_scopes
@over_adapters
def test_the_gradient_scope_is_how_far_a_micro_batch_reduces(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str
) -> None:
    crossed = {"N": set(), "I": {"intra"}, "G": {"intra", "inter"}}[scopes[1]]
    for earlier, middle, last in pool(4).run(reduced_bytes, adapter, scopes, False):
        for tap in (earlier, middle):
            assert {hop for hop in ("intra", "inter") if tap.total(hop, "all_to_all")} == crossed
        assert last.total("intra", "all_to_all") > 0
        assert last.total("inter", "all_to_all") > 0


def test_trained_weights_do_not_depend_on_the_parameters_scope(pool: Callable[[int], Pool]) -> None:
    """What is kept of the weights, and where, is no matter of arithmetic: it may not change a bit."""

    def run(scopes: str) -> dict[str, Tensor]:
        strategy = Strategy(scopes, weights=Int8(64), gradients=Int4(32), gpus_per_node=2)
        return pool(4).run(trained_weights, Fsdp1(), Case(micro_batches=2), strategy)[0]

    for first, *others in (("NNI", "INI"), ("NII", "III"), ("NIG", "IIG", "GIG"), ("NGG", "IGG", "GGG")):
        expected = run(first)
        assert all(models.distance(run(other), expected) == 0 for other in others)
