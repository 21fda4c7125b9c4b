"""The sharded models and the optimizers of a program, and private names of torch by which stock does as it should."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness import models as harness_models
from harness.adapter import STOCK, Adapter
from harness.covering import WITH_FLAT
from harness.pool import TIMEOUT, device_type
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
)
from torch.distributed.tensor import DTensor, Shard

from fsdp_zpp import QuantizedReduceState, quantized_reduce_hook

from .modules import Block, Net, make_optimizer
from .program import Program, Tune

ADAPTERS: dict[str, Adapter] = {str(adapter): adapter for adapter in WITH_FLAT}


class Trained:
    """The models and the optimizers of a program, sharded by stock FSDP or by ours."""

    stock_sharding: Any = STOCK  # the strategy of stock FSDP

    def __init__(self, program: Program, strategy: Any) -> None:
        self.program = program
        self.hook = program.strategy if program.hook and strategy is not STOCK else None
        self.strategy = STOCK if program.hook else strategy
        self.adapter = ADAPTERS[program.adapter]
        self.is_fsdp1 = program.adapter != "fsdp2"
        self.models = [self.make(i, 0) for i in range(len(program.models))]
        self.optimizers = self.make_optimizers()

    def make(self, i: int, seed: int) -> Any:
        """A sharded model of the program, with weights of ``seed``."""
        torch.manual_seed(seed * 10 + i)
        spec = self.program.models[i]
        net = Net(spec).to(harness_models.device())
        self.before_sharding(i, net)
        arguments = self.arguments()
        own = self.stock_sharding if self.strategy is STOCK else self.strategy
        listed = list(net.blocks[:2]) if spec.listed else []
        for block, unit in enumerate(spec.units):
            strategy = self.program.inner if self.program.inner and block % 2 and self.strategy else own
            inside = net.blocks[block]
            if unit.nested:
                inside.branches[0] = self.adapter.apply(inside.branches[0], strategy, **arguments)
            if inside in listed:
                if inside is listed[-1]:
                    self.adapter.apply(listed, own, **arguments)
            elif unit.wrapped:
                net.blocks[block] = self.adapter.apply(inside, strategy, **arguments)
        model = net if spec.rootless else self.adapter.apply(net, own, **arguments)
        for root in self.roots_of(model):
            if self.program.zero_unused:
                root.set_reduce_scatter_unused_params(True)
            if (hook := self.hook) is not None:
                options = {"error_feedback": hook.error_feedback, "gpus_per_node": hook.gpus_per_node}
                root.register_comm_hook(QuantizedReduceState(hook.gradients, **options), quantized_reduce_hook)
        return model

    def before_sharding(self, i: int, net: Net) -> None:
        """Called with the i-th model before it is sharded."""

    def roots_of(self, model: Any) -> list[Any]:
        """Return the modules that FSDP takes for roots."""
        sharded = FSDPModule | FullyShardedDataParallel
        return [model] if isinstance(model, sharded) else [b for b in model.blocks if isinstance(b, sharded)]

    def all_roots(self) -> list[Any]:
        """Return the roots of all models."""
        return [root for model in self.models for root in self.roots_of(model)]

    def arguments(self) -> dict[str, Any]:
        """Return all that FSDP is given besides the strategy."""
        arguments: dict[str, Any] = {}
        if self.is_fsdp1:
            arguments |= {"use_orig_params": self.adapter.use_orig_params, "device_id": harness_models.device()}
        if self.program.precision is not None:
            names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "none": None}
            dtypes = [names[name] for name in self.program.precision.split()]
            name, policy = ("mixed_precision", MixedPrecision) if self.is_fsdp1 else ("mp_policy", MixedPrecisionPolicy)
            arguments[name] = policy(*dtypes)
        if self.program.prefetch and self.is_fsdp1:
            arguments |= {"forward_prefetch": True, "backward_prefetch": BackwardPrefetch.BACKWARD_POST}
        if self.program.columns:
            arguments["shard_placement_fn"] = _columns
        if self.program.offload:
            arguments["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        if self.program.axes == "copies":
            ranks = _mesh(("copies", "ranks"), 2, self.program.data_ranks)["ranks"]
            arguments |= {"process_group": ranks.get_group()} if self.is_fsdp1 else {"mesh": ranks}
        elif self.program.axes == "nodes" and self.strategy is not STOCK:
            gpus = self.program.strategy.gpus_per_node or self.program.world
            mesh = _mesh(("replicate", "shard"), self.program.world // gpus, gpus)
            arguments |= {self.adapter.mesh_argument: mesh}
        return arguments

    def net(self, i: int) -> Net:
        """A model within its wrapper."""
        return next(module for module in self.models[i].modules() if isinstance(module, Net))

    def units(self, i: int) -> list[nn.Module]:
        """Its blocks, sharded or not, and itself at the end."""
        return [*self.net(i).blocks, self.models[i]]

    def block(self, i: int, unit: int) -> Block:
        """A block within its wrapper."""
        return next(module for module in self.net(i).blocks[unit].modules() if isinstance(module, Block))

    def parameters(self, i: int, unit: int) -> list[nn.Parameter]:
        """The parameters of a block, or of what is in none, that an optimizer has."""
        blocks = self.net(i).blocks
        is_root = unit == len(blocks)
        others = {p for block in blocks for p in block.parameters()} if is_root else set()
        chosen = [p for p in (self.models[i] if is_root else blocks[unit]).parameters() if p not in others]
        with_frozen = self.program.with_frozen and not (is_root and self.program.models[i].rootless)
        return [p for p in chosen if p.requires_grad or with_frozen]

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        """New optimizers for the units that each has."""
        owned = [[p for i, unit in owned for p in self.parameters(i, unit)] for owned in self.program.optimizers]
        if self.program.interleaved:
            every = [p for parameters in owned for p in parameters]
            owned = [every[at :: len(owned)] for at in range(len(owned))]
        kind, coarse = self.program.optimizer, self.program.rounds_coarsely
        return [make_optimizer(kind, parameters, coarse) for parameters in owned]


def start_another_job() -> None:
    """End the job and start another one over the same ranks, as cells of a notebook do that run again."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store, number = _first_store(), next(_jobs)
    dist.barrier()
    dist.destroy_process_group()
    for cache in OF_A_JOB:
        cache.cache_clear()
    store = dist.PrefixStore(f"job {number}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)


_jobs = itertools.count()


@functools.cache
def _first_store() -> Any:
    """The store of this process's first job, which outlives it."""
    return dist.distributed_c10d._get_default_store()


@functools.cache  # DTensors remember meshes of these ranks, so that their groups must stay
def _mesh(names: tuple[str, str], *shape: int) -> DeviceMesh:
    return init_device_mesh(device_type(), shape, mesh_dim_names=names)


def _columns(parameter: nn.Parameter) -> Shard | None:
    world = dist.get_world_size()
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % world == 0 else None


OF_A_JOB = [_mesh]
"""Caches of process groups, which end with their job."""


def _divide(unit: Any, value: int, units: list[Any]) -> None:
    unit.set_gradient_divide_factor(float(value))
    unit.set_force_sum_reduction_for_comms(True)  # gloo can't multiply before it sums


def _others(value: int, units: list[Any]) -> list[Any]:
    return [each for at, each in enumerate(units) if value >> at & 1 and hasattr(each, "unshard")]


def _unshard(unit: Any, value: int, units: list[Any]) -> None:
    handle = unit.unshard(async_op=value > 0)
    if value == 1:
        handle.wait()  # else the forward does


METHODS: dict[str, Callable[[Any, int, list[Any]], None]] = {
    "divide factor": _divide,
    "reshard after forward": lambda unit, value, units: unit.set_reshard_after_forward(bool(value), recurse=False),
    "forward prefetch": lambda unit, value, units: unit.set_modules_to_forward_prefetch(_others(value, units)),
    "backward prefetch": lambda unit, value, units: unit.set_modules_to_backward_prefetch(_others(value, units)),
    "unshard": _unshard,
    "reshard": lambda unit, value, units: unit.reshard(),
}


def tune(units: list[Any], op: Tune) -> None:
    """Call a unit's method, if it is a unit."""
    if hasattr(units[op.unit], "unshard"):
        METHODS[op.what](units[op.unit], op.value, units)


def forget_accumulated(unit: nn.Module, nested: bool = False) -> None:
    """Drop what a unit, and what those ``nested`` in it, have accumulated: stock's zero_grad keeps some of it."""
    for module in unit.modules() if nested else [unit]:
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            flat: Any = module._handle.flat_param
            flat.grad = None
            if hasattr(flat, "_saved_grad_shard"):
                del flat._saved_grad_shard
        elif isinstance(module, FSDPModule):
            _forget_of_group(module._get_fsdp_state()._fsdp_param_group)


def _forget_of_group(group: Any) -> None:
    for param in group.fsdp_params if group is not None else []:
        param.sharded_param.grad = None
        if hasattr(param, "_unsharded_param"):
            param.unsharded_param.grad = None
        if param.unsharded_accumulated_grad is not None:  # from torch 2.15 on, that same gradient
            param.unsharded_accumulated_grad = None


def reshard(model: Any, strategy: Any) -> None:
    """Free what a forward leaves unsharded: stock FSDP1 goes on with that whatever is written to the shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            if strategy is STOCK and group is not None and group._all_gather_result is not None:
                group.wait_for_unshard()  # or the next forward goes on with what an asynchronous unshard has gathered
            module.reshard()
        elif isinstance(module, FullyShardedDataParallel) and strategy is STOCK and module._handle is not None:
            handle: Any = module._handle
            if not handle.uses_sharded_strategy or not hasattr(handle.flat_param, "_local_shard"):
                continue  # it has not started
            if handle._use_orig_params:
                handle._writeback_orig_params()  # parameters that were replaced, which the next line would lose
            handle.reshard(free_unsharded_flat_param=True)


@dataclass(frozen=True)
class HeldParameter:
    """This rank's part of a parameter."""

    parameter: nn.Parameter  # as an optimizer has it
    shown: Callable[[], nn.Parameter]  # returns it as modules show it

    @property
    def values(self) -> Any:
        """Its values on this rank, to be read and written."""
        data: Any = self.parameter.detach()
        return data.to_local() if isinstance(data, DTensor) else data

    @property
    def is_trained(self) -> bool:
        """Steps change it."""
        return self.shown().requires_grad or self.parameter.grad is not None


def held_parameters(model: nn.Module) -> list[list[HeldParameter]]:
    """Return this rank's parts of the parameters of each unit."""
    units, groups = [], set()
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            originals: Any = module._handle.flat_param._params
            units.append([HeldParameter(p, lambda p=p: p) for p in originals])
        elif isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            if group is None or group in groups:  # modules of a list share one
                continue
            groups.add(group)
            infos = [(param.sharded_param, param._module_info) for param in group.fsdp_params]
            units.append([HeldParameter(p, partial(getattr, info.module, info.param_name)) for p, info in infos])
    return units
