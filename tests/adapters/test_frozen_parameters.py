"""Frozen parameters beside trainable ones train as under stock and cost no gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from harness import models
from harness.adapter import STOCK, Adapter, Case
from harness.covering import ADAPTERS, SCOPES, over_each
from harness.pool import Pool
from harness.training import train
from harness.wiretap import wiretap
from torch import Tensor, nn

from fsdp_zpp import Strategy
from fsdp_zpp.collectives.secondary_shard import SecondaryShard


class Adapted(nn.Module):
    """A block with a small trainable detour beside its frozen weights."""

    def __init__(self, block: models.Block, width: int) -> None:
        super().__init__()
        self.block = block.requires_grad_(False)
        self.down, self.up = nn.Linear(width, 3, bias=False), nn.Linear(3, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.up(self.down(x))


def adapted(adapter: Adapter, strategy: Any) -> Any:
    """In a worker: a net of adapted blocks, one unit each."""
    net = models.make_net()
    net.requires_grad_(False)
    net.blocks = nn.ModuleList(Adapted(block, 22) for block in net.blocks).to(models.device())
    for i, block in enumerate(net.blocks):
        net.blocks[i] = adapter.wrap(block, strategy)
    return adapter.wrap(net, strategy)


def adapted_weights(adapter: Adapter, strategy: Any) -> tuple[dict[str, Tensor], dict[str, int], bool]:
    """In a worker: weights after training, bytes sent in a warm backward, whether frozen weights got gradients."""
    model = adapted(adapter, strategy)
    optimizer = models.make_optimizer("adamw", (p for p in model.parameters() if p.requires_grad))
    train(adapter, model, Case(steps=3, micro_batches=2), optimizer=optimizer)
    loss = models.loss_of(model, models.batch(9, 0))
    with wiretap(2) as tap:
        loss.backward()
    allocated = any(p.grad is not None for p in model.parameters() if not p.requires_grad)
    reduced = {hop: tap.total(hop, "all_to_all") for hop in ("intra", "inter")}
    return adapter.full_weights(model), reduced, allocated


@cache
def stock_adapted_weights(adapter: Adapter) -> dict[str, Tensor]:
    """In a worker: what torch's own full sharding makes of it."""
    return adapted_weights(adapter, STOCK)[0]


def adapted_beside_stock(adapter: Adapter, strategy: Strategy) -> tuple[float, dict[str, int], bool]:
    """In a worker: as :func:`adapted_weights`, but the weights' distance from stock."""
    weights, reduced, allocated = adapted_weights(adapter, strategy)
    return models.distance(weights, stock_adapted_weights(adapter)), reduced, allocated


@over_each(adapter=ADAPTERS, scopes=SCOPES)
def test_frozen_parameters_are_neither_given_gradients_nor_reduced(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str
) -> None:
    trainable = 3 * (22 * 3 + 3 * 22) * 4
    strategy = Strategy(scopes, gpus_per_node=2)
    for distance, reduced, allocated in pool(4).run(adapted_beside_stock, adapter, strategy):
        assert distance <= 1e-4
        assert not allocated
        # Half of the values go to the other rank of the node; padding is what FSDP aligns small parameters with.
        assert 0 < reduced["intra"] <= 0.75 * trainable
        assert 0 < reduced["inter"] <= 0.4 * trainable


def gathered_in_a_later_step(adapter: Adapter, strategy: Strategy) -> set[str]:
    """In a worker: the units that the third step gathers between nodes, where all but the root is frozen."""
    net = models.make_net()
    net.blocks.requires_grad_(False)
    model = adapter.shard(net.to(models.device()), Case(), strategy)
    optimizer = models.make_optimizer("sgd", (p for p in model.parameters() if p.requires_grad))
    train(adapter, model, Case(steps=2, clip=None), optimizer=optimizer)
    gathered, hold = set(), SecondaryShard.hold

    def noted(self: SecondaryShard, *arguments: Any) -> None:
        gathered.add(self.label)
        hold(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SecondaryShard, "hold", noted)
        train(adapter, model, Case(steps=1, clip=None), optimizer=optimizer)
    return gathered


@over_each(adapter=ADAPTERS, scopes=("IGG", "NGG", "NNI"))
def test_what_is_frozen_and_kept_is_gathered_once(pool: Callable[[int], Pool], adapter: Adapter, scopes: str) -> None:
    assert pool(4).run(gathered_in_a_later_step, adapter, Strategy(scopes, gpus_per_node=2)) == [{"root"}] * 4
