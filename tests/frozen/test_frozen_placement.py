"""A frozen base computes what the dequantized model does, under both FSDPs, wherever it is placed.

It lies on the nodes of the strategy around it, or over the host, unless nodes are named.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import lora, models
from harness.adapter import STOCK, Adapter, Case, Fsdp1
from harness.covering import ADAPTERS, over_adapters, over_each
from harness.links import NONE, machine
from harness.messages import collected
from harness.pool import Pool
from harness.wiretap import wiretap
from torch import Tensor, nn

from fsdp_zpp import (
    NF4,
    Int4,
    Int8,
    QuantizedReduceState,
    Strategy,
    load_frozen_params,
    quantize_frozen_params,
    quantized_reduce_hook,
    save_frozen_params,
)
from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.frozen.modules import frozen_modules
from fsdp_zpp.runtime.unit import StrategyUnit, named_units

# ---- what it computes


def build(adapter: Adapter, strategy: Strategy | None, case: Case, before: Codec | None = None, **options: Any) -> Any:
    """In a worker: a net with detours, quantized before it is wrapped or by its strategy."""
    net = lora.make_net(**dict(case.model))
    if case.checkpointing.startswith("inside"):
        models.recompute(net, case.checkpointing, lambda module: isinstance(module, models.Block))
    if before is not None:
        quantize_frozen_params(net, before, **options)
    return adapter.shard(net, case, strategy)


def logits_of(model: Any) -> Tensor:
    """Logits of one batch, the same on every rank."""
    return model(models.batch(99, 0, rank=0)[:, :-1] % model.embedding.num_embeddings).detach().cpu()


def same_logits(model: Any, codec: Codec) -> list[bool]:
    """In a worker: whether logits are the oracle's bit for bit, without gradients and with them."""
    with torch.no_grad():
        expected = logits_of(lora.rounded_net(codec))
        without = torch.equal(logits_of(model), expected)
    return [without, torch.equal(logits_of(model), expected)]


def by_strategy(adapter: Adapter, scopes: str, codec: Codec) -> list[bool]:
    """In a worker: the same of a net that its strategy quantizes."""
    return same_logits(build(adapter, Strategy(scopes, frozen=codec, gpus_per_node=2), Case()), codec)


@over_each(rest=False, adapter=ADAPTERS, scopes=["IGG", "GGG", "NNN"], codec=[Int8(256), Int8(64), Int4(32), NF4(64)])
def test_forward_equals_the_dequantized_model(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str, codec: Codec
) -> None:
    assert pool(4).run(by_strategy, adapter, scopes, codec) == [[True] * 2] * 4


def on_nodes(adapter: Adapter, strategy: Strategy | None, placement: str) -> list[bool]:
    """In a worker: the same of nets that are quantized before, on nodes of all sizes."""
    codec = Int8(256)
    same = []
    for gpus_per_node in (1, 2):
        options = {"placement": placement, "gpus_per_node": gpus_per_node}
        same += same_logits(build(adapter, strategy, Case(), codec, **options), codec)
    return same


@over_each(
    rest=False,
    adapter=ADAPTERS,
    placement=["N", "I", "G"],
    strategy={"stock": STOCK, "IIG": Strategy("IIG", gpus_per_node=2), "GGG": Strategy("GGG", gpus_per_node=2)},
)
def test_forward_is_the_same_quantized_before_wrapping_and_on_any_placement(
    pool: Callable[[int], Pool], adapter: Adapter, strategy: Any, placement: str
) -> None:
    assert pool(4).run(on_nodes, adapter, strategy, placement) == [[True] * 4] * 4


# ---- gradients and training


CASES = {
    "plain": Case(),
    "accumulated": Case(micro_batches=2),
    "one unit": Case(wrap_blocks=False),
    "tied": Case(model=(("tied", True),)),
    "twice": Case(model=(("twice", True),)),
    "inside reentrant": Case(checkpointing="inside reentrant"),
    "inside no_reentrant": Case(checkpointing="inside no_reentrant"),
    "outside reentrant": Case(checkpointing="outside reentrant"),
}
STEPS = 2


def trainable(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of detours alone."""
    return {name: tensor for name, tensor in named.items() if re.search(r"\.(up|down)\.(up|down)\.", name)}


def distances(adapter: Adapter, strategy: Strategy, case: Case) -> tuple[float, float]:
    """In a worker: how far the first gradients and the last weights are from the oracle's."""
    assert strategy.frozen is not None
    model, net = build(adapter, strategy, case), lora.rounded_net(strategy.frozen, **dict(case.model))
    optimizers = [models.make_optimizer("sgd", [p for p in m.parameters() if p.requires_grad]) for m in (model, net)]
    of_gradients = []
    for step in range(STEPS):
        for micro_batch in range(case.micro_batches):
            with adapter.micro_batch(model, micro_batch == case.micro_batches - 1, False):
                (models.loss_of(model, models.batch(step, micro_batch)) / case.micro_batches).backward()
        for rank, micro_batch in product(range(dist.get_world_size()), range(case.micro_batches)):
            loss = models.loss_of(net, models.batch(step, micro_batch, rank))
            (loss / case.micro_batches / dist.get_world_size()).backward()
        if step == 0:
            ours = trainable(adapter.full_gradients(model))
            of_gradients.append(models.distance(ours, lora.gradients_of(net)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = {name: p.detach().cpu() for name, p in net.named_parameters() if p.requires_grad}
    return of_gradients[0], models.distance(trainable(adapter.full_weights(model)), weights)


def _rows() -> list[Any]:
    """Each case under one adapter; scopes in turn."""
    rows, scopes = [], cycle(["IGG", "GGG", "III", "NNG", "NNN"])
    for number, (name, case) in enumerate(CASES.items()):
        # fully_shard leaves it to the user in which order modules are wrapped, and tests always checkpoint inside.
        takes = [adapter for adapter in ADAPTERS if adapter.torch_name != "fully_shard" or "outside" not in name]
        adapter, each = takes[number % len(takes)], next(scopes)
        rows.append(pytest.param(adapter, each, case, id=f"{adapter} {each} {name}"))
    return rows


@pytest.mark.parametrize(("adapter", "scopes", "case"), _rows())
def test_it_trains_as_the_dequantized_model(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str, case: Case
) -> None:
    strategy = Strategy(scopes, frozen=Int8(256), gpus_per_node=2)
    for gradients, weights in pool(4).run(distances, adapter, strategy, case):
        assert gradients <= 1e-5
        assert weights <= 1e-5  # rounding of sums in another order


# ---- where it lies

TWO = Strategy("IGG", gpus_per_node=2)


def places_of(model: nn.Module) -> set[str]:
    """Where a model's base lies."""
    return {f"{w.placement.scope} on {w.placement.mesh.topology}" for _, _, w in frozen_modules(model)}


# ---- nodes of the strategy


def used(model: Any, codec: Codec) -> tuple[bool, int]:
    """In a worker: whether a forward is the oracle's, bit for bit, and what a second one sends between nodes of two."""
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
    before = places_of(net)
    model = adapter.shard(net, Case(), TWO)
    return [before, places_of(model), *used(model, codec)]


@over_each(rest=False, adapter=ADAPTERS, case=[(Int8(256), "N"), (Int4(32), "G"), (NF4(64), "I")])
def test_the_strategy_says_where_a_base_lies(
    pool: Callable[[int], Pool], adapter: Adapter, case: tuple[Codec, str]
) -> None:
    scope = case[1]
    expected = [{f"{scope} on 1 node x 4"}, {f"{scope} on 2 nodes x 2"}, True, 0]
    assert pool(4).run(quantized_first, adapter, *case) == [expected] * 4


def placed(adapter: Adapter) -> dict[str, Any]:
    """In a worker: where bases lie whose nodes were named, that came late, that were used, and of two strategies."""
    net = lora.make_net()
    quantize_frozen_params(net, gpus_per_node=1)
    found: dict[str, Any] = {"named": places_of(adapter.shard(net, Case(), TWO))}
    model = lora.make_net()
    model.head = adapter.wrap(model.head, TWO)
    quantize_frozen_params(model, ignored_params=list(model.head.parameters()))
    found["after a part was wrapped"] = places_of(model)
    net = lora.make_net()
    quantize_frozen_params(net)
    next(module for _, module, _ in frozen_modules(net)).weight + 0
    settled = adapter.shard(net, Case(), TWO)
    found["used before"] = [places_of(settled), *used(settled, Int8(256))]
    net = lora.make_net()
    quantize_frozen_params(net)
    net.blocks[0] = adapter.wrap(net.blocks[0], Strategy("IGG", gpus_per_node=1))
    both = frozen_modules(adapter.wrap(net, TWO))
    found["by block"] = {(name.split("blocks.")[-1][0], str(w.placement.mesh.topology)) for name, _, w in both}
    if adapter == Fsdp1():  # torch's own strategies have a hook
        net = lora.make_net()
        quantize_frozen_params(net)
        hooked = adapter.shard(net, Case(), STOCK)
        state = QuantizedReduceState(Int4(128), gpus_per_node=2, process_group=dist.group.WORLD)
        hooked.register_comm_hook(state, quantized_reduce_hook)
        found["by a hook"] = places_of(hooked)
    return found


@over_adapters
def test_nodes_named_by_the_user_stay_and_other_bases_follow_the_strategy(
    pool: Callable[[int], Pool], adapter: Adapter
) -> None:
    two = {"I on 2 nodes x 2"}
    for found in pool(4).run(placed, adapter):
        assert found["named"] == {"I on 4 nodes x 1"}
        assert found["after a part was wrapped"] == found.get("by a hook", two) == two
        assert found["used before"] == [two, True, 0]
        of_blocks = {place for place in found["by block"] if place[0] in "01"}
        assert of_blocks == {("0", "4 nodes x 1"), ("1", "2 nodes x 2")}


# ---- machines without fast links between GPUs

LARGE: dict[str, Any] = {"width": 256, "hidden": 688, "vocabulary": 512}


def trained(adapter: Adapter, model: Any) -> dict[str, Tensor]:
    """In a worker: trained weights after a step."""
    optimizer = models.make_optimizer("sgd", [p for p in model.parameters() if p.requires_grad])
    models.loss_of(model, models.batch(0, 0)).backward()
    optimizer.step()
    return trainable(adapter.full_weights(model))


def made(adapter: Adapter, codec: Codec, way: str, folder: Path, strategy: Strategy, place: int | None) -> Any:
    """In a worker: a sharded net whose base was quantized in some way, on nodes of ``place`` ranks if that is given."""
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
    held = sum(unit.nbytes for unit in {weight.holder for _, _, weight in frozen_modules(model)})
    matrices = sum(p.numel() for p in lora.make_net(**LARGE).parameters() if p.dim() == 2 and p.numel() >= 4096)
    return nodes, places_of(model), held, matrices, same, told


@over_each(rest=False, adapter=ADAPTERS, codec=[Int8(64), NF4(64)], way=["by the strategy", "before", "from a file"])
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
