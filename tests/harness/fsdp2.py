"""fully_shard, torch's own or with a strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard

from fsdp_zpp import clip_grad_norm_, fully_shard

from . import models
from .adapter import STOCK, Adapter, Case, on_cpu
from .pool import device_type, shared_folder

FULL = StateDictOptions(full_state_dict=True)


@dataclass(frozen=True)
class Fsdp2(Adapter):
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
            arguments["mp_policy"] = MixedPrecisionPolicy(case.precision.param, case.precision.reduce)
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
        clip = clip_grad_norm_ if is_offloaded else torch.nn.utils.clip_grad_norm_
        clip(model.parameters(), norm)

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


def _gathered(sharded: dict[str, Any]) -> dict[str, Tensor]:
    """Gather full tensors at once where one mesh has all of them: one by one takes as long as the training."""
    if len({value.device_mesh for value in sharded.values()}) != 1 or next(iter(sharded.values())).device_mesh.ndim > 1:
        # On GPUs the process group is NCCL's, which gathers nothing from the CPU, where offloaded parameters are.
        return {name: value.to(models.device()).full_tensor() for name, value in sharded.items()}
    mesh = next(iter(sharded.values())).device_mesh
    found: list[Any] = [None] * mesh.size()
    dist.all_gather_object(found, {name: v.to_local().detach().cpu() for name, v in sharded.items()}, mesh.get_group())
    full = {}
    for name, value in sharded.items():
        (placement,) = value.placements
        parts = [each[name] for each in found]
        full[name] = torch.cat(parts, placement.dim) if isinstance(placement, Shard) else parts[0]
    return full
