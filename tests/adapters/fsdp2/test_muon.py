"""Muon, which orthogonalizes whole matrices: torch's, and the one of the guide, on shards of every scope."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import STOCK, Case
from harness.benchmarks import load
from harness.fsdp2 import Fsdp2
from harness.pool import Pool
from torch import Tensor, nn

from fsdp_zpp import LocalSteps, Strategy, exchange_weights

dtensor_collectives = load("loss", "dtensor_collectives")
STEPS = 3
ROWS = {"even": 32, "uneven": 37, "few": 3}
"""Rows of the matrices: a multiple of the four ranks, not a multiple, and fewer than ranks."""


def whole_muon(matrices: Any, **arguments: Any) -> torch.optim.Optimizer:
    """Make the optimizer of the guide."""
    optimizer: torch.optim.Optimizer = load("loss", "guides_muon").whole_muon(matrices, **arguments)
    return optimizer


@contextmanager
def in_fp32(on: bool = True) -> Iterator[None]:
    """Have Muon iterate in fp32, not in bf16, where a rounding error of a gradient becomes one of 2^-8."""
    if not on:
        yield
        return
    with patch.object(Tensor, "bfloat16", lambda self: self.clone()):
        yield


def step_all(net: nn.Module, rows: int, muon: Callable[..., torch.optim.Optimizer]) -> Callable[[], None]:
    """Return the step of two optimizers, Muon for the matrices of blocks."""
    matrices = [p for name, p in net.named_parameters() if "blocks" in name and p.ndim == 2]
    assert {p.shape[0] for p in matrices} == {rows, 22}
    others = [p for name, p in net.named_parameters() if "blocks" not in name or p.ndim != 2]
    optimizers = muon(matrices, lr=0.02), torch.optim.SGD(others, lr=0.1)

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def trained(strategy: Any, rows: int, muon: Callable[..., torch.optim.Optimizer]) -> dict[str, Tensor]:
    """In a worker: the weights after some steps."""
    net = Fsdp2().make(Case(model=(("hidden", rows),)), strategy)
    step = step_all(net, rows, muon)
    for index in range(STEPS):
        models.loss_of(net, models.batch(index, 0)).backward()
        step()
    return Fsdp2().full_weights(net)


def trained_alone(rows: int) -> dict[str, Tensor]:
    """Train with torch's Muon on this rank alone, on the batches of all ranks."""
    net, world = models.make_net(hidden=rows), dist.get_world_size()
    step = step_all(net, rows, torch.optim.Muon)
    for index in range(STEPS):
        for rank in range(world):
            (models.loss_of(net, models.batch(index, 0, rank)) / world).backward()
        step()
    return {name: parameter.detach().cpu() for name, parameter in net.named_parameters()}


def distance_to_one_rank(levels: str, rows: int, muon: Callable[..., torch.optim.Optimizer]) -> float:
    """In a worker: how far training in a scope is from that on one rank."""
    with in_fp32():
        return models.distance(trained(Strategy(levels, gpus_per_node=2), rows, muon), trained_alone(rows))


@pytest.mark.parametrize(("levels", "rows"), [("GGG", "even"), ("IGG", "uneven"), ("III", "uneven"), ("NNN", "few")])
def test_torchs_muon_trains_as_on_one_rank(pool: Callable[[int], Pool], levels: str, rows: str) -> None:
    assert max(pool(4).run(distance_to_one_rank, levels, ROWS[rows], torch.optim.Muon)) <= 1e-5


@pytest.mark.parametrize(("levels", "rows"), [("GGG", "few"), ("IGG", "uneven"), ("III", "few"), ("NNN", "even")])
def test_the_muon_of_the_guide_trains_as_torchs_on_one_rank(
    pool: Callable[[int], Pool], levels: str, rows: str
) -> None:
    assert max(pool(4).run(distance_to_one_rank, levels, ROWS[rows], whole_muon)) <= 1e-5


def distance_to_stock() -> float:
    """In a worker: how far training in bf16 is from that with torch's own sharding."""
    stock = trained(STOCK, ROWS["uneven"], torch.optim.Muon)
    return models.distance(trained(Strategy("IGG", gpus_per_node=2), ROWS["uneven"], torch.optim.Muon), stock)


def test_torchs_muon_rounds_as_with_torchs_sharding(pool: Callable[[int], Pool]) -> None:
    assert max(pool(4).run(distance_to_stock)) <= 1e-6


def refusal_of_few_rows() -> str:
    """In a worker: how torch's Muon refuses fewer rows than ranks; nothing if it trains them as on one rank."""
    try:
        distance = distance_to_one_rank("GGG", ROWS["few"], torch.optim.Muon)
    except Exception as error:
        return str(error)
    return "" if distance <= 1e-5 else f"trains with a distance of {distance}"


def test_torchs_muon_refuses_fewer_rows_than_ranks_or_trains_as_on_one(pool: Callable[[int], Pool]) -> None:
    """It refuses them on CPUs in torch 2.13, and not on GPUs in torch 2.11."""
    for refusal in pool(4).run(refusal_of_few_rows):
        assert not refusal or "in-place operations that require placement changes are not supported" in refusal


def calls_of_a_step(levels: str, muon: Callable[..., torch.optim.Optimizer]) -> dict[str, int]:
    """In a worker: the collectives of the optimizers in a step, for six matrices."""
    net = Fsdp2().make(Case(model=(("hidden", 32),)), Strategy(levels, gpus_per_node=2))
    step = step_all(net, 32, muon)
    models.loss_of(net, models.batch(0, 0)).backward()
    with dtensor_collectives.DTensorCollectives(2) as collectives:
        step()
    return dict(Counter(collective.hop for collective in collectives.made))


def test_optimizer_scope_i_keeps_muon_inside_a_node(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(calls_of_a_step, "III", whole_muon) == [{"intra": 6}] * 4
    assert pool(4).run(calls_of_a_step, "GGG", whole_muon) == [{"inter": 6}] * 4
    assert pool(4).run(calls_of_a_step, "NNN", whole_muon) == [{}] * 4
    for levels, hop in {"III": "intra", "IGG": "inter"}.items():
        assert all(set(calls) == {hop} for calls in pool(4).run(calls_of_a_step, levels, torch.optim.Muon))
    assert pool(4).run(calls_of_a_step, "NNN", torch.optim.Muon) == [{}] * 4


def locally(muon: Callable[..., torch.optim.Optimizer], levels: str) -> dict[str, Any]:
    """In a worker: training with Muon inside nodes of two, as in MuLoCo (arXiv 2505.23725)."""
    strategy = Strategy(levels, local_steps=LocalSteps(2), gpus_per_node=2)
    net = Fsdp2().make(Case(model=(("hidden", 32),)), strategy)
    step, losses, hops = step_all(net, 32, muon), [], Counter[str]()
    for _ in range(6):
        loss = models.loss_of(net, models.batch(0, 0))
        loss.backward()
        with dtensor_collectives.DTensorCollectives(2) as collectives:
            step()
        hops.update(collective.hop for collective in collectives.made)
        losses.append(loss.item())
    weights = [Fsdp2().full_weights(net)]
    exchange_weights(net)
    return {"hops": dict(hops), "losses": losses, "weights": [*weights, Fsdp2().full_weights(net)]}


@pytest.mark.parametrize("muon", [torch.optim.Muon, whole_muon])
@pytest.mark.parametrize("levels", ["III", "NNN"])
def test_nodes_train_on_their_own_with_muon(
    pool: Callable[[int], Pool], muon: Callable[..., torch.optim.Optimizer], levels: str
) -> None:
    results = pool(4).run(locally, muon, levels)
    for rank, found in enumerate(results):
        before, after = (models.distance(*pair) for pair in zip(found["weights"], results[0]["weights"], strict=True))
        assert after == 0
        assert (before > 0) == (rank >= 2)  # on the other node
        assert found["losses"][-1] < found["losses"][0]
        # The optimizer sends nothing between nodes.
        assert set(found["hops"]) == ({"intra"} if levels == "III" else set())
