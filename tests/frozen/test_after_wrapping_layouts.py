"""A model that was sharded in any way and is then quantized computes what one with rounded weights does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import lora, models
from harness.adapter import Precision
from harness.fsdp1 import Fsdp1
from harness.pool import Pool
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from ways_to_shard import FLAT_WAYS, WAYS, PartlyFrozen, flat_tied, replaced, tied_after, tied_before

from fsdp_zpp import Int8, quantize_frozen_params

CODEC = Int8(64)


def as_rounded(way: Callable[[PartlyFrozen], Any]) -> bool:
    """In a worker: whether a sharded net, quantized, computes what one with rounded weights does, and loads itself."""
    net = way(PartlyFrozen())
    quantize_frozen_params(net, CODEC, gpus_per_node=2)
    alone = PartlyFrozen()
    if way in (tied_before, tied_after, flat_tied):
        alone.second.weight = alone.first.weight
    if way is replaced:
        alone.second.weight.data *= 2
    for weight in {alone.first.weight, alone.second.weight}:
        lora.round_weight(weight, CODEC)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(models.device())
    for _ in range(2):
        out, expected = net(x), alone(x)
        assert torch.equal(out, expected)
        out.sum().backward()
        expected.sum().backward()
        net.load_state_dict(net.state_dict())
    wanted = alone.last.weight.grad
    if isinstance(net, FullyShardedDataParallel):
        (found,) = Fsdp1().full_gradients(net).values()
        wanted, net = wanted.cpu(), net.module
    else:
        found = net.last.weight.grad.full_tensor()
    first = net.first.module if isinstance(net.first, FullyShardedDataParallel) else net.first
    return models.distance({"": found}, {"": wanted}) <= 1e-6 and type(first).__name__.startswith("Frozen")


def tied_in_part(part: str, precision: Precision | None) -> bool:
    """In a worker: of two layers that share a weight and are flattened, one is quantized; the other stays as it is."""
    net, alone = PartlyFrozen(), PartlyFrozen()
    options: dict[str, Any] = {} if precision is None else {"mixed_precision": MixedPrecision(precision.param)}
    sharded = flat_tied(net, **options)
    quantize_frozen_params(getattr(net, part), CODEC, gpus_per_node=2)
    alone.second.weight = nn.Parameter(alone.first.weight.detach().clone())
    dtype = torch.float32 if precision is None else precision.param
    lora.round_weight(getattr(alone, part).weight, CODEC)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(models.device(), dtype)
    return torch.equal(sharded(x), alone.to(dtype)(x))


@pytest.mark.parametrize("precision", [None, Precision(torch.bfloat16, torch.float32)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("part", ["first", "second"])
def test_one_of_two_tied_layers_may_be_quantized(
    pool: Callable[[int], Pool], part: str, precision: Precision | None
) -> None:
    assert pool(4).run(tied_in_part, part, precision) == [True] * 4


@pytest.mark.parametrize("way", WAYS + FLAT_WAYS, ids=lambda way: way.__name__)
def test_it_computes_what_rounded_weights_do_however_it_was_sharded(
    pool: Callable[[int], Pool], way: Callable[[PartlyFrozen], Any]
) -> None:
    assert pool(4).run(as_rounded, way) == [True] * 4
