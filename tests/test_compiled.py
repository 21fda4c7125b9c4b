"""Layers compiled before they are sharded: a strategy breaks no graph, and trains as torch's own sharding does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from harness import models
from harness.adapter import STOCK, Adapter, Case
from harness.adapters import ADAPTERS, over_adapters
from harness.covering import over_each
from harness.pool import Pool
from harness.training import train, trained_weights
from torch import Tensor
from torch._dynamo.utils import counters

from fsdp_zpp import Strategy


def compiled(adapter: Adapter, case: Case, strategy: Strategy | None) -> tuple[dict[str, Tensor], int]:
    """In a worker: every block compiled, then sharded; the weights, and how many graphs that came to."""
    torch._dynamo.reset()
    counters.clear()
    net = models.make_net()
    for block in net.blocks:
        block.compile(backend="aot_eager")
    model = adapter.shard(net, case, strategy)
    train(adapter, model, case)
    return adapter.full_weights(model), counters["stats"]["unique_graphs"]


@over_each(adapter=ADAPTERS, levels=["IGG", "IIG", "NNG"])
def test_compiled_blocks(pool: Callable[[int], Pool], adapter: Adapter, levels: str) -> None:
    case = Case(steps=3, micro_batches=2)
    strategy = Strategy(levels, gpus_per_node=2)
    ours, stock = pool(4).run(compiled, adapter, case, strategy), pool(4).run(compiled, adapter, case, STOCK)
    for (our_weights, our_graphs), (weights, graphs) in zip(ours, stock, strict=True):
        assert models.distance(our_weights, weights) <= 1e-6
        assert our_graphs == graphs > 0


@over_adapters
def test_compiled_blocks_with_codecs(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    """A compiled layer may add up in another order, on which a rounding can depend: far less than codecs round."""
    case, strategy = Case(steps=1), Strategy.zeropp(gpus_per_node=2)
    ours, _ = pool(4).run(compiled, adapter, case, strategy)[0]
    eager, stock = (pool(4).run(trained_weights, adapter, case, other)[0] for other in (strategy, STOCK))
    assert models.distance(ours, eager) <= 0.05 * models.distance(eager, stock)
