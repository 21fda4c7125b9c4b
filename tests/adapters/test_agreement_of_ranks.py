"""Ranks that were told different things raise the same error, which names ranks and difference; none hangs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import lora, models
from harness.adapter import STOCK, Adapter
from harness.covering import over_adapters
from harness.fsdp1 import Fsdp1
from harness.pool import Pool, device_type
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from fsdp_zpp import Int4, Int8, LoCo, QuantizedReduceState, Strategy, quantize_frozen_params, quantized_reduce_hook
from fsdp_zpp.frozen.modules import frozen_modules

TWO = Strategy("IGG", gpus_per_node=2)
Attempt = Callable[[Adapter, bool], object]
"""What ranks do; the last one, for which the second argument is true, does it differently."""


def wrapped_with(usual: Strategy, other: Strategy) -> Attempt:
    return lambda adapter, differs: adapter.wrap(models.make_net(), other if differs else usual)


def nets(usual: Callable[[], nn.Module], other: Callable[[], nn.Module]) -> Attempt:
    return lambda adapter, differs: adapter.wrap((other if differs else usual)(), TWO)


def launched_otherwise(adapter: Adapter, differs: bool) -> None:
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "4" if differs else "2"}):
        adapter.wrap(models.make_net(), Strategy("IGG"))


def placed_otherwise(adapter: Adapter, differs: bool) -> None:
    """Two nodes of srun's, but with every second rank on each of them."""
    local, node = divmod(dist.get_rank(), 2)
    srun = {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
    with mock.patch.dict(os.environ, srun):
        del os.environ["LOCAL_WORLD_SIZE"]
        adapter.wrap(models.make_net(), Strategy("IGG"))


def computed_otherwise(adapter: Adapter, differs: bool) -> None:
    dtype = torch.float16 if differs else torch.bfloat16
    if isinstance(adapter, Fsdp1):
        adapter.wrap(models.make_net(), TWO, mixed_precision=MixedPrecision(param_dtype=dtype))
    else:
        adapter.wrap(models.make_net(), TWO, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))


def one_block_less(adapter: Adapter, differs: bool) -> None:
    net = models.make_net()
    for i in range(1 if differs else 2):
        net.blocks[i] = adapter.wrap(net.blocks[i], TWO)
    adapter.wrap(net, TWO)


def no_root(adapter: Adapter, differs: bool) -> None:
    net = models.make_net()
    for i in range(3):
        net.blocks[i] = adapter.wrap(net.blocks[i], TWO)
    net = net if differs else adapter.wrap(net, TWO)
    models.loss_of(net, models.batch(0, 0))


def other_order(adapter: Adapter, differs: bool) -> None:
    """Each call is the same, but for the block that it is made of."""
    net = models.make_net()
    for i, scopes in zip((1, 0) if differs else (0, 1), ("IGG", "GGG"), strict=True):
        net.blocks[i] = adapter.wrap(net.blocks[i], Strategy(scopes, gpus_per_node=2))
    net = adapter.wrap(net, TWO)
    models.loss_of(net, models.batch(0, 0))


def quantized_by(usual: dict[str, Any], other: dict[str, Any]) -> Attempt:
    return lambda adapter, differs: quantize_frozen_params(lora.make_net(), **other if differs else usual)


def frozen_otherwise(adapter: Adapter, differs: bool) -> None:
    net = lora.make_net()
    net.head.requires_grad_(differs)
    quantize_frozen_params(net, gpus_per_node=2)


def gathered_otherwise(adapter: Adapter, differs: bool) -> None:
    """The base is the same, but what is wrapped as one is gathered as one."""
    inner = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
    net = nn.Sequential(inner, nn.Linear(64, 2)).to(models.device())
    quantize_frozen_params(net, gpus_per_node=2)
    if not differs:
        net[0] = adapter.wrap(net[0], STOCK)
    next(module for _, module, _ in frozen_modules(net)).weight + 0


ATTEMPTS: dict[str, tuple[Attempt, str]] = {
    "scopes": (wrapped_with(TWO, Strategy("GGG", gpus_per_node=2)), "levels: IGG on ranks 0-2, GGG on rank 3"),
    "plain": (wrapped_with(TWO, Strategy()), "gpus_per_node: 2 on ranks 0-2, 4 on rank 3"),
    "weights": (
        wrapped_with(Strategy.zeropp(gpus_per_node=2), Strategy.zeropp(gpus_per_node=2, weights=Int8(64))),
        "weights: Int8(block=256) on ranks 0-2, Int8(block=64) on rank 3",
    ),
    "feedback": (
        wrapped_with(Strategy.loco(gpus_per_node=2), Strategy.zeropp(gpus_per_node=2)),
        "None on rank 3",
    ),
    "node size": (
        wrapped_with(TWO, Strategy("IGG", gpus_per_node=4)),
        "gpus_per_node: 2 on ranks 0-2, 4 on rank 3",
    ),
    "impossible node size": (
        wrapped_with(TWO, Strategy("IGG", gpus_per_node=3)),
        "gpus_per_node: 2 on ranks 0-2, 3 on rank 3",
    ),
    "launcher": (launched_otherwise, "gpus_per_node: 2 on ranks 0-2, 4 on rank 3"),
    "srun": (placed_otherwise, "SLURM_NODEID=1, SLURM_LOCALID=0 (srun has put other ranks between) on rank 1"),
    "precision": (computed_otherwise, "torch.float16"),
    "frozen": (
        nets(models.make_net, lambda: models.make_net(frozen=True)),
        " frozen on rank 3",
    ),
    "sizes": (nets(models.make_net, lambda: models.make_net(hidden=30)), "[30] on rank 3"),
    "more parameters": (nets(models.make_net, lambda: models.make_net(tied=True)), "head.weight: torch.float32"),
    "units": (one_block_less, "(Block) on ranks 0-2, "),
    "no root": (no_root, "the first forward of Block on rank 3"),
    "order of units": (other_order, "blocks.0: Strategy(levels='IGG'"),
    "codec of the base": (quantized_by({"codec": Int8(256)}, {"codec": Int4(128)}), "codec: Int8(block=256) on ranks"),
    "placement of the base": (quantized_by({}, {"placement": "G"}), "placement: I on ranks 0-2, G on rank 3"),
    "nodes of the base": (
        quantized_by({}, {"gpus_per_node": 2}),
        "gpus_per_node: 4 (as launched) on ranks 0-2, 2 on rank 3",
    ),
    "what is in the base": (frozen_otherwise, "weight head.weight: torch.float32"),
    "units of the base": (gathered_otherwise, "the first use of the frozen base of"),
}


def raised(adapter: Adapter, name: str) -> str:
    """In a worker: what the difference raises."""
    with pytest.raises(ValueError, match=r" on ranks? ") as caught:
        ATTEMPTS[name][0](adapter, dist.get_rank() == 3)
    return str(caught.value)


@pytest.mark.parametrize("name", ATTEMPTS)
@over_adapters
def test_a_difference_between_ranks_is_an_error_on_all_of_them(
    pool: Callable[[int], Pool], adapter: Adapter, name: str
) -> None:
    first, *others = pool(4).run(raised, adapter, name)
    # On GPUs the links decide of those as launched, and errors tell them from those that were given.
    assert ATTEMPTS[name][1] in first or ATTEMPTS[name][1] in first.replace(" (as launched)", "")
    assert others == [first] * 3


def raised_by_hooks() -> list[str]:
    """In a worker: what differences between states, and between models that get one, raise."""
    differs, texts = dist.get_rank() == 3, []
    states = (
        {"codec": Int4(64 if differs else 128)},
        {"codec": Int4(128), "error_feedback": LoCo() if differs else None},
    )
    for arguments in states:
        with pytest.raises(ValueError, match=r" on ranks? ") as caught:
            QuantizedReduceState(gpus_per_node=2, **arguments)
        texts.append(str(caught.value))
    net = models.make_net()
    if not differs:
        net.blocks[0] = Fsdp1().wrap(net.blocks[0], STOCK)
    model = Fsdp1().wrap(net, STOCK)
    state = QuantizedReduceState(Int4(128), gpus_per_node=2)
    with pytest.raises(ValueError, match=r" on ranks? ") as caught:
        model.register_comm_hook(state, quantized_reduce_hook)
    return [*texts, str(caught.value)]


def test_a_difference_between_hooks_is_an_error_on_all_ranks(pool: Callable[[int], Pool]) -> None:
    first, *others = pool(4).run(raised_by_hooks)
    assert others == [first] * 3
    assert "codec: Int4(block=128) on ranks 0-2, Int4(block=64) on rank 3" in first[0]
    assert "error_feedback: None on ranks 0-2, LoCo(" in first[1]
    assert "missing on rank 3" in first[2]


def named_on_a_mesh(adapter: Adapter) -> str:
    """In a worker: the error where the last rank is given another strategy beside tensor parallelism."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    strategy = Strategy("IGG", weights=Int8(64) if dist.get_rank() == 3 else None, gpus_per_node=1)
    if mesh["tp"].get_local_rank() == 0:
        adapter.wrap(models.make_net(), strategy, **{adapter.mesh_argument: mesh["dp"]})
        return ""
    with pytest.raises(ValueError, match="ranks were given different arguments") as caught:
        adapter.wrap(models.make_net(), strategy, **{adapter.mesh_argument: mesh["dp"]})
    return str(caught.value)


@over_adapters
def test_ranks_are_named_by_their_coordinates(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    first, text, _, same_text = pool(4).run(named_on_a_mesh, adapter)
    assert not first
    assert text == same_text
    assert "on rank 1 (dp 0, tp 1)" in text
    assert "on rank 3 (dp 1, tp 1)" in text
