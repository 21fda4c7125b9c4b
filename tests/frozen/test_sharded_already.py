"""Weights that FSDP has sharded can't be quantized: errors say so, on every rank. What is not sharded can be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import lora, models
from harness.adapter import STOCK, Adapter, Case, Fsdp1, Fsdp2
from harness.covering import WITH_FLAT, over_each
from harness.messages import Reply, assert_refused, attempt
from harness.pool import Pool, device_type
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
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


class Experts(nn.Module):
    """A frozen stack of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(4, 32, 64), requires_grad=False)


def flat(module: nn.Module, **arguments: Any) -> FullyShardedDataParallel:
    """In a worker: one unit of torch's FullyShardedDataParallel."""
    return FullyShardedDataParallel(module, **{"use_orig_params": True, "device_id": models.device()} | arguments)


def used(model: Any) -> Any:
    """In a worker: a model after a forward without a backward, which may leave weights gathered."""
    with torch.no_grad():
        model(torch.ones(2, 64, device=models.device()))
    return model


def gathered() -> Any:
    """In a worker: a net that is told to gather its weights."""
    net: Any = PartlyFrozen()
    fully_shard(net)
    net.unshard()
    return net


def sharded(by: Callable[..., Any], **arguments: Any) -> nn.Module:
    """In a worker: a net that one call has sharded, or that this call has made of it."""
    net = PartlyFrozen()
    return by(net, **arguments) or net


def frozen_in_one_unit() -> FullyShardedDataParallel:
    """In a worker: frozen layers in one flat parameter, in whose place modules show it alone."""
    net = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)).requires_grad_(False)
    return flat(net, use_orig_params=False)


def with_experts(adapter: Adapter) -> Any:
    """In a worker: a net with a frozen stack of matrices, of which all else is trained."""
    net = PartlyFrozen().requires_grad_(True)
    net.experts = Experts()
    return adapter.wrap(net.to(models.device()), STOCK)


def tensor_parallel() -> Any:
    """In a worker: a frozen linear layer that is split inside of nodes."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    net = nn.Sequential(nn.Linear(64, 64)).to(models.device()).requires_grad_(False)
    return parallelize_module(net, mesh["tp"], {"0": ColwiseParallel()})


def inside(net: nn.Module) -> Any:
    """In a worker: a layer of a net that is one unit."""
    return net.module.first if isinstance(net, FullyShardedDataParallel) else net.first


KEEPS_GATHERED = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
REPLICATES = {"sharding_strategy": ShardingStrategy.NO_SHARD}
ANOTHER = "is sharded by another parallelism (tensor parallelism, or FSDP around this module), and a frozen base"
MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "flat": (lambda: sharded(flat), f"first.{SHARDED}"),
    "flat, kept": (lambda: used(sharded(flat, **KEEPS_GATHERED)), f"first.{SHARDED}"),
    "flat, replicated": (lambda: sharded(flat, **REPLICATES), f"first.{SHARDED}"),
    "flat parameters": (frozen_in_one_unit, f"1.{SHARDED}"),
    "flat, a layer": (lambda: inside(sharded(flat)), SHARDED),
    "flat experts": (lambda: with_experts(Fsdp1()), "experts.stack is sharded by FSDP already"),
    "used": (lambda: used(sharded(fully_shard)), f"first.{SHARDED}"),
    "gathered": (lambda: gathered(), f"first.{SHARDED}"),
    "kept": (lambda: used(sharded(zeropp_shard, strategy=Strategy("NNG", gpus_per_node=2))), f"first.{SHARDED}"),
    "a layer": (lambda: inside(sharded(fully_shard)), ANOTHER),
    "experts": (lambda: with_experts(Fsdp2()), "experts.stack is sharded by FSDP already"),
    "tensor parallel": (lambda: tensor_parallel(), f"0.weight {ANOTHER}"),
}


def attempts() -> dict[str, Reply]:
    """In a worker: how each model is refused, wherever its weights are to come from."""
    replies = {name: attempt((partial(quantize, make()), ValueError, "")) for name, (make, _) in MODELS.items()}
    for name, options in OPTIONS.items():
        replies[name] = attempt((partial(quantize, gathered(), **options), ValueError, ""))
    return replies


OPTIONS: dict[str, dict[str, Any]] = {
    "broadcast": {"sync_module_states": True},
    "from a checkpoint": {"checkpoint": torch.zeros},
}


def test_however_weights_are_sharded_they_are_refused(pool: Callable[[int], Pool]) -> None:
    replies = pool(4).run(attempts)
    said = {name: message for name, (_, message) in MODELS.items()} | dict.fromkeys(OPTIONS, f"first.{SHARDED}")
    for name, message in said.items():
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
    pool: Callable[[int], Pool], adapter: Adapter, strategy: Any, wrap_blocks: bool, tmp_path: Path
) -> None:
    by_call, by_files = zip(*pool(4).run(wrapped, adapter, strategy, wrap_blocks, str(tmp_path)), strict=True)
    assert_refused(list(by_call), (quantize, ValueError, SHARDED))
    message = f"is sharded by FSDP already; call load_frozen_params(model, {str(tmp_path)!r}) before you wrap the model"
    assert_refused(list(by_files), (quantize, ValueError, message))


# ---- what is not sharded


def frozen_layers(net: Any) -> list[str]:
    """In a worker: the layers of a net that are quantized."""
    net = net.module if isinstance(net, FullyShardedDataParallel) else net
    named = [(name, getattr(layer, "module", layer)) for name, layer in net.named_children()]
    return [name for name, layer in named if type(layer).__name__.startswith("Frozen")]


def quantized_in_part(by: str) -> tuple[list[str], float]:
    """In a worker: what is quantized of a net with a layer that FSDP has, and how far it computes something else."""
    net, alone = PartlyFrozen(), PartlyFrozen()
    model: Any = net
    lora.round_weight(alone.second.weight, CODEC)
    if by == "a layer under fully_shard, by strategy":
        fully_shard(net.first)
        zeropp_shard(net, strategy=Strategy("GGG", frozen=CODEC, gpus_per_node=2))
    elif by == "a layer under FullyShardedDataParallel, by strategy":
        net.first = flat(net.first)
        model = flat(net, sharding_strategy=Strategy("GGG", frozen=CODEC, gpus_per_node=2))
    elif by == "a layer that fully_shard ignores":
        for layer in (net.first, net.last):
            fully_shard(layer, ignored_params={net.second.weight})
        fully_shard(net, ignored_params={net.second.weight})
        assert quantize(net, ignored_params=list(net.first.parameters())).weights == 1
    elif by == "a layer that FullyShardedDataParallel ignores":
        model = flat(net, ignored_states=[net.second.weight])
        assert quantize(model, ignored_params=list(net.first.parameters())).weights == 1
    else:
        replicate(net.last)
        assert quantize(net.second).weights == 1
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(models.device())
    return frozen_layers(model), (model(x) - alone(x)).abs().max().item()


WAYS = (
    "a layer under fully_shard, by strategy",
    "a layer under FullyShardedDataParallel, by strategy",
    "a layer that fully_shard ignores",
    "a layer that FullyShardedDataParallel ignores",
    "a layer beside one that is replicated",
)


def all_ways() -> dict[str, tuple[list[str], float]]:
    """In a worker: as above, for each way to shard a part alone."""
    return {by: quantized_in_part(by) for by in WAYS}


def test_what_is_not_sharded_is_quantized(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(all_ways) == [dict.fromkeys(WAYS, (["second"], 0.0))] * 4
