"""Quantizing a sharded model leaves FSDP nothing of the base, and only one unit at a time is whole meanwhile."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from harness import lora, models
from harness.adapter import STOCK, Case
from harness.fsdp1 import Fsdp1
from harness.fsdp2 import Fsdp2
from harness.pool import Pool
from harness.strategies import quantize
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from fsdp_zpp import Int8, Strategy, quantize_frozen_params


def frozen_matrices(model: nn.Module) -> list[nn.Parameter]:
    """In a worker: the weights of a model that are frozen, be they sharded or not."""
    weights = [module.weight for module in model.modules() if isinstance(module, (nn.Linear, nn.Embedding))]
    return [weight for weight in weights if not weight.requires_grad]


def gathered_by_torch(model: nn.Module) -> set[str]:
    """In a worker: the units that torch gathers in a forward, by the names that it has for a profiler."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        models.loss_of(model, models.batch(0, 0)).backward()
    names = (re.fullmatch(r"FSDP::all_gather \((.*)\)", event.name) for event in profiler.events())
    return {name.group(1) for name in names if name is not None}


def with_units_of_one_weight() -> Any:
    """In a worker: a net under torch's fully_shard, whose embedding and head are units of their own."""
    adapter = Fsdp2()
    net = lora.make_net()
    net.head.requires_grad_(False)
    adapter.apply(net.head, STOCK)
    adapter.apply(net.embedding, STOCK)
    return adapter.shard(net, Case(), STOCK)


def left_with_fsdp() -> tuple[list[str], set[str], list[bool], bool]:
    """In a worker: what of a model FSDP still has; units it gathers no more; which shards are alive; DTensors left."""
    model = with_units_of_one_weight()
    alive = [weakref.ref(weight) for weight in frozen_matrices(model) if weight.numel() >= 4096]
    report = quantize(model)
    gc.collect()
    no_more = gathered_by_torch(with_units_of_one_weight()) - gathered_by_torch(model)
    names = [name for name, p in model.named_parameters() if p.dim() == 2 and not p.requires_grad]
    assert report.weights == len(alive) == 8
    dtensors = all(isinstance(p, DTensor) for p in model.parameters())
    return names, no_more, [reference() is not None for reference in alive], dtensors


def test_fully_shard_keeps_no_weight_that_was_quantized(pool: Callable[[int], Pool]) -> None:
    for names, no_more, alive, dtensors in pool(4).run(left_with_fsdp):
        assert names == []
        assert no_more == {"embedding", "head"}
        assert alive == [False] * 8
        assert dtensors


def holders_of(weight: Tensor | None) -> str:
    """What keeps a weight alive, if it is: nothing that Python knows of means torch's C++."""
    if weight is None:
        return ""
    return f"{tuple(weight.shape)} held by {[type(each).__name__ for each in gc.get_referrers(weight)]}"


def left_flattened() -> tuple[list[str], int, int, list[str]]:
    """In a worker: frozen matrices that FSDP1 still has; values in its flat parameters; as expected; what is alive."""
    adapter = Fsdp1()
    net = lora.make_net()
    expected = sum(p.numel() for p in net.parameters() if p.requires_grad or p.dim() == 1)
    model = adapter.shard(net, Case(), Strategy(gpus_per_node=2))
    alive = [weakref.ref(weight) for weight in frozen_matrices(model)]
    report = quantize(model)
    assert report.weights == len(alive) == 8
    assert report.model == "Net"
    assert report.left == {"1-D": report.left["1-D"]}
    assert not any("_fsdp" in name for name in report.left["1-D"])
    models.loss_of(model, models.batch(0, 0)).backward()
    gc.collect()
    full = adapter.full_weights(model)
    matrices = [name for name in full.keys() - lora.trainable(full).keys() if full[name].dim() == 2]
    values = sum(weight.numel() for weight in full.values())
    return matrices, values, expected, [holders_of(reference()) for reference in alive]


def test_flat_parameters_keep_no_weight_that_was_quantized(pool: Callable[[int], Pool]) -> None:
    for matrices, values, expected, alive in pool(4).run(left_flattened):
        assert matrices == []
        assert values == expected
        assert [holders for holders in alive if holders] == []


@dataclass(frozen=True)
class Watching(Int8):
    """Notes, whenever it encodes, the bytes that some parameters take."""

    def encode(self, values: Tensor, rows: int, cols: int) -> Tensor:
        storages = [parameter.untyped_storage() for parameter in WATCHED]
        NOTED.append(sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))
        return super().encode(values, rows, cols)


WATCHED: list[nn.Parameter] = []
NOTED: list[int] = []


def bytes_meanwhile(strategy: Any) -> tuple[int, int]:
    """In a worker: the most that frozen matrices take while they are quantized, and what their shards and a unit do."""
    net = lora.make_net(blocks=6)
    block = sum(p.nbytes for p in net.blocks[0].parameters() if not p.requires_grad)
    rest = net.embedding.weight.nbytes + net.head.weight.nbytes
    model = Fsdp1().shard(net, Case(), strategy)
    WATCHED[:] = frozen_matrices(model)
    NOTED.clear()
    assert quantize_frozen_params(model, Watching(64), gpus_per_node=2).weights == len(WATCHED) == len(NOTED) == 14
    return max(NOTED), (6 * block + rest) // 4 + max(block, rest)


@pytest.mark.parametrize("strategy", [STOCK, Strategy.zeropp(gpus_per_node=2)], ids=["torch's", "zeropp"])
def test_one_unit_at_a_time_is_whole_while_quantizing(pool: Callable[[int], Pool], strategy: Strategy | None) -> None:
    for most, allowed in pool(4).run(bytes_meanwhile, strategy):
        assert most <= 1.1 * allowed
