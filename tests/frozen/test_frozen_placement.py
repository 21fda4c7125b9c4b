"""A frozen base computes what the dequantized model does, and lies on the nodes of the strategy, or on those named."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import lora, models
from harness.adapter import STOCK, Adapter, Case
from harness.covering import ADAPTERS, over_adapters, over_each
from harness.links import NONE, machine
from harness.pool import Pools
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
from fsdp_zpp.codecs import Codec
from fsdp_zpp.frozen._torch_modules import frozen_sites
from fsdp_zpp.runtime.unit import StrategyUnit, named_units

# ---- what it computes


def logits_of(model: Any) -> Tensor:
    """Logits of one batch, the same on every rank."""
    return model(models.batch(99, 0, rank=0)[:, :-1] % model.embedding.num_embeddings).detach()


def computes_as_dequantized(model: Any, codec: Codec) -> None:
    """In a worker: logits are the oracle's bit for bit, without gradients and with them."""
    expected = logits_of(lora.rounded_net(codec))
    with torch.no_grad():
        assert torch.equal(logits_of(model), expected)
    assert torch.equal(logits_of(model), expected)


def by_strategy(adapter: Adapter, scopes: str, codec: Codec) -> None:
    strategy = Strategy(scopes, frozen=codec, gpus_per_node=2)
    computes_as_dequantized(adapter.shard(lora.make_net(), Case(), strategy), codec)


@over_each(rest=False, adapter=ADAPTERS, scopes=["IGG", "GGG", "NNN"], codec=[Int8(256), Int8(64), Int4(32), NF4(64)])
def test_forward_equals_the_dequantized_model(pool: Pools, adapter: Adapter, scopes: str, codec: Codec) -> None:
    pool(4).run(by_strategy, adapter, scopes, codec)


# ---- gradients and training


FSDP1, FSDP2 = ADAPTERS
CASES = {
    "plain": (FSDP1, "IGG", Case()),
    "accumulated": (FSDP2, "GGG", Case(micro_batches=2)),
    "one unit": (FSDP1, "III", Case(wrap_blocks=False)),
    "tied": (FSDP2, "NNG", Case(model=(("tied", True),))),
    "twice": (FSDP1, "NNN", Case(model=(("twice", True),))),
    "inside reentrant": (FSDP2, "IGG", Case(checkpointing="inside reentrant")),
    "inside no_reentrant": (FSDP1, "GGG", Case(checkpointing="inside no_reentrant")),
    "outside reentrant": (FSDP1, "III", Case(checkpointing="outside reentrant")),
}


def trainable(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of detours alone."""
    return {name: tensor for name, tensor in named.items() if re.search(r"\.(up|down)\.(up|down)\.", name)}


def trains_as_dequantized(adapter: Adapter, scopes: str, case: Case) -> None:
    model, net = lora.make_net(**dict(case.model)), lora.rounded_net(Int8(256), **dict(case.model))
    if case.checkpointing.startswith("inside"):
        models.recompute(model, case.checkpointing, lambda module: isinstance(module, models.Block))
    model = adapter.shard(model, case, Strategy(scopes, frozen=Int8(256), gpus_per_node=2))
    optimizers = [models.make_optimizer("sgd", [p for p in m.parameters() if p.requires_grad]) for m in (model, net)]
    for step in range(2):
        for micro_batch in range(case.micro_batches):
            with adapter.micro_batch(model, micro_batch == case.micro_batches - 1, False):
                (models.loss_of(model, models.batch(step, micro_batch)) / case.micro_batches).backward()
        for rank, micro_batch in product(range(dist.get_world_size()), range(case.micro_batches)):
            loss = models.loss_of(net, models.batch(step, micro_batch, rank))
            (loss / case.micro_batches / dist.get_world_size()).backward()
        if step == 0:
            ours = trainable(adapter.full_gradients(model))
            assert models.distance(ours, lora.gradients_of(net)) <= 1e-5  # rounding of sums in another order
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = {name: p.detach().cpu() for name, p in net.named_parameters() if p.requires_grad}
    assert models.distance(trainable(adapter.full_weights(model)), weights) <= 1e-5


@pytest.mark.parametrize(("adapter", "scopes", "case"), CASES.values(), ids=CASES)
def test_it_trains_as_the_dequantized_model(pool: Pools, adapter: Adapter, scopes: str, case: Case) -> None:
    pool(4).run(trains_as_dequantized, adapter, scopes, case)


# ---- nodes of the strategy

TWO = Strategy("IGG", gpus_per_node=2)


def places_of(model: nn.Module) -> set[str]:
    return {f"{w.placement.scope} on {w.placement.mesh.topology}" for *_, w in frozen_sites(model)}


def sends_nothing_between_nodes(model: Any) -> None:
    with torch.no_grad(), wiretap(2) as tap:
        logits_of(model)
    assert tap.total("inter") == 0


def quantized_first(adapter: Adapter, codec: Codec, scope: str) -> None:
    net = lora.make_net()
    quantize_frozen_params(net, codec, placement=scope)
    with pytest.raises(
        ValueError, match=r"on 1 node x 4, but the strategy .* has 2 nodes x 2; pass gpus_per_node=2 to"
    ):
        adapter.shard(net, Case(), TWO)
    net = lora.make_net()
    quantize_frozen_params(net, codec, placement=scope, gpus_per_node=2)
    model = adapter.shard(net, Case(), TWO)
    assert places_of(model) == {f"{scope} on 2 nodes x 2"}
    computes_as_dequantized(model, codec)
    sends_nothing_between_nodes(model)


@over_each(rest=False, adapter=ADAPTERS, case=[(Int8(256), "N"), (Int4(32), "I"), (NF4(64), "I")])
def test_a_base_lies_on_the_nodes_of_the_strategy(pool: Pools, adapter: Adapter, case: tuple[Codec, str]) -> None:
    pool(4).run(quantized_first, adapter, *case)


def placed(adapter: Adapter) -> None:
    two = {"I on 2 nodes x 2"}
    net = lora.make_net()
    quantize_frozen_params(net, gpus_per_node=1)
    model = adapter.shard(net, Case(), TWO)
    assert places_of(model) == {"I on 4 nodes x 1"}
    computes_as_dequantized(model, Int8(256))
    model = lora.make_net()
    model.head = adapter.wrap(model.head, TWO)
    quantize_frozen_params(model, ignored_params=list(model.head.parameters()))
    assert places_of(model) == two
    net = lora.make_net()
    quantize_frozen_params(net, gpus_per_node=2)
    net.blocks[0] = adapter.wrap(net.blocks[0], Strategy("IGG", gpus_per_node=1))
    sharded = adapter.wrap(net, TWO)
    assert places_of(sharded) == two
    computes_as_dequantized(sharded, Int8(256))
    if adapter == FSDP1:  # torch's own strategies have a hook
        net = lora.make_net()
        quantize_frozen_params(net)
        hooked = adapter.shard(net, Case(), STOCK)
        state = QuantizedReduceState(Int4(128), gpus_per_node=2, process_group=dist.group.WORLD)
        with pytest.raises(ValueError, match="pass gpus_per_node=2 to quantize_frozen_params"):
            hooked.register_comm_hook(state, quantized_reduce_hook)


def placed_without_fast_links(adapter: Adapter) -> None:
    alone, host = {"I on 4 nodes x 1"}, {"I on 1 node x 4"}
    with machine(NONE):
        assert places_of(adapter.shard(lora.make_net(), Case(), Strategy.mixzpp(gpus_per_node=1))) == alone
        net = lora.make_net()
        quantize_frozen_params(net, gpus_per_node=1)
        assert places_of(adapter.shard(net, Case(), Strategy.zeropp())) == alone
        model = lora.make_net()
        model.head = adapter.wrap(model.head, Strategy.zeropp())
        quantize_frozen_params(model, ignored_params=list(model.head.parameters()))
        assert places_of(model) == host


@over_adapters
def test_nodes_named_by_the_user_stay(pool: Pools, adapter: Adapter) -> None:
    pool(4).run(placed, adapter)
    pool(4).run(placed_without_fast_links, adapter)


# ---- machines without fast links between GPUs

LARGE: dict[str, Any] = {"width": 256, "hidden": 688, "vocabulary": 512}


def trained(adapter: Adapter, model: Any) -> dict[str, Tensor]:
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


def on_slow_links(adapter: Adapter, codec: Codec, way: str, folder: Path) -> None:
    """In a worker: a base stays sharded over the host, and computes as on places that are named."""
    with machine(NONE):
        model = made(adapter, codec, way, folder, Strategy.zeropp(), None)
        ours = trained(adapter, model)
    nodes = {str(unit.ranks.topology) for unit in named_units(model) if isinstance(unit, StrategyUnit)}
    assert (nodes, places_of(model)) == ({"4 nodes x 1"}, {"I on 1 node x 4"})
    held = sum(unit.nbytes for unit in {weight.holder for *_, weight in frozen_sites(model)})
    matrices = sum(p.numel() for p in lora.make_net(**LARGE).parameters() if p.dim() == 2 and p.numel() >= 4096)
    assert held <= 1.02 * codec.nbytes(matrices) / 4
    named = made(adapter, codec, "before", folder, Strategy.zeropp(gpus_per_node=1), 4)
    assert all(torch.equal(ours[name], value) for name, value in trained(adapter, named).items())


@over_each(rest=False, adapter=ADAPTERS, codec=[Int8(64), NF4(64)], way=["by the strategy", "before", "from a file"])
def test_a_base_stays_sharded_over_the_host(
    pool: Pools, tmp_path: Path, adapter: Adapter, codec: Codec, way: str
) -> None:
    pool(4).run(on_slow_links, adapter, codec, way, tmp_path)
