"""A frozen base lies on the nodes of the strategy around it, wherever it was quantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import lora, models
from harness.adapter import STOCK, Adapter, Case
from harness.covering import over_adapters
from harness.fsdp1 import Fsdp1
from harness.pool import Pool
from harness.wiretap import wiretap
from torch import nn

from fsdp_zpp import NF4, Int4, Int8, QuantizedReduceState, Strategy, quantize_frozen_params, quantized_reduce_hook
from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.frozen.modules import frozen_modules

TWO = Strategy("IGG", gpus_per_node=2)


def nodes_of(model: nn.Module) -> set[str]:
    return {f"{w.placement.scope} on {w.placement.mesh.topology}" for _, _, w in frozen_modules(model)}


def used(model: Any, codec: Codec) -> tuple[bool, int]:
    """Whether a forward is the oracle's, bit for bit, and what a second one sends between nodes of two."""
    tokens = models.batch(99, 0, rank=0)[:, :-1] % model.embedding.num_embeddings
    with torch.no_grad():
        same = torch.equal(model(tokens), lora.rounded_net(codec)(tokens))
        with wiretap(2) as tap:
            model(tokens)
    return same, tap.total("inter")


def quantized_first(adapter: Adapter, codec: Codec, scope: str) -> list[Any]:
    """In a worker: a base that is quantized without a word on nodes, then wrapped by a strategy that knows them."""
    net = lora.make_net()
    quantize_frozen_params(net, codec, placement=scope)
    before = nodes_of(net)
    model = adapter.shard(net, Case(), TWO)
    return [before, nodes_of(model), *used(model, codec)]


@pytest.mark.parametrize(
    ("codec", "scope"), [(Int8(256), "I"), (Int4(32), "G"), (Int8(64), "N"), (NF4(64), "I")], ids=str
)
@over_adapters
def test_the_strategy_says_where_a_base_lies(
    pool: Callable[[int], Pool], adapter: Adapter, codec: Codec, scope: str
) -> None:
    for before, after, same, between in pool(4).run(quantized_first, adapter, codec, scope):
        assert before == {f"{scope} on 1 node x 4"}
        assert after == {f"{scope} on 2 nodes x 2"}
        assert same
        assert between == 0


def by_name_or_later(adapter: Adapter) -> list[Any]:
    """In a worker: bases whose nodes were named, that came when a part was wrapped, and that were used before it."""
    net = lora.make_net()
    quantize_frozen_params(net, gpus_per_node=1)
    named = nodes_of(adapter.shard(net, Case(), TWO))
    model = lora.make_net()
    model.head = adapter.wrap(model.head, TWO)
    quantize_frozen_params(model, ignored_params=list(model.head.parameters()))
    later = nodes_of(model)
    net = lora.make_net()
    quantize_frozen_params(net)
    next(module for _, module, _ in frozen_modules(net)).weight + 0
    settled = adapter.shard(net, Case(), TWO)
    return [named, later, nodes_of(settled), *used(settled, Int8(256))]


@over_adapters
def test_nodes_named_by_the_user_stay_and_later_bases_follow_the_strategy(
    pool: Callable[[int], Pool], adapter: Adapter
) -> None:
    two = {"I on 2 nodes x 2"}
    assert pool(4).run(by_name_or_later, adapter) == [[{"I on 4 nodes x 1"}, two, two, True, 0]] * 4


def units_on_different_nodes(adapter: Adapter) -> set[str]:
    """In a worker: blocks wrapped by a strategy of their own, before the rest is by another."""
    net = lora.make_net()
    quantize_frozen_params(net)
    net.blocks[0] = adapter.wrap(net.blocks[0], Strategy("IGG", gpus_per_node=1))
    model = adapter.wrap(net, TWO)
    return {name.split("blocks.")[-1][0] + f" {w.placement.mesh.topology}" for name, _, w in frozen_modules(model)}


@over_adapters
def test_each_unit_lies_on_its_own_strategys_nodes(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for found in pool(4).run(units_on_different_nodes, adapter):
        assert {place for place in found if place[0] in "012"} == {"0 4 nodes x 1", "1 2 nodes x 2", "2 2 nodes x 2"}


def with_a_hook() -> set[str]:
    """In a worker: under torch's own strategy the hook is who knows the nodes."""
    net = lora.make_net()
    quantize_frozen_params(net)
    model = Fsdp1().shard(net, Case(), STOCK)
    state = QuantizedReduceState(Int4(128), gpus_per_node=2, process_group=dist.group.WORLD)
    model.register_comm_hook(state, quantized_reduce_hook)
    return nodes_of(model)


def test_a_hook_says_where_a_base_lies(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(with_a_hook) == [{"I on 2 nodes x 2"}] * 4
