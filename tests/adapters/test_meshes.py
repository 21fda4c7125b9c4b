"""Meshes of several dimensions, and of some of a job's ranks; parts of a model with strategies of their own."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from harness import llama, lora, models
from harness.adapter import STOCK, Adapter, Case, Fsdp1
from harness.covering import ADAPTERS, WITH_FLAT, over_each
from harness.pool import Pools, device_type
from harness.training import train
from peft import PeftModel
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_zpp import (
    CodecState,
    Int4,
    Int4Delta,
    Int8,
    LocalSteps,
    QuantizedReduceState,
    Strategy,
    agreed_weights,
    dequantize_frozen_params,
    exchange_weights,
    invalidate,
    load_frozen_params,
    quantize_frozen_params,
    quantized_reduce_hook,
    save_adapter,
    save_frozen_params,
    traffic,
)

TWO: dict[str, Any] = {"gpus_per_node": 2}
Trained = tuple[dict[str, Tensor], Any]
"""Weights, and the bytes that were sent."""


def wrap_blocks(adapter: Adapter, outer: Strategy | None, inner: Strategy | None, **arguments: Any) -> Any:
    """A net whose blocks are wrapped one by one."""
    net = models.make_net()
    for place, block in enumerate(net.blocks):
        net.blocks[place] = adapter.wrap(block, inner, **arguments)
    return adapter.wrap(net, outer, **arguments)


def trained(adapter: Adapter, model: Any, clip: float | None = None) -> Trained:
    train(adapter, model, Case(clip=clip))
    return adapter.full_weights(model), traffic(model)


def are_same(ours: Trained, theirs: Trained) -> bool:
    assert ours[1]["gather"]["inter"] + ours[1]["reduce"]["inter"] > 0
    return ours[1] == theirs[1] and all(torch.equal(ours[0][name], value) for name, value in theirs[0].items())


# ---- nodes x ranks of a node


def trained_on(adapter: Adapter, strategy: Strategy, mesh: DeviceMesh) -> Trained:
    return trained(adapter, wrap_blocks(adapter, strategy, strategy, **{adapter.mesh_argument: mesh}), clip=0.5)


def equals_one_dimension(adapter: Adapter, strategy: Strategy) -> bool:
    """In a worker: whether an HSDP mesh gives the weights and the bytes of the 1-D mesh with nodes of its size."""
    hsdp = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("replicate", "shard"))
    with patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        flat = trained_on(adapter, strategy, init_device_mesh(device_type(), (4,)))
        ours = trained_on(adapter, strategy, hsdp)
    # Nodes of a mesh may differ from those that were launched.
    with patch.dict(os.environ, LOCAL_WORLD_SIZE="4"):
        others = trained_on(adapter, replace(strategy, gpus_per_node=2), hsdp)
    return are_same(ours, flat) and are_same(others, flat)


@over_each(rest=False, adapter=ADAPTERS, strategy=[Strategy.zeropp(), Strategy("IIG"), Strategy.mics()])
def test_an_hsdp_mesh_is_read_as_nodes_and_their_ranks(pool: Pools, adapter: Adapter, strategy: Strategy) -> None:
    assert pool(4).run(equals_one_dimension, adapter, strategy) == [True] * 4


# ---- overrides of a strategy, by the class of modules

OVERRIDES: dict[str, tuple[Strategy, Strategy, Strategy]] = {
    "codecs": (
        Strategy.zeropp(overrides={"Block": Strategy.zeropp(weights=Int4Delta())}, **TWO),
        Strategy.zeropp(**TWO),
        Strategy.zeropp(weights=Int4Delta(), **TWO),
    ),
    "scopes": (
        Strategy("NGG", overrides={"Bl*k": Strategy("GGG"), "Block": Strategy("IGG")}, **TWO),
        Strategy("NGG", **TWO),
        Strategy("GGG", **TWO),
    ),
    "nodes": (
        Strategy.zeropp(overrides={"Block": Strategy.zeropp(gpus_per_node=1)}, **TWO),
        Strategy.zeropp(**TWO),
        Strategy.zeropp(gpus_per_node=1),
    ),
    "the model": (
        Strategy("GGG", overrides={"Net": Strategy.zeropp(), "block": Strategy("NGG")}, **TWO),
        Strategy.zeropp(**TWO),
        Strategy("GGG", **TWO),
    ),
    "a whole root": (
        Strategy("NNN", overrides={"Block": Strategy.zeropp()}, **TWO),
        Strategy("NNN", **TWO),
        Strategy.zeropp(**TWO),
    ),
}
"""Strategies with overrides, and those of the net and of its blocks to the same effect."""


def is_as_by_hand(adapter: Adapter, has_policy: bool, name: str) -> bool:
    """In a worker: whether overrides give the weights and the bytes of strategies that are passed one by one.

    Also in what FSDP1 wraps within an instance, by a policy.
    """
    more = {"use_orig_params": adapter.use_orig_params} if isinstance(adapter, Fsdp1) else {}
    strategy, outer, inner = OVERRIDES[name]
    if has_policy:
        model = adapter.wrap(models.make_net(), strategy, auto_wrap_policy=ModuleWrapPolicy({models.Block}), **more)
    else:
        model = wrap_blocks(adapter, strategy, strategy, **more)
    return are_same(trained(adapter, model), trained(adapter, wrap_blocks(adapter, outer, inner, **more)))


WRAPPINGS = {str(adapter): (adapter, False) for adapter in WITH_FLAT} | {
    f"{adapter}, by a policy": (adapter, True) for adapter in WITH_FLAT if isinstance(adapter, Fsdp1)
}


@over_each(rest=False, wrapping=WRAPPINGS, name=list(OVERRIDES))
def test_overrides_are_as_other_strategies(pool: Pools, wrapping: tuple[Adapter, bool], name: str) -> None:
    assert pool(4).run(is_as_by_hand, *wrapping, name) == [True] * 4


# ---- meshes of two axes that are folded into one


@cache  # so that all trainings share their groups
def folded_mesh() -> DeviceMesh:
    """In a worker of eight: a mesh as of data and context parallelism, with another axis between them."""
    mesh = init_device_mesh(device_type(), (2, 2, 2), mesh_dim_names=("dp", "tp", "cp"))
    return mesh["dp", "cp"]._flatten()


def distance_from_stock(adapter: Adapter, levels: str) -> float:
    """In a worker: how far the weights of a net on a folded mesh are from those of torch's own sharding there."""
    weights = []
    for strategy in (Strategy(levels, **TWO), STOCK):
        model = wrap_blocks(adapter, strategy, strategy, **{adapter.mesh_argument: folded_mesh()})
        train(adapter, model, Case(micro_batches=2))
        weights.append(adapter.full_weights(model))
    return models.distance(*weights)


@over_each(rest=False, adapter=ADAPTERS, levels=["IGG", "III", "NNG"])
def test_a_mesh_of_ranks_that_are_not_consecutive_trains_as_stock(pool: Pools, adapter: Adapter, levels: str) -> None:
    assert max(pool(8).run(distance_from_stock, adapter, levels)) <= 1e-6


# ---- models on parts of a job


def values(tensors: dict[str, Tensor]) -> dict[str, list[Any]]:
    return {name: tensor.tolist() for name, tensor in tensors.items()}


@dataclass
class Part:
    """A part of a job, or a job of its own where ``group`` is None, whose models do the same."""

    adapter: Adapter
    group: dist.ProcessGroup | None
    folder: Path

    def shard(self, net: models.Net, strategy: Strategy) -> Any:
        return self.adapter.shard(net, Case(), strategy, self.group)

    def trained(self, model: Any) -> list[float]:
        """Train on batches that depend on the rank in the group."""
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        losses = []
        for step in range(3):
            loss = models.loss_of(model, models.batch(step, 0, dist.get_rank(self.group)))
            loss.backward()
            self.adapter.clip(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def weights(self, model: Any) -> dict[str, list[Any]]:
        return values(self.adapter.full_weights(model))

    def strategies(self) -> list[Any]:
        found: list[Any] = []
        for strategy in (
            Strategy(gpus_per_node=2),
            Strategy.zeropp(gpus_per_node=1),
            Strategy.loco(gpus_per_node=1),
            Strategy("NNN", gpus_per_node=1),
        ):
            model = self.shard(models.make_net(), strategy)
            found += [self.trained(model), self.weights(model), traffic(model)]
            state = CodecState(model)
            state.load_state_dict(state.state_dict())
            invalidate(model)
            found.append(self.trained(model))
        return found

    def local_steps(self) -> list[Any]:
        model = self.shard(models.make_net(), Strategy.diloco(gpus_per_node=1, local_steps=LocalSteps(2)))
        found: list[Any] = [self.trained(model)]
        with agreed_weights(model):
            found.append(self.weights(model))
        exchange_weights(model)
        return [*found, self.weights(model)]

    def frozen_base(self) -> list[Any]:
        net, other = lora.make_net(), lora.make_net()
        report = str(quantize_frozen_params(net, Int8(64), process_group=self.group))
        model = self.shard(net, Strategy("IGG"))
        losses = self.trained(model)
        save_frozen_params(model, self.folder, max_file_size=20_000)
        load_frozen_params(other, self.folder, process_group=self.group)
        names = dequantize_frozen_params(other)
        return [report, losses, len(list(self.folder.iterdir())), names, values(other.state_dict())]

    def peft_adapter(self) -> list[Any]:
        where: dict[str, Any] = {}
        if self.group is not None:
            mesh = DeviceMesh.from_group(self.group, device_type())
            where = {"process_group": self.group} if isinstance(self.adapter, Fsdp1) else {"mesh": mesh}
        model = llama.adapt(llama.make_base(), {"default": "lora"})
        model = llama.shard(self.adapter, model, Strategy.mixzpp(gpus_per_node=1), **where)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2)
        llama.loss_of(model, llama.tokens(0, dist.get_rank(self.group))).backward()
        optimizer.step()
        save_adapter(model, self.folder)
        loaded = PeftModel.from_pretrained(llama.make_base(), self.folder)
        return [values({name: value for name, value in loaded.state_dict().items() if "lora" in name})]

    def comm_hook(self) -> list[Any]:
        model = Fsdp1().make(Case(), STOCK, self.group)
        state = QuantizedReduceState(Int4(128), gpus_per_node=1, process_group=self.group)
        model.register_comm_hook(state, quantized_reduce_hook)
        return [self.trained(model), traffic(model)]


def outcome(adapter: Adapter, part: str, folder: Path, on_half: bool) -> list[Any]:
    """In a worker: what a model gives in a job of its own, or on the second half of one."""
    if not on_half:
        return getattr(Part(adapter, None, folder), part)()
    odd, _, half = (dist.new_group(ranks) for ranks in ([1, 3], [0, 1], [2, 3]))
    if dist.get_rank() % 2:  # so that members of the half have made different numbers of groups
        Part(adapter, odd, folder).shard(models.make_net(), Strategy.diloco(gpus_per_node=1))
    return getattr(Part(adapter, half, folder), part)() if dist.get_rank() >= 2 else []


PARTS = ["strategies", "local_steps", "frozen_base", "peft_adapter", "comm_hook"]


@over_each(rest=False, adapter=ADAPTERS, part=PARTS)
def test_a_model_on_a_half_of_a_job_does_what_it_does_alone(
    pool: Pools, adapter: Adapter, part: str, tmp_path: Path
) -> None:
    """The first half takes no part in it, so that whatever concerns all ranks hangs."""
    own = pool(2).run(outcome, adapter, part, tmp_path / "own", False)
    assert pool(4).run(outcome, adapter, part, tmp_path / "half", True) == [[], [], *own]
