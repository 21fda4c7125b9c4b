"""A frozen base does not follow the machine's links: it stays sharded over the host, unless nodes are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import lora, models
from harness.adapter import Adapter, Case
from harness.covering import over_adapters
from harness.links import NONE, machine
from harness.messages import collected
from harness.pool import Pool
from torch import Tensor, nn

from fsdp_zpp import NF4, Int8, Strategy, load_frozen_params, quantize_frozen_params, save_frozen_params
from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.frozen.modules import frozen_modules
from fsdp_zpp.runtime.unit import StrategyUnit, named_units

LARGE: dict[str, Any] = {"width": 256, "hidden": 688, "vocabulary": 512}
CODECS = {"int8": Int8(64), "NF4": NF4(64)}


def places_of(model: nn.Module) -> set[str]:
    """Where a model's base lies."""
    return {f"{w.placement.scope} on {w.placement.mesh.topology}" for _, _, w in frozen_modules(model)}


def trained(adapter: Adapter, model: Any) -> dict[str, Tensor]:
    optimizer = models.make_optimizer("sgd", [p for p in model.parameters() if p.requires_grad])
    for step in range(2):
        models.loss_of(model, models.batch(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return lora.trainable(adapter.full_weights(model))


def made(adapter: Adapter, codec: Codec, way: str, folder: Path, strategy: Strategy, place: int | None) -> Any:
    """A sharded net whose base was quantized in some way, on nodes of ``place`` ranks if that is given."""
    net = lora.make_net(**LARGE)
    if way == "by the strategy":
        strategy = replace(strategy, frozen=codec)
    else:
        quantize_frozen_params(net, codec, gpus_per_node=place)
        if way == "from a file":
            save_frozen_params(net, folder)
            net = lora.make_net(**LARGE)
            load_frozen_params(net, folder, gpus_per_node=place)
    return adapter.shard(net, Case(), strategy)


def on_slow_links(adapter: Adapter, codec: Codec, way: str, folder: Path) -> tuple[Any, ...]:
    """In a worker: nodes of what is trained, the base, and whether results are those of places that are named."""
    with machine(NONE), collected() as records:
        model = made(adapter, codec, way, folder, Strategy.zeropp(), None)
        ours = trained(adapter, model)
    nodes = {str(unit.ranks.topology) for unit in named_units(model) if isinstance(unit, StrategyUnit)}
    named = made(adapter, codec, "before", folder, Strategy.zeropp(gpus_per_node=1), 4)
    same = all(torch.equal(ours[name], value) for name, value in trained(adapter, named).items())
    told = [line for _, line in records if "stays sharded over 1 node x 4" in line]
    parameters = lora.total_parameters(lora.make_net(**LARGE))
    held = sum(unit.nbytes for unit in {weight.holder for _, _, weight in frozen_modules(model)})
    return nodes, places_of(model), held, parameters, same, told


@pytest.mark.parametrize("way", ["by the strategy", "before", "from a file"])
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@over_adapters
def test_a_base_stays_sharded_over_the_host(
    pool: Callable[[int], Pool], tmp_path: Path, adapter: Adapter, codec: Codec, way: str
) -> None:
    results = pool(4).run(on_slow_links, adapter, codec, way, tmp_path)
    for nodes, places, held, parameters, same, told in results:
        assert nodes == {"4 nodes x 1"}
        assert places == {"I on 1 node x 4"}
        assert held <= 1.02 * codec.nbytes(parameters) / 4
        assert same
        assert bool(told) == (told is results[0][-1])
    assert "gpus_per_node=1 places it on 4 nodes x 1" in results[0][-1][0]


def with_nodes_named(adapter: Adapter) -> tuple[Any, Any, Any]:
    """In a worker: bases where the strategy, or the call that quantizes, names nodes."""
    with machine(NONE):
        by_strategy = adapter.shard(lora.make_net(), Case(), Strategy.mixzpp(gpus_per_node=1))
        net = lora.make_net()
        quantize_frozen_params(net, gpus_per_node=1)
        by_call = adapter.shard(net, Case(), Strategy.zeropp())
        later = lora.make_net()
        later.head = adapter.wrap(later.head, Strategy.zeropp())
        quantize_frozen_params(later, ignored_params=list(later.head.parameters()))
    return places_of(by_strategy), places_of(by_call), places_of(later)


@over_adapters
def test_nodes_that_are_named_place_it(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    alone, host = {"I on 4 nodes x 1"}, {"I on 1 node x 4"}
    assert pool(4).run(with_nodes_named, adapter) == [(alone, alone, host)] * 4
