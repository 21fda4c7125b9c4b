"""Meshes of several dimensions, and of some of a job's ranks; parts of a model with strategies of their own."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
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


def wrap_blocks(adapter: Adapter, outer: Strategy, inner: Strategy, seed: int = 0, **arguments: Any) -> Any:
    """A net whose blocks are wrapped one by one."""
    net = models.make_net(seed)
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

OVERRIDDEN = {
    "codecs": Strategy.zeropp(overrides={"Block": Strategy.zeropp(weights=Int4Delta())}, **TWO),
    "scopes": Strategy("NGG", overrides={"Bl*k": Strategy("GGG"), "Block": Strategy("IGG")}, **TWO),
    "nodes": Strategy.zeropp(overrides={"Block": Strategy.zeropp(gpus_per_node=1)}, **TWO),
    "the model": Strategy("GGG", overrides={"Net": Strategy.zeropp(), "block": Strategy("NGG")}, **TWO),
    "whole blocks": Strategy.zeropp(overrides={"Block": Strategy("NNN")}, **TWO),
    "a whole root": Strategy("NNN", overrides={"Block": Strategy.zeropp()}, **TWO),
}
BY_HAND = {
    "codecs": (Strategy.zeropp(**TWO), Strategy.zeropp(weights=Int4Delta(), **TWO)),
    "scopes": (Strategy("NGG", **TWO), Strategy("GGG", **TWO)),
    "nodes": (Strategy.zeropp(**TWO), Strategy.zeropp(gpus_per_node=1)),
    "the model": (Strategy.zeropp(**TWO), Strategy("GGG", **TWO)),
    "whole blocks": (Strategy.zeropp(**TWO), Strategy("NNN", **TWO)),
    "a whole root": (Strategy("NNN", **TWO), Strategy.zeropp(**TWO)),
}
"""Strategies of the net and of its blocks, to the same effect."""


def is_as_by_hand(adapter: Adapter, has_policy: bool, name: str) -> bool:
    """In a worker: whether overrides give the weights and the bytes of strategies that are passed one by one.

    Also in what FSDP1 wraps within an instance, by a policy.
    """
    more = {"use_orig_params": adapter.use_orig_params} if isinstance(adapter, Fsdp1) else {}
    strategy = OVERRIDDEN[name]
    if has_policy:
        model = adapter.wrap(models.make_net(), strategy, auto_wrap_policy=ModuleWrapPolicy({models.Block}), **more)
    else:
        model = wrap_blocks(adapter, strategy, strategy, **more)
    return are_same(trained(adapter, model), trained(adapter, wrap_blocks(adapter, *BY_HAND[name], **more)))


WRAPPINGS = {str(adapter): (adapter, False) for adapter in WITH_FLAT} | {
    f"{adapter}, by a policy": (adapter, True) for adapter in WITH_FLAT if isinstance(adapter, Fsdp1)
}


@over_each(rest=False, wrapping=WRAPPINGS, name=list(OVERRIDDEN))
def test_overrides_are_as_other_strategies(pool: Pools, wrapping: tuple[Adapter, bool], name: str) -> None:
    assert pool(4).run(is_as_by_hand, *wrapping, name) == [True] * 4


# ---- meshes of two axes that are folded into one, and of halves of a job

STEPS, MICRO_BATCHES, RANKS, CLIP = 4, 2, 4, 0.5


@cache  # so that all trainings share their groups
def mesh_of(where: str) -> DeviceMesh | None:
    """In a worker of eight: the mesh to shard over; None if this rank is in none."""
    if where == "folded":  # as of data and context parallelism, with another axis between them: not consecutive ranks
        mesh = init_device_mesh(device_type(), (2, 2, 2), mesh_dim_names=("dp", "tp", "cp"))
        return mesh["dp", "cp"]._flatten()
    groups, half = [dist.new_group(ranks) for ranks in ([0, 1, 2, 3], [4, 5, 6, 7])], dist.get_rank() // RANKS
    return DeviceMesh.from_group(groups[half], device_type()) if half or where == "halves" else None


def steps_of(model: Any, ranks: list[int], clip: Callable[[], object], micro_batch: Callable[[bool], Any]) -> None:
    """Train on the batches of some ranks of a mesh."""
    # Its eps keeps a rounding error of a gradient near zero from becoming a whole step.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            for rank in ranks:
                with micro_batch(number == MICRO_BATCHES - 1):
                    loss = models.loss_of(model, models.batch(step, number, rank))
                    (loss / len(ranks) / MICRO_BATCHES).backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()


@cache
def trained_alone(seed: int) -> dict[str, Tensor]:
    """Train a net on this rank alone, on the batches of all ranks of a mesh."""
    net = models.make_net(seed)
    clip = partial(torch.nn.utils.clip_grad_norm_, list(net.parameters()), CLIP)
    steps_of(net, list(range(RANKS)), clip, lambda last: nullcontext())
    return {name: parameter.detach().cpu() for name, parameter in net.named_parameters()}


def distance_to_one_rank(adapter: Adapter, levels: str, where: str) -> float:
    """In a worker: how far the weights of a mesh's net are from those of a training on one rank."""
    mesh = mesh_of(where)
    if mesh is None:
        return 0.0
    seed = dist.get_rank() // RANKS if where == "halves" else 0  # of a net for each half
    strategy = Strategy(levels, **TWO)
    model = wrap_blocks(adapter, strategy, strategy, seed, **{adapter.mesh_argument: mesh})
    steps_of(
        model,
        [mesh.get_local_rank()],
        lambda: adapter.clip(model, CLIP),
        lambda last: adapter.micro_batch(model, last, False),
    )
    return models.distance(adapter.full_weights(model), trained_alone(seed))


@over_each(rest=False, adapter=ADAPTERS, levels=["IGG", "III", "NNG"], where=["folded", "halves", "second half"])
def test_a_mesh_of_some_ranks_trains_as_one_rank(pool: Pools, adapter: Adapter, levels: str, where: str) -> None:
    assert max(pool(8).run(distance_to_one_rank, adapter, levels, where)) <= 1e-6


# ---- models on parts of a job


def digest(tensors: dict[str, Tensor]) -> str:
    """A text that differs if any bit does."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode() + tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@dataclass
class Part:
    """A part of a job, whose models are like those of a job of its own.

    Args:
        adapter: Shards them.
        group: The ranks; None in a job of its own.
        folder: Where files go.
        seed: Of the models.
    """

    adapter: Adapter
    group: dist.ProcessGroup | None
    folder: Path
    seed: int

    def shard(self, net: models.Net, strategy: Strategy | None) -> Any:
        return self.adapter.shard(net, Case(), strategy, self.group)

    def arguments(self) -> dict[str, Any]:
        """The arguments by which an adapter is told of the ranks."""
        if self.group is None:
            return {}
        if isinstance(self.adapter, Fsdp1):
            return {"process_group": self.group}
        return {"mesh": DeviceMesh.from_group(self.group, device_type())}

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

    def weights(self, model: Any) -> str:
        return digest(self.adapter.full_weights(model))

    def strategies(self) -> list[Any]:
        found: list[Any] = []
        for strategy in (
            Strategy(gpus_per_node=2),
            Strategy.zeropp(gpus_per_node=1),
            Strategy.loco(gpus_per_node=1),
            Strategy("NNN", gpus_per_node=1),
        ):
            model = self.shard(models.make_net(self.seed), strategy)
            found += [self.trained(model), self.weights(model), traffic(model)]
            state = CodecState(model)
            state.load_state_dict(state.state_dict())
            invalidate(model)
            found.append(self.trained(model))
        return found

    def local_steps(self) -> list[Any]:
        strategy = Strategy.diloco(gpus_per_node=1, local_steps=LocalSteps(2))
        model = self.shard(models.make_net(self.seed), strategy)
        found: list[Any] = [self.trained(model)]
        with agreed_weights(model):
            found.append(self.weights(model))
        exchange_weights(model)
        return [*found, self.weights(model)]

    def frozen_base(self) -> list[Any]:
        def files() -> int:
            return len(list((self.folder / "base").iterdir()))

        net = lora.make_net(self.seed)
        found: list[Any] = [str(quantize_frozen_params(net, Int8(64), process_group=self.group))]
        model = self.shard(net, Strategy("IGG"))
        found.append(self.trained(model))
        save_frozen_params(model, self.folder / "base", max_file_size="20KB")
        found.append(files())
        other = lora.make_net(self.seed)
        load_frozen_params(other, self.folder / "base", process_group=self.group)
        found += [dequantize_frozen_params(other), digest(other.state_dict())]
        model = self.shard(lora.make_net(self.seed), Strategy.mixzpp(gpus_per_node=1))
        found.append(self.trained(model))
        save_frozen_params(model, self.folder / "base")
        found.append(files())
        net = lora.make_net(self.seed)
        net.head = self.adapter.wrap(net.head, STOCK, **self.arguments())
        report = quantize_frozen_params(net, Int8(64), ignored_params=list(net.head.parameters()))
        return [*found, str(report)]

    def peft_adapter(self) -> list[Any]:
        found = []
        for name, strategy in {"quantized": Strategy.mixzpp(gpus_per_node=1), "stock": STOCK}.items():
            model = llama.adapt(llama.make_base(), {"default": "lora"})
            model = llama.shard(self.adapter, model, strategy, **self.arguments())
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1 * (self.seed + 1))
            llama.loss_of(model, llama.tokens(0, dist.get_rank(self.group))).backward()
            optimizer.step()
            save_adapter(model, self.folder / name)
            loaded = PeftModel.from_pretrained(llama.make_base(), self.folder / name)
            found.append(digest({key: value for key, value in loaded.state_dict().items() if "lora" in key}))
        return found

    def comm_hook(self) -> list[Any]:
        if not isinstance(self.adapter, Fsdp1):
            return []
        model = self.shard(models.make_net(self.seed), STOCK)
        state = QuantizedReduceState(Int4(128), gpus_per_node=1, process_group=self.group)
        model.register_comm_hook(state, quantized_reduce_hook)
        return [self.trained(model), traffic(model)]


def on_half(adapter: Adapter, part: str, folder: str) -> list[Any]:
    """In a worker of a job of two halves: what a model gives on the second half, whose seed is 1."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = dist.get_rank() // 2
    return getattr(Part(adapter, groups[half], Path(folder, str(half)), half), part)() if half else []


def on_its_own(adapter: Adapter, part: str, seed: int, folder: str) -> list[Any]:
    """In a worker: the same, in a job of its own."""
    return getattr(Part(adapter, None, Path(folder), seed), part)()


@over_each(adapter=ADAPTERS, part=["strategies", "local_steps", "frozen_base", "peft_adapter", "comm_hook"])
def test_a_model_on_a_half_of_a_job_does_what_it_does_alone(
    pool: Pools, adapter: Adapter, part: str, tmp_path: Path
) -> None:
    """The first half takes no part in it, so that whatever concerns all ranks hangs."""
    own = pool(2).run(on_its_own, adapter, part, 1, str(tmp_path / "own"))
    assert pool(4).run(on_half, adapter, part, str(tmp_path / "second")) == [[], [], *own]
