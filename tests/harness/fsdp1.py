"""FullyShardedDataParallel, torch's own or with a strategy."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from . import models
from .adapter import STOCK, Adapter, Case, on_cpu
from .pool import device_type


@dataclass(frozen=True)
class Fsdp1(Adapter):
    use_orig_params: bool = True  # optimizers see the original parameters, not the flat ones
    mesh: bool = False  # it is given a device mesh, which makes its checkpoints hold DTensors
    arguments: tuple[tuple[str, Any], ...] = ()  # more of torch's

    torch_name: ClassVar[str] = "FullyShardedDataParallel"
    mesh_argument: ClassVar[str] = "device_mesh"
    state_dict_kinds: ClassVar[tuple[str, ...]] = ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT")

    def __str__(self) -> str:
        return "fsdp1" + " flat" * (not self.use_orig_params) + " mesh" * self.mesh

    def apply(self, module: nn.Module, strategy: Any, **arguments: Any) -> FullyShardedDataParallel:
        strategy = ShardingStrategy.FULL_SHARD if strategy is STOCK else strategy
        return FullyShardedDataParallel(module, sharding_strategy=strategy, **arguments)

    def wrap(self, module: nn.Module, strategy: Any, **arguments: Any) -> FullyShardedDataParallel:
        return self.apply(module, strategy, **{"use_orig_params": True, "device_id": models.device()} | arguments)

    def shard(self, net: models.Net, case: Case, strategy: Any, group: Any = None) -> FullyShardedDataParallel:
        arguments: dict[str, Any] = {"use_orig_params": self.use_orig_params, "device_id": models.device()}
        if case.wrap_blocks:
            arguments["auto_wrap_policy"] = ModuleWrapPolicy({models.Block})
        if self.mesh:
            arguments["device_mesh"] = init_device_mesh(device_type(), (dist.get_world_size(),))
        if case.precision is not None:
            param, reduce = case.precision.param, case.precision.reduce
            arguments["mixed_precision"] = MixedPrecision(param_dtype=param, reduce_dtype=reduce, buffer_dtype=param)
        model = self.apply(net, strategy, process_group=group, **arguments | dict(self.arguments))
        if case.checkpointing.startswith("outside"):
            models.recompute(model, case.checkpointing, _is_wrapped_block)
        return model

    def micro_batch(self, model: FullyShardedDataParallel, last: bool, synced: bool) -> AbstractContextManager[None]:
        return nullcontext() if last or synced else model.no_sync()

    def clip(self, model: FullyShardedDataParallel, norm: float) -> None:
        model.clip_grad_norm_(norm)

    def local(self, parameter: nn.Parameter) -> Tensor:
        return parameter

    def full_weights(self, model: FullyShardedDataParallel) -> dict[str, Tensor]:
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return on_cpu(dict(model.named_parameters()))

    def full_gradients(self, model: FullyShardedDataParallel) -> dict[str, Tensor]:
        with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=True):
            return on_cpu({name: p.grad for name, p in model.named_parameters() if p.grad is not None})

    def load_from(self, source: FullyShardedDataParallel, target: FullyShardedDataParallel, kind: str) -> None:
        of_kind = StateDictType[kind]
        with (
            FullyShardedDataParallel.state_dict_type(source, of_kind),
            FullyShardedDataParallel.state_dict_type(target, of_kind),
        ):
            target.load_state_dict(source.state_dict())


def _is_wrapped_block(module: nn.Module) -> bool:
    return isinstance(module, FullyShardedDataParallel) and isinstance(module.module, models.Block)
