"""Muon, which orthogonalizes whole matrices: torch's, and the one of the guide, on shards of every scope."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Case
from harness.benchmarks import load
from harness.fsdp2 import Fsdp2
from harness.pool import Pool
from torch import Tensor, nn

from fsdp_zpp import LocalSteps, Strategy, exchange_weights

dtensor_collectives = load("loss", "dtensor_collectives")
FSDP2, STEPS = Fsdp2(), 3
ROWS = {"even": 32, "uneven": 37, "few": 3}
"""Rows of the matrices: a multiple of the four ranks, not a multiple, and fewer than ranks."""
Muon = Callable[..., torch.optim.Optimizer]


def whole_muon(matrices: Any, **arguments: Any) -> torch.optim.Optimizer:
    """Make the optimizer of the guide."""
    optimizer: torch.optim.Optimizer = load("loss", "guides_muon").whole_muon(matrices, **arguments)
    return optimizer


@contextmanager
def in_fp32() -> Iterator[None]:
    """Have Muon iterate in fp32, not in bf16, where a rounding error of a gradient becomes one of 2^-8."""
    with patch.object(Tensor, "bfloat16", lambda self: self.clone()):
        yield


def step_all(net: nn.Module, rows: int, muon: Muon) -> Callable[[], Counter[str]]:
    """Return the step of two optimizers, Muon for the matrices of blocks, which returns its collectives by hop."""
    matrices = [p for name, p in net.named_parameters() if "blocks" in name and p.ndim == 2]
    assert {p.shape[0] for p in matrices} == {rows, 22}
    others = [p for name, p in net.named_parameters() if "blocks" not in name or p.ndim != 2]
    optimizers = muon(matrices, lr=0.02), torch.optim.SGD(others, lr=0.1)

    def step() -> Counter[str]:
        with dtensor_collectives.DTensorCollectives(2) as collectives:
            for optimizer in optimizers:
                optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        return Counter(collective.hop for collective in collectives.made)

    return step


def trained(strategy: Any, rows: int, muon: Muon) -> tuple[dict[str, Tensor], Counter[str]]:
    """In a worker: the weights after some steps, and the collectives of optimizers in the last one."""
    net = FSDP2.make(Case(model=(("hidden", rows),)), strategy)
    step, hops = step_all(net, rows, muon), Counter[str]()
    for index in range(STEPS):
        models.loss_of(net, models.batch(index, 0)).backward()
        hops = step()
    return FSDP2.full_weights(net), hops


@cache
def trained_alone(rows: int) -> dict[str, Tensor]:
    """Train with torch's Muon on this rank alone, on the batches of all ranks."""
    net, world = models.make_net(hidden=rows), dist.get_world_size()
    step = step_all(net, rows, torch.optim.Muon)
    for index in range(STEPS):
        for rank in range(world):
            (models.loss_of(net, models.batch(index, 0, rank)) / world).backward()
        step()
    return {name: parameter.detach().cpu() for name, parameter in net.named_parameters()}


def compared_to_one_rank(levels: str, rows: int, muon: Muon) -> tuple[float, Counter[str]]:
    """In a worker: how far training in a scope is from that on one rank, and the collectives of a step."""
    with in_fp32():
        weights, hops = trained(Strategy(levels, gpus_per_node=2), rows, muon)
        return models.distance(weights, trained_alone(rows)), hops


WIDE = pytest.mark.wide


@pytest.mark.parametrize(
    ("muon", "levels", "rows"),
    [
        pytest.param(torch.optim.Muon, "IGG", "uneven"),
        pytest.param(torch.optim.Muon, "III", "uneven"),
        pytest.param(torch.optim.Muon, "NNN", "few", marks=WIDE),
        pytest.param(torch.optim.Muon, "GGG", "even", marks=WIDE),
        pytest.param(whole_muon, "GGG", "few"),
        pytest.param(whole_muon, "III", "even"),
        pytest.param(whole_muon, "IGG", "uneven", marks=WIDE),
        pytest.param(whole_muon, "III", "few", marks=WIDE),
        pytest.param(whole_muon, "NNN", "even", marks=WIDE),
    ],
)
def test_muon_trains_as_torchs_on_one_rank_and_keeps_to_the_hop_of_its_shards(
    pool: Callable[[int], Pool], muon: Muon, levels: str, rows: str
) -> None:
    hop = {"III": "intra", "NNN": None}.get(levels, "inter")
    for distance, hops in pool(4).run(compared_to_one_rank, levels, ROWS[rows], muon):
        assert distance <= 1e-5
        assert set(hops) == ({hop} if hop else set())
        if muon is whole_muon and hop:
            assert hops[hop] == 6  # once a matrix


def locally(muon: Muon, levels: str) -> dict[str, Any]:
    """In a worker: training with Muon inside nodes of two, as in MuLoCo (arXiv 2505.23725)."""
    strategy = Strategy(levels, local_steps=LocalSteps(2), gpus_per_node=2)
    net = FSDP2.make(Case(model=(("hidden", 32),)), strategy)
    step, losses, hops = step_all(net, 32, muon), [], Counter[str]()
    for _ in range(6):
        loss = models.loss_of(net, models.batch(0, 0))
        loss.backward()
        hops += step()
        losses.append(loss.item())
    weights = [FSDP2.full_weights(net)]
    exchange_weights(net)
    return {"hops": set(hops), "losses": losses, "weights": [*weights, FSDP2.full_weights(net)]}


@pytest.mark.parametrize(
    ("levels", "muon"),
    [
        pytest.param("III", torch.optim.Muon),
        pytest.param("NNN", whole_muon),
        pytest.param("III", whole_muon, marks=WIDE),
        pytest.param("NNN", torch.optim.Muon, marks=WIDE),
    ],
)
def test_nodes_train_on_their_own_with_muon(pool: Callable[[int], Pool], muon: Muon, levels: str) -> None:
    results = pool(4).run(locally, muon, levels)
    for rank, found in enumerate(results):
        before, after = (models.distance(*pair) for pair in zip(found["weights"], results[0]["weights"], strict=True))
        assert after == 0
        assert (before > 0) == (rank >= 2)  # on the other node
        assert found["losses"][-1] < found["losses"][0]
        # The optimizer sends nothing between nodes.
        assert found["hops"] == ({"intra"} if levels == "III" else set())
