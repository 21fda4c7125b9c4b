"""Private names of torch's fully_shard: how a group gathers its weights, and what the other _torch files build on.

Each of these files has a table of the names it needs, which is checked before they are imported.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import record_function

from fsdp_zpp.collectives.secondary_shard import SecondaryShard
from fsdp_zpp.torch_internals import Needed, check_needed

_FSDP = "torch.distributed.fsdp._fully_shard"
_GROUP = f"{_FSDP}._fsdp_param_group.FSDPParamGroup"
_PARAM = f"{_FSDP}._fsdp_param.FSDPParam"
_STATE = f"{_FSDP}._fsdp_state.FSDPState"
_NEEDED = (
    Needed(f"{_FSDP}._fsdp_api", "AllGather ReduceScatter", "a strategy's own communication"),
    Needed(f"{_FSDP}._fully_shard.fully_shard", "state", "the state of a module"),
    Needed("torch.distributed.fsdp.FSDPModule", "_get_fsdp_state", "the same"),
    Needed(_STATE, "_fsdp_param_group", "the groups of a module", until=(2, 11)),
    Needed(_STATE, "_fsdp_param_groups", "the groups of a module", since=(2, 12)),
    Needed(_GROUP, "modules fsdp_params _module_fqn", "what a group consists of"),
    Needed(_GROUP, "unshard wait_for_unshard unshard_in_backward is_unsharded _all_gather_result", "gathering weights"),
    Needed(_GROUP, "_all_gather_process_group _all_gather_comm comm_ctx device device_handle _with_fqn", "the same"),
    Needed(f"{_FSDP}._fsdp_param_group.FSDPCommContext", "get_all_gather_streams", "the streams to gather in"),
    Needed(
        f"{_FSDP}._fsdp_collectives.AllGatherResult",
        "all_gather_output all_gather_event all_gather_work param_all_gather_input_dtypes "
        "param_all_gather_input_numels all_gather_input_split_sizes",
        "handing over what was gathered",
    ),
    Needed(f"{_FSDP}._fsdp_common", "_disable_functorch_if_active", "communicating under functorch", since=(2, 13)),
    Needed(f"{_FSDP}._fsdp_common.TrainingState", "IDLE PRE_BACKWARD", "who asks for weights"),
    Needed(_GROUP, "reshard _to_sharded _training_state", "keeping and dropping what was gathered"),
    Needed(_GROUP, "lazy_init", "learning which module is the root"),
    Needed(_STATE, "_state_ctx _modules", "the same"),
    Needed(f"{_FSDP}._fsdp_state.FSDPStateContext", "all_states", "the same"),
    Needed(_GROUP, "reduce_grads _reduce_scatter_process_group", "taking over the reduction"),
    Needed("torch.distributed.fsdp.FSDPModule", "set_all_reduce_hook", "the same"),
    Needed(_GROUP, "gradient_divide_factor force_sum_reduction_for_comms", "what gradients are divided by"),
    Needed(_PARAM, "sharded_param _sharded_param_data _sharded_local_tensor _param_fqn _module_info", "the shards"),
    Needed(f"{_FSDP}._fsdp_param.ParamModuleInfo", "module shared_modules", "the modules that hold a parameter"),
    Needed(_PARAM, "param_dtype unsharded_param", "unsharded parameters"),
    Needed("torch.distributed.fsdp.FSDPModule", "_apply", "moves of a model"),
    Needed("torch._C", "_current_graph_task_id", "telling whether a backward runs"),
)
check_needed("adapter for fully_shard", _NEEDED)

from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

state_of: Callable[[nn.Module], FSDPState] = fully_shard.state  # type: ignore[attr-defined]

from ._torch_reduction import ReducingGroup

# torch 2.13 steps out of functorch's transforms to communicate.
_without_functorch: Callable[[Any], Any] = getattr(_fsdp_common, "_disable_functorch_if_active", lambda method: method)

__all__ = [
    "AllGather",
    "FSDPParam",
    "FSDPParamGroup",
    "FSDPState",
    "ReduceScatter",
    "ShardGather",
    "StrategyGroup",
    "adopt_group",
    "after_moves",
    "groups_of",
    "state_of",
    "strategy_group_of",
]


class ShardGather(AllGather):
    """An all-gather of the shards as they are, which needs no copy of them in the dtype to compute in."""

    @abstractmethod
    def from_shards(self, output_tensor: Tensor) -> None:
        """Fill ``output_tensor``, of that dtype, in which every rank has equally many values."""


class StrategyGroup(ReducingGroup):
    """A parameter group that a strategy gathers and reduces. Made by :func:`adopt_group` from the one torch built.

    Attributes:
        staleness_guard: Asked before weights are used that stay unsharded from one micro-batch to the next; None if
            they don't stay.
    """

    _state: FSDPState
    _on_lazy_init: Callable[[nn.Module], None] | None
    staleness_guard: SecondaryShard | None

    @_without_functorch
    def unshard(self, async_op: bool = False) -> None:
        if self.staleness_guard is not None and self.is_unsharded:
            self.staleness_guard.check_version(self.shard_version())
        must_gather = self._must_gather()
        self._was_gathered |= must_gather  # on all ranks, if on one
        if isinstance(self._all_gather_comm, ShardGather) and must_gather:
            self._all_gather_result = self._gathered(self._all_gather_comm, async_op)
        else:
            super().unshard(async_op)

    def _must_gather(self) -> bool:
        """Whether torch's ``unshard`` would communicate."""
        asked_for = self.unshard_in_backward or self._training_state != TrainingState.PRE_BACKWARD
        done = self.is_unsharded or self._all_gather_result is not None
        return asked_for and not done and self._all_gather_process_group.size() > 1

    def _gathered(self, gather: ShardGather, async_op: bool) -> AllGatherResult:
        """As torch's ``foreach_all_gather``, without the two copies of the shards that it makes for a collective."""
        numels = [shard.numel() for shard in self.shards()]
        dtypes = [param.param_dtype or param._sharded_param_data.dtype for param in self.fsdp_params]
        mixed = any(dtype != dtypes[0] for dtype in dtypes)
        part, ranks = sum(numels), self._all_gather_process_group.size()
        _, stream = self.comm_ctx.get_all_gather_streams(async_op, self._training_state)
        with record_function(self._with_fqn("FSDP::all_gather")), self.device_handle.stream(stream):
            out = torch.empty(part * ranks, dtype=torch.uint8 if mixed else dtypes[0], device=self.device)
            gather.from_shards(out)
            event = stream.record_event()
        return AllGatherResult(
            all_gather_output=out,
            all_gather_event=event,
            all_gather_work=None,
            param_all_gather_input_dtypes=[[dtype] for dtype in dtypes],
            param_all_gather_input_numels=[[numel] for numel in numels],
            all_gather_input_split_sizes=numels,
        )

    def reshard(self) -> None:
        # Parameter scope N keeps what was gathered until the weights change. In an idle group, a user asks for it.
        if self.staleness_guard is None or self._training_state == TrainingState.IDLE:
            super().reshard()

    def lazy_init(self) -> None:
        super().lazy_init()
        states = self._state._state_ctx.all_states  # empty as long as there was no forward
        groups = [group for state in states for group in groups_of(state) if isinstance(group, StrategyGroup)]
        # Lazy initialization may replace the parameters of a group, so this must wait for the last group's.
        if groups and groups[-1] is self and self._on_lazy_init is not None:
            callback, self._on_lazy_init = self._on_lazy_init, None
            callback(states[0]._modules[0])  # the root's state comes first

    @property
    def name(self) -> str:
        """The group's modules, by their paths from the root."""
        return self._module_fqn or "root"

    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters, as an optimizer holds them."""
        return [param.sharded_param for param in self.fsdp_params]

    def shards(self) -> list[Tensor]:
        """What this rank holds of the parameters."""
        return [param._sharded_param_data for param in self.fsdp_params]

    def parameter_owners(self) -> list[tuple[nn.Module, ...]]:
        """For each parameter, the modules on which it is registered."""
        infos = [param._module_info for param in self.fsdp_params]
        return [(info.module, *info.shared_modules) for info in infos]

    # ---- as a ShardSource, which is asked before torch's gather

    def can_be_read(self) -> bool:
        """False in a backward, where an optimizer may outdate what is prefetched, and for what encodes itself."""
        return torch._C._current_graph_task_id() == -1 and self._self_encoding() is None

    def write_back(self) -> None:
        """Nothing to do: an optimizer's parameters are views of the shard."""

    def full_precision_shard(self) -> Tensor:
        """The flat, padded shards of all parameters, in the layout in which the group gathers them.

        Raises:
            TypeError: If a parameter is a tensor subclass that decides itself what is gathered.
        """
        if (param := self._self_encoding()) is not None:
            raise TypeError(
                f"parameter {param._param_fqn} is a {type(param._sharded_local_tensor).__name__}, which encodes "
                "itself for the all-gather (fsdp_pre_all_gather); shard it with weights=None"
            )
        shards = [param._sharded_param_data.to(self.device, non_blocking=True) for param in self.fsdp_params]
        return shards[0] if len(shards) == 1 else torch.cat(shards)

    def _self_encoding(self) -> FSDPParam | None:
        """A parameter that decides itself what is gathered, if there is one."""
        for param in self.fsdp_params:
            if hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
                return param
        return None

    def shard_version(self) -> Hashable:
        """A value that changes with every write to the shards that torch counts, and when they are moved."""
        return tuple(
            # Each new tensor counts its writes from zero, and an allocator reuses addresses. A weak reference to the
            # storage identifies it without keeping it alive; a tensor subclass may have no storage of its own.
            (tensor._version, StorageWeakRef(tensor.untyped_storage()) if type(tensor) is Tensor else id(tensor))
            for param in self.fsdp_params
            for tensor in (param.sharded_param, param._sharded_local_tensor, param._sharded_param_data)
        )

    def drop_unsharded(self) -> None:
        """Between forwards, have the next one gather anew what FSDP still keeps unsharded."""
        if self._training_state == TrainingState.IDLE:
            self.wait_for_unshard()
            self._to_sharded()


def adopt_group(module: nn.Module, on_lazy_init: Callable[[nn.Module], None]) -> StrategyGroup | None:
    """The parameter group that ``fully_shard`` just made for ``module``, ready for a strategy, if it made just one.

    Args:
        module: A module on which torch's ``fully_shard`` was called.
        on_lazy_init: Called with the root when FSDP has initialized all groups below it lazily.
    """
    state = state_of(module)
    groups: list[Any] = groups_of(state)
    if len(groups) != 1:
        return None
    (group,) = groups
    group.__class__ = StrategyGroup
    group._state, group._on_lazy_init, group.staleness_guard = state, on_lazy_init, None
    group.adopt()
    return group


def strategy_group_of(module: FSDPModule) -> StrategyGroup | None:
    """The group of a module, if it was adopted."""
    groups = [group for group in groups_of(module._get_fsdp_state()) if isinstance(group, StrategyGroup)]
    return groups[0] if groups else None


def after_moves(callback: Callable[[nn.Module], None]) -> None:
    """Have ``callback(module)`` run after the parameters of a sharded module were moved or cast: ``to()``, ``half()``.

    Whatever moves a model goes through ``_apply``, module by module.
    """
    original = FSDPModule._apply

    @functools.wraps(original)
    def _apply(self: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        groups = groups_of(self._get_fsdp_state())
        before = [(p, dict(vars(p))) for group in groups for p in (param.sharded_param for param in group.fsdp_params)]
        moved = original(self, *args, **kwargs)
        for parameter, attributes in before:  # torch swaps a DTensor with a new one, which loses its attributes
            ours = {name: value for name, value in attributes.items() if name.startswith("_fsdp_zpp")}
            vars(parameter).update(ours)
        callback(cast(nn.Module, self))
        return moved

    FSDPModule._apply = _apply  # type: ignore[method-assign]


def groups_of(state: FSDPState) -> list[FSDPParamGroup]:
    """The parameter groups of a module."""
    # torch 2.12 allows for several groups a module; before, there was one or none.
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
