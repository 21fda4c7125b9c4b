"""Nodes that train on their own and exchange weights, under both adapters, beside training in step and by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import models
from harness.adapter import STOCK, Adapter, Case
from harness.fsdp1 import Fsdp1
from harness.fsdp2 import Fsdp2
from harness.messages import assert_refused, attempt
from harness.pool import Pool
from harness.training import load, save, train
from harness.wiretap import wiretap
from torch import Tensor

from fsdp_zpp import CodecState, Int4, Int8, LoCo, LocalSteps, Strategy, agreed_weights, exchange_weights, traffic

ADAPTERS = [Fsdp1(), Fsdp1(use_orig_params=False), Fsdp2()]
over_adapters = pytest.mark.parametrize("adapter", ADAPTERS, ids=str)
LAYOUTS = [("III", 1), ("III", 2), ("INI", 2), ("NNI", 2), ("NNN", 2), ("NNN", 1)]
"""Letters, and how many GPUs a node has."""
over_layouts = pytest.mark.parametrize(("levels", "gpus_per_node"), LAYOUTS)
MEAN = {"outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False, "codec": None}
"""An outer step that is the mean over nodes."""
ROUNDING = 2e-5
SGD = Case(steps=20, clip=None, optimizer="plain sgd")


def strategy_of(levels: str, gpus_per_node: int, **local_steps: Any) -> Strategy:
    """A strategy with local steps."""
    return Strategy(levels, local_steps=LocalSteps(**local_steps), gpus_per_node=gpus_per_node)


def sgd(model: Any) -> torch.optim.Optimizer:
    """Without momentum, which nodes would keep apart."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def all_weights(adapter: Adapter, model: Any) -> list[dict[str, Tensor]]:
    """The weights of the node of each rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, adapter.full_weights(model))
    return gathered


def differ(model_weights: list[dict[str, Tensor]]) -> bool:
    """Whether any rank's weights are others than the first's."""
    first = model_weights[0]
    return any(not torch.equal(each[name], first[name]) for each in model_weights for name in first)


def distance_from_steps_alike(adapter: Adapter, strategy: Strategy, case: Case) -> float:
    """In a worker: how far the weights of a training are from those of full sharding."""
    weights = []
    for each in (strategy, STOCK):
        model = adapter.make(case, each)
        train(adapter, model, case, optimizer=sgd(model))
        if each is strategy:
            exchange_weights(model)
        weights.append(adapter.full_weights(model))
    return models.distance(*weights)


@over_adapters
@over_layouts
def test_exchanging_every_step_the_mean_is_training_in_step(
    pool: Callable[[int], Pool], adapter: Adapter, levels: str, gpus_per_node: int
) -> None:
    strategy = strategy_of(levels, gpus_per_node, every=1, **MEAN)
    assert max(pool(4).run(distance_from_steps_alike, adapter, strategy, SGD)) < ROUNDING


@contextmanager
def torchs_only_its_node(gpus_per_node: int) -> Iterator[dist.ProcessGroup]:
    """The ranks of this node."""
    group = dist.new_subgroups(gpus_per_node)[0]
    yield group
    dist.destroy_process_group(group)


def beside_by_hand(adapter: Adapter, strategy: Strategy, case: Case) -> float:
    """In a worker: how far a training is from nodes that torch's own FSDP trains, averaged by hand."""
    assert strategy.local_steps is not None
    every, gpus = strategy.local_steps.every, strategy.gpus_per_node
    assert gpus is not None
    model = adapter.make(case, strategy)
    train(adapter, model, case, optimizer=(optimizer := models.make_optimizer("adamw", model.parameters())))
    del optimizer
    exchange_weights(model)
    ours = adapter.full_weights(model)
    with torchs_only_its_node(gpus) as node:
        model = adapter.make(case, STOCK, group=node)

        def average(step: int, optimizer: Any) -> None:
            if (step + 1) % every == 0:
                for parameter in model.parameters():
                    local = adapter.local(parameter).data
                    # All ranks of a node hold other parts, in the same places as on other nodes.
                    gathered: list[Any] = [None] * dist.get_world_size()
                    dist.all_gather_object(gathered, local.cpu())
                    same_place = gathered[dist.get_rank() % gpus :: gpus]
                    local.copy_(torch.stack(same_place).double().mean(0))

        train(adapter, model, case, average, models.make_optimizer("adamw", model.parameters()))
        return models.distance(ours, adapter.full_weights(model))


@pytest.mark.parametrize("adapter", [Fsdp1(), Fsdp2()], ids=str)
@pytest.mark.parametrize("gpus_per_node", [1, 2])
def test_nodes_are_averaged_as_by_hand(pool: Callable[[int], Pool], adapter: Adapter, gpus_per_node: int) -> None:
    strategy = strategy_of("III", gpus_per_node, every=3, spread=False, **MEAN)
    case = Case(steps=6, micro_batches=2, clip=0.5)
    assert max(pool(4).run(beside_by_hand, adapter, strategy, case)) < 1e-4
