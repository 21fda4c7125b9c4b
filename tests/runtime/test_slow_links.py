"""Nodes that are not named are what shares fast links, where a strategy gains by that; else what was launched."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import STOCK, Adapter, Case, Fsdp1
from harness.covering import ADAPTERS, over_adapters, over_each
from harness.links import NONE, Sets, machine
from harness.messages import collected
from harness.pool import Pools, device_type
from harness.strategies import INSIDE, PRESETS
from harness.training import train
from harness.wiretap import wiretap
from torch.distributed.device_mesh import init_device_mesh

from fsdp_zpp import Int4, Int8, LoCo, QuantizedReduceState, Strategy, quantized_reduce_hook
from fsdp_zpp.runtime.links import known_links
from fsdp_zpp.runtime.unit import StrategyUnit, named_units

PAIRS: Sets = [(0, 1), (2, 3)]
CROSSED: Sets = [(0, 2), (1, 3)]
JOINED: Sets = [(0, 1, 2, 3)]

FOLLOWING = [
    *(strategy for strategy in PRESETS.values() if strategy.error_feedback is None),
    Strategy.zeropp(levels="GGG"),
    Strategy.zeropp(levels="IIG"),
    Strategy.zero2(gradients=Int4(32)),
]
STAYING = [
    Strategy(),
    Strategy("IGG"),
    Strategy("IGG", gradients=Int4(32)),
    replace(INSIDE, gradients=None),
    Strategy.mics(gradients=Int4(32), weights=Int8(64)),
    Strategy.loco(),
    Strategy.diloco(every=2),
    Strategy("NNN", gradients=Int4(32)),
]
CASE = Case(steps=2, micro_batches=2, clip=None)


def nodes_of(model: Any) -> set[str]:
    return {str(unit.ranks.topology) for unit in named_units(model)}


def same_as_named(adapter: Adapter, sets: Sets, gpus_per_node: int) -> tuple[set[str], bool]:
    """In a worker: a model's nodes, and whether weights and bytes are those of a strategy that names them."""
    found = []
    for strategy in (Strategy.zeropp(), Strategy.zeropp(gpus_per_node=gpus_per_node)):
        with machine(sets), wiretap(1) as tap:
            model = adapter.make(CASE, strategy)
            train(adapter, model, CASE)
        assert tap.sent
        found.append((nodes_of(model), adapter.full_weights(model), tap.sent))
    (nodes, ours, sent), (_, named, sent_named) = found
    return nodes, all(torch.equal(ours[name], named[name]) for name in named) and sent == sent_named


LAYOUTS = {"pairs": (PAIRS, 2, "2 nodes x 2"), "none": (NONE, 1, "4 nodes x 1"), "all": (JOINED, 4, "1 node x 4")}


@over_each(rest=False, adapter=ADAPTERS, layout=LAYOUTS)
def test_gpus_that_nvlink_joins_are_nodes_as_if_these_were_named(
    pool: Pools, adapter: Adapter, layout: tuple[Sets, int, str]
) -> None:
    sets, gpus_per_node, nodes = layout
    assert pool(4).run(same_as_named, adapter, sets, gpus_per_node) == [({nodes}, True)] * 4


def nodes_of_each(adapter: Adapter, strategies: Sequence[Strategy], sets: Sets) -> list[str]:
    """In a worker: the nodes of models of these strategies."""
    found = []
    with machine(sets):
        for strategy in strategies:
            model = adapter.make(CASE, strategy)
            models.loss_of(model, models.batch(0, 0))
            found.append(*nodes_of(model))
    return found


@over_adapters
def test_nodes_follow_links_if_a_strategy_gains_much_by_that_at_little_cost(pool: Pools, adapter: Adapter) -> None:
    assert pool(4).run(nodes_of_each, adapter, FOLLOWING, NONE) == [["4 nodes x 1"] * len(FOLLOWING)] * 4
    for sets in (NONE, PAIRS):
        assert pool(4).run(nodes_of_each, adapter, STAYING, sets) == [["1 node x 4"] * len(STAYING)] * 4


def lines_of(adapter: Adapter, strategy: Strategy, sets: Sets, launched: int) -> list[tuple[str, str]]:
    """In a worker: what a model logs, if the launcher has started so many ranks on each host."""
    with machine(sets), patch.dict(os.environ, LOCAL_WORLD_SIZE=str(launched)), collected() as records:
        models.loss_of(adapter.make(Case(), strategy), models.batch(0, 0))
    return records


LINES = [
    (Strategy("IGG", weights=Int8(64)), NONE, "WARNING", "4 GPUs without NVLink: each counts as a node, which "),
    (Strategy("GGG", weights=Int8(64)), PAIRS, "WARNING", "NVLink in sets of 2: each 2 count as a node; "),
    (Strategy("GGG", weights=Int8(64)), NONE, "WARNING", "each counts as a node; gpus_per_node=4 to override"),
    (Strategy.zeropp(), CROSSED, "WARNING", "among ranks 0, 2, ranks 1, 3 alone: the host counts as one node; order"),
    (Strategy.zeropp(), JOINED, "WARNING", "(one node, 4 GPUs with NVLink: no gain from codecs)"),
    (Strategy("III"), NONE, "INFO", "one node, for smaller nodes would hold more of the optimizer state; pass gpus_"),
    (
        Strategy.loco(),
        NONE,
        "WARNING",
        "one node, for smaller nodes would hold more of the error state; pass gpus_per_node=1 to override",
    ),
    (Strategy("NGG"), NONE, "INFO", "not all that crosses them is encoded; pass gpus_per_node=1 to override or choose"),
]


@over_each(rest=False, adapter=ADAPTERS, said=LINES)
def test_the_line_says_what_links_decide(pool: Pools, adapter: Adapter, said: tuple[Strategy, Sets, str, str]) -> None:
    strategy, sets, level, text = said
    [(logged, line)], *others = pool(4).run(lines_of, adapter, strategy, sets, 4)
    assert logged == level
    assert text in line
    assert others == [[]] * 3


@over_adapters
def test_several_hosts_stay_the_nodes(pool: Pools, adapter: Adapter) -> None:
    [(level, line)], *others = pool(4).run(lines_of, adapter, Strategy.zeropp(), NONE, 2)
    assert level == "INFO"
    assert " on 2 nodes x 2, " in line
    assert line.endswith("; 2 GPUs a node without NVLink: the hop inside nodes is slow, too")
    assert others == [[]] * 3


def price(adapter: Adapter, strategy: Strategy) -> tuple[str, int, int]:
    """In a worker: the line, the bytes of encoded weights that are held, and those of accumulated gradients."""
    case = Case(model=(("width", 256), ("hidden", 512)), steps=1, micro_batches=2, clip=None)
    with machine(NONE), collected() as records:
        model = adapter.make(case, strategy)
        with adapter.micro_batch(model, last=False, synced=False):
            models.loss_of(model, models.batch(0, 0)).backward()
    units = [unit for unit in named_units(model) if isinstance(unit, StrategyUnit)]
    weights = sum(unit.gather.secondary.read().nbytes for unit in units if unit.gather is not None)
    sums = sum(4 * unit.sharded.numel() for unit in units)
    return "".join(line for _, line in records), weights, sums


def size(text: str) -> float:
    """A number of bytes, as lines give it."""
    number, unit = text.split()
    return float(number) * {"KiB": 2**10, "MiB": 2**20}[unit]


@over_adapters
def test_the_line_names_the_bytes_that_each_gpu_takes(pool: Pools, adapter: Adapter) -> None:
    line, weights, sums = pool(4).run(price, adapter, Strategy.zeropp(levels="IIG"))[0]
    named = re.search(r"which takes (.*) a GPU for encoded weights and up to (.*) a GPU for gradients while", line)
    assert named is not None
    # Values that a codec sends as they are come on top, such as biases.
    assert size(named[1]) <= weights <= 1.05 * size(named[1])
    assert size(named[2]) == pytest.approx(sums, rel=0.01)
    line, *_ = pool(4).run(price, adapter, Strategy.zeropp())[0]
    assert f"which takes {named[1]} a GPU for encoded weights; gpus_per_node=4 to override" in line


def on_a_half(adapter: Adapter) -> Any:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return adapter.make(CASE, Strategy.zeropp(), halves[dist.get_rank() // 2])


def on_a_mesh_of_nodes(adapter: Adapter) -> Any:
    mesh = init_device_mesh(device_type(), (1, 4), mesh_dim_names=("replicate", "shard"))
    return adapter.wrap(models.make_net(), Strategy.zeropp(), **{adapter.mesh_argument: mesh})


def with_several_strategies(adapter: Adapter) -> Any:
    net = models.make_net()
    strategy = Strategy("IGG", overrides={"Block": Strategy.zeropp()})
    for place, block in enumerate(net.blocks):
        net.blocks[place] = adapter.wrap(block, strategy)
    return adapter.wrap(net, strategy)


def nodes_by_strategy(adapter: Adapter, make: Callable[[Adapter], Any], sets: Sets) -> dict[str, str]:
    """In a worker: the nodes of a model, by the codec of the weights."""
    with machine(sets):
        model = make(adapter)
        models.loss_of(model, models.batch(0, 0))
    return {str(unit.strategy.weights): str(unit.ranks.topology) for unit in named_units(model)}


@over_adapters
def test_each_group_and_each_strategy_of_a_model_decides_by_itself_and_a_mesh_for_all(
    pool: Pools, adapter: Adapter
) -> None:
    on_halves = pool(4).run(nodes_by_strategy, adapter, on_a_half, [(0, 1)])
    assert [nodes["int8(256)"] for nodes in on_halves] == ["1 node x 2"] * 2 + ["2 nodes x 1"] * 2
    by_strategy = pool(4).run(nodes_by_strategy, adapter, with_several_strategies, NONE)
    assert by_strategy == [{"None": "1 node x 4", "int8(256)": "4 nodes x 1"}] * 4
    on_a_mesh = pool(4).run(nodes_by_strategy, adapter, on_a_mesh_of_nodes, NONE)
    assert on_a_mesh == [{"int8(256)": "1 node x 4"}] * 4


def hooked(codec: Any, loco: LoCo | None = None) -> tuple[str, list[str]]:
    """In a worker: the nodes of a hook where there is no NVLink, and what it logs."""
    with machine(NONE), collected() as records:
        model = Fsdp1().make(CASE, STOCK)
        state = QuantizedReduceState(codec, error_feedback=loco)
        model.register_comm_hook(state, quantized_reduce_hook)
        train(Fsdp1(), model, CASE)
    return str(state.mesh.topology), [line for _, line in records]


def test_a_hook_follows_links_too(pool: Pools) -> None:
    nodes, [line] = pool(4).run(hooked, Int4(32))[0]
    assert nodes == "4 nodes x 1"
    assert line.endswith("; 4 GPUs without NVLink: each counts as a node; gpus_per_node=4 to override")
    assert pool(4).run(hooked, None)[0][0] == "1 node x 4"
    assert pool(4).run(hooked, Int4(32), LoCo())[0][0] == "1 node x 4"


def named_on_one_rank(adapter: Adapter) -> str:
    """In a worker: what a model raises if the last rank alone names the nodes, and links would be asked."""
    gpus_per_node = 4 if dist.get_rank() == 3 else None
    with machine(NONE):
        with pytest.raises(ValueError, match="ranks were given") as raised:
            adapter.wrap(models.make_net(), Strategy.zeropp(gpus_per_node=gpus_per_node))
        assert known_links(dist.group.WORLD) is None
    return str(raised.value)


@over_adapters
def test_nodes_that_some_ranks_name_are_an_error_before_links_are_asked(pool: Pools, adapter: Adapter) -> None:
    text = "ranks were given different arguments: gpus_per_node: 4 (as launched) on ranks 0-2, 4 on rank 3"
    assert all(text in error for error in pool(4).run(named_on_one_rank, adapter))
