"""Moments of optimizers, which nodes that train on their own average more rarely than weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, over_pairs
from harness.fsdp1 import Fsdp1
from harness.pool import Pool
from harness.training import train
from local_nodes import LAYOUTS, strategy_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_zpp.runtime.unit import StrategyUnit, named_units

CASE = Case(steps=4, clip=None)
Moments = dict[str, dict[str, Tensor]]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, amsgrad=True)


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> Moments:
    """What this rank holds of the optimizer's states."""
    return {
        name: {state: local(value).cpu().clone() for state, value in optimizer.state.get(parameter, {}).items()}
        for name, parameter in model.named_parameters()
    }


def local(value: Any) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def average_exactly(model: nn.Module) -> None:
    """In a worker: average all moments now."""
    units = [unit for unit in named_units(model) if isinstance(unit, StrategyUnit)]
    training = next(unit.local_training for unit in units if unit.local_training is not None)
    training.average_moments_exactly()


def exact_means(adapter: Adapter, layout: tuple[str, int], case: Case) -> tuple[float, int]:
    """In a worker: the largest distance of an averaged state from the mean that torch makes, and how many differ."""
    model = adapter.make(case, strategy_of(*layout, every=50))
    optimizer = adam(model)
    train(adapter, model, case, optimizer=optimizer)
    before = everywhere(states(model, optimizer))[dist.get_rank() % layout[1] :: layout[1]]
    average_exactly(model)
    after, off, differing = states(model, optimizer), 0.0, 0
    for name, of_parameter in after.items():
        for state, value in of_parameter.items():
            each = [node[name][state].double() for node in before]
            off = max([off, *(value - torch.stack(each).mean(0)).abs().view(-1).tolist()])
            differing += not torch.equal(each[0], each[1])
    return off, differing


def everywhere(value: Any) -> list[Any]:
    """Of all ranks. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@over_pairs(adapter=[*ADAPTERS, Fsdp1(use_orig_params=False)], layout=LAYOUTS)
def test_exact_average_is_the_mean(pool: Callable[[int], Pool], adapter: Adapter, layout: tuple[str, int]) -> None:
    for off, differing in pool(4).run(exact_means, adapter, layout, CASE):
        assert off < 1e-7
        assert differing > 0
