"""Weights that FSDP has sharded can't be quantized: errors say so, on every rank. What is not sharded can be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import lora, models
from harness.adapter import STOCK, Adapter, Case, Fsdp1
from harness.covering import WITH_FLAT, over_each
from harness.messages import Reply, assert_refused, attempt
from harness.pool import Pools, device_type
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fsdp_zpp import (
    Int8,
    Strategy,
    fully_shard as zeropp_shard,
    load_frozen_params,
    quantize_frozen_params,
    save_frozen_params,
)

CODEC = Int8(64)
ZEROPP = Strategy.zeropp(gpus_per_node=2)
REMEDY = (
    "call quantize_frozen_params(model, Int8(block=64)) before you wrap the model, or wrap it with "
    "Strategy(..., frozen=Int8(block=64)), which quantizes what it wraps"
)
SHARDED = f"weight is sharded by FSDP already; {REMEDY}"


def quantize(net: nn.Module, **options: Any) -> Any:
    """In a worker: quantize on nodes of two."""
    return quantize_frozen_params(net, CODEC, gpus_per_node=2, **options)


class PartlyFrozen(nn.Module):
    """Two frozen layers and a trainable one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.first.requires_grad_(False)
        self.second.requires_grad_(False)
        self.to(models.device())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(torch.relu(self.first(x))))


def flat(module: nn.Module, **arguments: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(module, **{"use_orig_params": True, "device_id": models.device()} | arguments)


def used(model: Any) -> Any:
    """In a worker: a model after a forward without a backward, which may leave weights gathered."""
    with torch.no_grad():
        model(torch.ones(2, 64, device=models.device()))
    return model


def sharded(by: Callable[..., Any], **arguments: Any) -> Any:
    """In a worker: a net that one call has sharded, or that this call has made of it."""
    net = PartlyFrozen()
    return by(net, **arguments) or net


def gathered() -> Any:
    net = sharded(fully_shard)
    net.unshard()
    return net


def tensor_parallel() -> Any:
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    net = nn.Sequential(nn.Linear(64, 64)).to(models.device()).requires_grad_(False)
    return parallelize_module(net, mesh["tp"], {"0": ColwiseParallel()})


SHARD_GRAD_OP = ShardingStrategy.SHARD_GRAD_OP
ANOTHER = "is sharded by another parallelism (tensor parallelism, or FSDP around this module), and a frozen base"
REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "flat": (lambda: sharded(flat), {}, f"first.{SHARDED}"),
    "flat, kept": (lambda: used(sharded(flat, sharding_strategy=SHARD_GRAD_OP)), {}, f"first.{SHARDED}"),
    "flat, a layer": (lambda: sharded(flat).module.first, {}, SHARDED),
    "used": (lambda: used(sharded(fully_shard)), {}, f"first.{SHARDED}"),
    "gathered": (gathered, {}, f"first.{SHARDED}"),
    "kept": (lambda: used(sharded(zeropp_shard, strategy=Strategy("NNG", gpus_per_node=2))), {}, f"first.{SHARDED}"),
    "a layer": (lambda: sharded(fully_shard).first, {}, ANOTHER),
    "tensor parallel": (tensor_parallel, {}, f"0.weight {ANOTHER}"),
    "broadcast": (gathered, {"sync_module_states": True}, f"first.{SHARDED}"),
    "from a checkpoint": (gathered, {"checkpoint": torch.zeros}, f"first.{SHARDED}"),
}


def attempts() -> dict[str, Reply]:
    return {
        name: attempt((partial(quantize, make(), **options), ValueError, ""))
        for name, (make, options, _) in REFUSED.items()
    }


def test_however_weights_are_sharded_they_are_refused(pool: Pools) -> None:
    replies = pool(4).run(attempts)
    for name, (_, _, message) in REFUSED.items():
        assert_refused([of_rank[name] for of_rank in replies], (quantize, ValueError, message))


def wrapped(adapter: Adapter, strategy: Any, wrap_blocks: bool, folder: str) -> tuple[Reply, Reply]:
    """In a worker: how a wrapped model is refused, whose weights are to be quantized, or to come from files."""
    saved = lora.make_net()
    quantize(saved)
    save_frozen_params(saved, folder)
    if adapter == Fsdp1(use_orig_params=False):  # which does not mix frozen and trainable parameters
        model: Any = adapter.apply(lora.make_net().requires_grad_(False), strategy, device_id=models.device())
    else:
        model = adapter.shard(lora.make_net(), Case(wrap_blocks=wrap_blocks), strategy)
    calls = partial(quantize, model), partial(load_frozen_params, model, folder)
    first, second = (attempt((call, ValueError, "")) for call in calls)
    assert "Frozen" not in "".join(type(module).__name__ for module in model.modules())
    assert torch.isfinite(models.loss_of(model, models.batch(0, 0)))  # it goes on as it was
    return first, second


@over_each(
    rest=False,
    adapter=WITH_FLAT,
    strategy={"torch's": STOCK, "zeropp": ZEROPP},
    wrap_blocks={"by block": True, "once": False},
)
def test_a_wrapped_model_is_refused_and_goes_on_as_it_was(
    pool: Pools, adapter: Adapter, strategy: Any, wrap_blocks: bool, tmp_path: Path
) -> None:
    by_call, by_files = zip(*pool(4).run(wrapped, adapter, strategy, wrap_blocks, str(tmp_path)), strict=True)
    assert_refused(list(by_call), (quantize, ValueError, SHARDED))
    message = f"is sharded by FSDP already; call load_frozen_params(model, {str(tmp_path)!r}) before you wrap the model"
    assert_refused(list(by_files), (quantize, ValueError, message))


# ---- what is not sharded


def first_by_fully_shard(net: Any, strategy: Strategy) -> Any:
    fully_shard(net.first)
    zeropp_shard(net, strategy=strategy)
    return net


def first_by_flat(net: Any, strategy: Strategy) -> Any:
    net.first = flat(net.first)
    return flat(net, sharding_strategy=strategy)


def ignored_by_fully_shard(net: Any, strategy: Strategy) -> Any:
    for module in (net.first, net.last, net):
        fully_shard(module, ignored_params={net.second.weight})
    quantize(net, ignored_params=list(net.first.parameters()))
    return net


def ignored_by_flat(net: Any, strategy: Strategy) -> Any:
    model = flat(net, ignored_states=[net.second.weight])
    quantize(model, ignored_params=list(net.first.parameters()))
    return model


def quantized_in_part() -> None:
    for shard in (first_by_fully_shard, first_by_flat, ignored_by_fully_shard, ignored_by_flat):
        net, alone = PartlyFrozen(), PartlyFrozen()
        lora.round_weight(alone.second.weight, CODEC)
        model = shard(net, Strategy("GGG", frozen=CODEC, gpus_per_node=2))
        assert type(net.second).__name__.startswith("Frozen")
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(models.device())
        assert torch.equal(model(x), alone(x)), shard.__name__


def test_what_is_not_sharded_is_quantized(pool: Pools) -> None:
    pool(4).run(quantized_in_part)
