"""Both of torch's FSDPs by one interface, so that a test is written once and runs over both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard

from fsdp_zpp import clip_grad_norm_, fully_shard

from . import models
from .pool import device_type, shared_folder

FULL = StateDictOptions(full_state_dict=True)
STOCK = None
"""Stands for torch's own full sharding where a strategy could be."""


@dataclass(frozen=True)
class Precision:
    """Dtypes of mixed precision; None as in torch's own policies."""

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None


@dataclass(frozen=True)
class Case:
    """A net and how to train it, in terms that both FSDPs know."""

    model: tuple[tuple[str, Any], ...] = ()  # arguments of models.Net
    frozen: bool = False  # the first block
    precision: Precision | None = None
    wrap_blocks: bool = True  # blocks are units of their own
    checkpointing: str = "none"  # "inside" or "outside" of a unit, and "reentrant" or "no_reentrant"
    optimizer: str = "sgd"  # see models.make_optimizer
    steps: int = 3
    micro_batches: int = 1  # of a step
    synced: bool = False  # each of them synchronizes gradients, or the last one only
    clip: float | None = 0.5  # the largest norm of the gradient
    scaler: bool = False


class Adapter:
    """One of torch's FSDPs and how it is called; its instances are values, which travel to the workers.

    Both have the same methods. Full weights and gradients are fp32 on the CPU, by name, gathered from all ranks.
    """

    torch_name: ClassVar[str]
    mesh_argument: ClassVar[str]
    state_dict_kinds: ClassVar[tuple[str, ...]]

    def make(self, case: Case, strategy: Any, group: Any = None) -> Any:
        """In a worker: a sharded net, over ``group`` or all ranks."""
        net = models.make_net(frozen=case.frozen, **dict(case.model))
        if case.checkpointing.startswith("inside"):
            models.recompute(net, case.checkpointing, lambda module: isinstance(module, models.Block))
        return self.shard(net, case, strategy, group)

    def wrap(self, module: nn.Module, strategy: Any, **arguments: Any) -> Any:
        """Shard one module on this rank's device; what is sharded still has the original parameters."""
        return self.apply(module, strategy, **arguments)

    def before_load(self, model: Any) -> None:
        """Do what torch needs before a state dict is set from outside."""


@dataclass(frozen=True)
class Fsdp1(Adapter):
    """FullyShardedDataParallel, torch's own or with a strategy."""

    use_orig_params: bool = True  # optimizers see the original parameters, not the flat ones
    mesh: bool = False  # it is given a device mesh, which makes its checkpoints hold DTensors
    arguments: tuple[tuple[str, Any], ...] = ()  # more of torch's

    torch_name: ClassVar[str] = "FullyShardedDataParallel"
    mesh_argument: ClassVar[str] = "device_mesh"
    state_dict_kinds: ClassVar[tuple[str, ...]] = ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT")

    def __str__(self) -> str:
        return "fsdp1" + " flat" * (not self.use_orig_params) + " mesh" * self.mesh

    def apply(self, module: nn.Module, strategy: Any, **arguments: Any) -> Any:
        strategy = fsdp.ShardingStrategy.FULL_SHARD if strategy is STOCK else strategy
        return fsdp.FullyShardedDataParallel(module, sharding_strategy=strategy, **arguments)

    def wrap(self, module: nn.Module, strategy: Any, **arguments: Any) -> Any:
        return self.apply(module, strategy, **{"use_orig_params": True, "device_id": models.device()} | arguments)

    def shard(self, net: models.Net, case: Case, strategy: Any, group: Any = None) -> Any:
        arguments: dict[str, Any] = {"use_orig_params": self.use_orig_params, "device_id": models.device()}
        if case.wrap_blocks:
            arguments["auto_wrap_policy"] = ModuleWrapPolicy({models.Block})
        if self.mesh:
            arguments["device_mesh"] = init_device_mesh(device_type(), (dist.get_world_size(),))
        if case.precision is not None:
            param, reduce = case.precision.param, case.precision.reduce
            arguments["mixed_precision"] = fsdp.MixedPrecision(param, reduce, buffer_dtype=param)
        model = self.apply(net, strategy, process_group=group, **arguments | dict(self.arguments))
        if case.checkpointing.startswith("outside"):
            models.recompute(model, case.checkpointing, _is_wrapped_block)
        return model

    def micro_batch(self, model: Any, last: bool, synced: bool) -> AbstractContextManager[None]:
        return nullcontext() if last or synced else model.no_sync()

    def clip(self, model: Any, norm: float) -> None:
        model.clip_grad_norm_(norm)

    def local(self, parameter: nn.Parameter) -> Tensor:
        return parameter

    def full_weights(self, model: Any) -> dict[str, Tensor]:
        with fsdp.FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return on_cpu(dict(model.named_parameters()))

    def full_gradients(self, model: Any) -> dict[str, Tensor]:
        with fsdp.FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=True):
            return on_cpu({name: p.grad for name, p in model.named_parameters() if p.grad is not None})

    def load_from(self, source: Any, target: Any, kind: str) -> None:
        of_kind = fsdp.FullyShardedDataParallel.state_dict_type
        with of_kind(source, fsdp.StateDictType[kind]), of_kind(target, fsdp.StateDictType[kind]):
            target.load_state_dict(source.state_dict())


@dataclass(frozen=True)
class Fsdp2(Adapter):
    """``fully_shard``, torch's own or with a strategy."""

    arguments: tuple[tuple[str, Any], ...] = ()  # more of torch's
    tune: Callable[[Any], None] | None = None  # called with the sharded model
    pairs: bool = False  # the first two blocks are one unit
    keep_unsharded: bool = False  # from one micro-batch of a step to the next

    torch_name: ClassVar[str] = "fully_shard"
    mesh_argument: ClassVar[str] = "mesh"
    state_dict_kinds: ClassVar[tuple[str, ...]] = ("sharded", "full", "of each child", "in place")

    def __str__(self) -> str:
        return "fsdp2"

    def apply(self, module: nn.Module | list[nn.Module], strategy: Any, **arguments: Any) -> Any:
        if strategy is STOCK:
            return torch_fully_shard(module, **arguments)
        return fully_shard(module, strategy=strategy, **arguments)

    def shard(self, net: models.Net, case: Case, strategy: Any, group: Any = None) -> Any:
        arguments: dict[str, Any] = {}
        if case.precision is not None:
            arguments["mp_policy"] = fsdp.MixedPrecisionPolicy(case.precision.param, case.precision.reduce)
            for module in net.modules():  # fully_shard leaves the dtype of buffers to the user
                if isinstance(module, models.Block):
                    module.shift = module.shift.to(case.precision.param or torch.float32)
        if group is not None:
            arguments["mesh"] = DeviceMesh.from_group(group, device_type())
        arguments |= dict(self.arguments)
        for unit in self._units(net) if case.wrap_blocks else []:
            self.apply(unit, strategy, **arguments)
        self.apply(net, strategy, **arguments)
        if self.tune is not None:
            self.tune(net)
        return net

    def _units(self, net: models.Net) -> list[Any]:
        blocks = [*net.blocks, *([net.unused] if net.unused is not None else [])]
        return [blocks[:2], *blocks[2:]] if self.pairs else blocks

    @contextmanager
    def micro_batch(self, model: Any, last: bool, synced: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(last or synced)
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last or not self.keep_unsharded)
        yield

    def clip(self, model: nn.Module, norm: float) -> None:
        # torch sums the norms of ranks where gradients are, and NCCL communicates on GPUs alone.
        is_offloaded = self.local(next(model.parameters())).device.type != device_type()
        (clip_grad_norm_ if is_offloaded else nn.utils.clip_grad_norm_)(model.parameters(), norm)

    def local(self, parameter: nn.Parameter) -> Tensor:
        assert isinstance(parameter, DTensor)
        return parameter.to_local()

    def full_weights(self, model: nn.Module) -> dict[str, Tensor]:
        return on_cpu(_gathered({name: v for name, v in model.state_dict().items() if isinstance(v, DTensor)}))

    def full_gradients(self, model: nn.Module) -> dict[str, Tensor]:
        return on_cpu(_gathered({name: p.grad for name, p in model.named_parameters() if p.grad is not None}))

    def load_from(self, source: Any, target: Any, kind: str) -> None:
        if kind == "sharded":
            target.load_state_dict(source.state_dict())
        elif kind == "full":
            self.before_load(target)
            set_model_state_dict(target, get_model_state_dict(source, options=FULL), options=FULL)
        elif kind == "in place":
            with shared_folder() as folder:
                dcp.save(get_model_state_dict(source), checkpoint_id=folder)
                dcp.load(get_model_state_dict(target), checkpoint_id=folder)  # and that is all
        else:
            for name, module in source.named_children():
                getattr(target, name).load_state_dict(module.state_dict())

    def before_load(self, model: Any) -> None:
        model.reshard()  # a forward leaves the root unsharded, and torch then takes its parameters for plain ones


def _is_wrapped_block(module: nn.Module) -> bool:
    return isinstance(module, fsdp.FullyShardedDataParallel) and isinstance(module.module, models.Block)


def _gathered(sharded: dict[str, Any]) -> dict[str, Tensor]:
    """Full tensors in fp32, by one collective for all of a mesh: one for each takes as long as the training."""
    if len({value.device_mesh for value in sharded.values()}) != 1 or next(iter(sharded.values())).device_mesh.ndim > 1:
        return {name: value.to(models.device()).full_tensor() for name, value in sharded.items()}
    mesh = next(iter(sharded.values())).device_mesh
    pieces = {name: _pieces(value, mesh.size()) for name, value in sharded.items()}
    # On GPUs the process group is NCCL's, which gathers nothing from the CPU, where offloaded parameters are.
    flat = [value.to_local().to(models.device()).detach().float().flatten() for value in sharded.values()]
    largest = [shapes[0].numel() for shapes, _ in pieces.values()]
    row = torch.cat([F.pad(own, (0, size - own.numel())) for own, size in zip(flat, largest, strict=True)])
    rows = [torch.empty_like(row) for _ in range(mesh.size())]
    dist.all_gather(rows, row, mesh.get_group())
    split = [row.split(largest) for row in rows]
    full = {}
    for i, (name, (shapes, dim)) in enumerate(pieces.items()):
        parts = [each[i][: shape.numel()].view(shape) for each, shape in zip(split, shapes, strict=False)]
        full[name] = torch.cat(parts, dim)
    return full


def _pieces(value: Any, ranks: int) -> tuple[list[torch.Size], int]:
    """The shapes of ranks' parts, where they hold anything, and the dimension that they are cut along."""
    (placement,) = value.placements
    if not isinstance(placement, Shard):
        return [value.shape], 0
    return [part.shape for part in torch.empty(value.shape, device="meta").chunk(ranks, placement.dim)], placement.dim


def original_name(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


def on_cpu(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in fp32 on the CPU, by their original names."""
    return {original_name(name): value.detach().float().cpu().clone() for name, value in named.items()}
