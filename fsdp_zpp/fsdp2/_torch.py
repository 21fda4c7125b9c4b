"""Every private name of torch's fully_shard that the adapter touches, but for those in _torch_owned.py.

They are in a table, which is checked before anything is imported from there.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Hashable
from contextlib import ExitStack, nullcontext
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.profiler import record_function

from ..labels import profiled
from ..reduction_order import ReductionOrder
from ..tensor_version import version_of
from ..torch_internals import Needed, check_needed

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
    Needed(_STATE, "_state_ctx _modules _root_post_backward_final_callback", "the end of a backward"),
    Needed(f"{_FSDP}._fsdp_state.FSDPStateContext", "all_states", "the same"),
    Needed(_STATE, "finalize_backward", "the end of a step by a user's call", since=(2, 15)),
    Needed(f"{_FSDP}._fsdp_state.FSDPStateContext", "manual_backward_finalization_active", "the same", since=(2, 15)),
    Needed(_STATE, "_reset_iter_state", "recovery from an exception", since=(2, 13)),
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
    Needed(f"{_FSDP}._fsdp_common.TrainingState", "IDLE PRE_BACKWARD POST_BACKWARD", "who asks for weights"),
    Needed(_GROUP, "reshard _to_sharded _training_state use_training_state", "keeping and dropping what was gathered"),
    Needed(_GROUP, "lazy_init", "learning which module is the root"),
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
    "factor_of",
    "groups_of",
    "process_group_of",
    "state_of",
    "strategy_group_of",
    "watch_backwards",
]


class ShardGather(AllGather):
    """An all-gather of the shards as they are, which needs no copy of them in the dtype to compute in."""

    @abstractmethod
    def from_shards(self, output_tensor: Tensor, numel: int) -> None:
        """Fill ``output_tensor``, of that dtype, in which every rank has ``numel`` values."""


class Weights(Protocol):
    """Knows whether the weights are those that were gathered."""

    def check_unchanged(self, version: Hashable) -> None: ...


class StrategyGroup(ReducingGroup):
    """A parameter group that a strategy gathers and reduces. Made by :func:`adopt_group` from the one torch built.

    Attributes:
        kept: What is to be asked before weights are used that stay unsharded from one micro-batch to the next; None
            if they don't.
    """

    _state: FSDPState
    _root_is_known: Callable[[nn.Module], None] | None
    kept: Weights | None

    @_without_functorch
    def unshard(self, async_op: bool = False) -> None:
        if self.kept is not None and self.is_unsharded:
            self.kept.check_unchanged(self.shard_version())
        must_gather = self._must_gather()
        if must_gather:
            self.note_gather()
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
        label = record_function(self._with_fqn("FSDP::all_gather")) if profiled() else nullcontext()
        with label, self.device_handle.stream(stream):
            out = torch.empty(part * ranks, dtype=torch.uint8 if mixed else dtypes[0], device=self.device)
            gather.from_shards(out, part)
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
        if self.kept is None or self._training_state == TrainingState.IDLE:  # idle: a user asks for it
            super().reshard()

    def lazy_init(self) -> None:
        super().lazy_init()
        states = self._state._state_ctx.all_states  # empty as long as there was no forward
        groups = [group for state in states for group in groups_of(state) if isinstance(group, StrategyGroup)]
        # Lazy initialization may replace the parameters of a group, so this must wait for the last group's.
        if groups and groups[-1] is self and self._root_is_known is not None:
            callback, self._root_is_known = self._root_is_known, None
            callback(states[0]._modules[0])

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

    def full_precision_shard(self, device: torch.device) -> Tensor:
        """The flat, padded shards of all parameters, in the layout in which the group gathers them.

        Raises:
            TypeError: If a parameter is a tensor subclass that decides itself what is gathered.
        """
        if (param := self._self_encoding()) is not None:
            raise TypeError(
                f"parameter {param._param_fqn} is a {type(param._sharded_local_tensor).__name__}, which encodes "
                "itself for the all-gather (fsdp_pre_all_gather); shard it with weights=None"
            )
        shards = [param._sharded_param_data.to(device, non_blocking=True) for param in self.fsdp_params]
        return shards[0] if len(shards) == 1 else torch.cat(shards)

    def write_back(self) -> None:
        """The parameters are the shard."""

    def shard_ahead(self) -> tuple[Tensor, Hashable] | None:
        """What a gather will be given, before torch asks for it: the shard and its version, if that can be told."""
        # An optimizer in the backward would make of no use what is gathered ahead there.
        if torch._C._current_graph_task_id() != -1 or self._self_encoding() is not None:
            return None
        return self.full_precision_shard(self.device), self.shard_version()

    def _self_encoding(self) -> FSDPParam | None:
        """A parameter that decides itself what is gathered, if there is one."""
        for param in self.fsdp_params:
            if hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
                return param
        return None

    def shard_version(self) -> Hashable:
        """A value that changes with every write to the shards that torch counts, and when they are moved."""
        return tuple(
            version_of(tensor)
            for param in self.fsdp_params
            for tensor in (param.sharded_param, param._sharded_local_tensor, param._sharded_param_data)
        )

    def drop_unsharded(self) -> None:
        """Between forwards, have the next one gather anew what FSDP still keeps unsharded."""
        if self._training_state == TrainingState.IDLE:
            self.wait_for_unshard()
            self._to_sharded()


class WatchedState(FSDPState):
    """A module's state that tells of backwards that synchronize gradients."""

    _gradients_synchronized: Callable[[], None]
    _agree_on_use: Callable[[], None]

    def _root_post_backward_final_callback(self) -> None:
        # From torch 2.15 on, a user may end the step by calling finalize_backward instead.
        ends_step = not getattr(self._state_ctx, "manual_backward_finalization_active", None)
        synchronized = ends_step and self._synchronizes()
        # Before torch's own callback: until then no group is idle, so nothing that a user told FSDP to keep
        # unsharded after the backward is dropped.
        if synchronized:
            self._gradients_synchronized()
        super()._root_post_backward_final_callback()
        self._end_backward(synchronized)

    def finalize_backward(self, **arguments: Any) -> None:
        """Ends a step at a user's request; from torch 2.15 on."""
        torchs: Any = super()
        torchs.finalize_backward(**arguments)
        synchronized = self._synchronizes()
        if synchronized:
            with ExitStack() as stack:
                for group in self._groups():  # as at the end of a backward, where they are not idle
                    stack.enter_context(group.use_training_state(TrainingState.POST_BACKWARD))
                self._gradients_synchronized()
        self._end_backward(synchronized)

    def _reset_iter_state(self) -> None:
        torchs: Any = super()
        torchs._reset_iter_state()  # from torch 2.13 on
        ours = self._strategy_groups()
        # Ranks may have failed at different points, so each forgets the order in which it reduced this time.
        order: ReductionOrder[ReducingGroup] = ReductionOrder(ours)
        for group in ours:
            group.forget()
            group.order = order

    def _groups(self) -> list[FSDPParamGroup]:
        return [group for state in self._state_ctx.all_states for group in groups_of(state)]

    def _strategy_groups(self) -> list[StrategyGroup]:
        return [group for group in self._groups() if isinstance(group, StrategyGroup)]

    def _synchronizes(self) -> bool:
        """Whether a backward that ends now leaves gradients for a step."""
        return any(
            group.is_last_micro_batch if isinstance(group, StrategyGroup) else group.reduce_grads
            for group in self._groups()
        )

    def _end_backward(self, synchronized: bool) -> None:
        ours = self._strategy_groups()
        for order in dict.fromkeys(group.order for group in ours):
            for group in order.remaining():
                group.reduce_micro_batch()
        if synchronized:
            self._agree_on_use()
        for group in ours:
            group.end_backward(synchronized and group.is_last_micro_batch)
            if synchronized and group.kept is not None:
                group.drop_unsharded()


def adopt_group(module: nn.Module, root_is_known: Callable[[nn.Module], None]) -> StrategyGroup | None:
    """The parameter group that ``fully_shard`` just made for ``module``, ready for a strategy, if it made just one.

    Args:
        module: A module on which torch's ``fully_shard`` was called.
        root_is_known: Called with the root when FSDP has initialized all groups below it lazily.
    """
    state = state_of(module)
    groups: list[Any] = groups_of(state)
    if len(groups) != 1:
        return None
    (group,) = groups
    group.__class__ = StrategyGroup
    group._state, group._root_is_known, group.kept = state, root_is_known, None
    group.adopt()
    return group


def strategy_group_of(module: FSDPModule) -> StrategyGroup | None:
    """The group of a module, if it was adopted."""
    groups = [group for group in groups_of(module._get_fsdp_state()) if isinstance(group, StrategyGroup)]
    return groups[0] if groups else None


def watch_backwards(
    root: nn.Module, gradients_synchronized: Callable[[], None], agree_on_use: Callable[[], None]
) -> None:
    """Watch the backwards below ``root``, and have its groups reduce in one order on all ranks.

    Args:
        root: The root.
        gradients_synchronized: Called in every backward that synchronizes gradients.
        agree_on_use: Called at the end of such a backward, when all of its reductions have been started.
    """
    states = state_of(root)._state_ctx.all_states
    groups = [group for state in states for group in groups_of(state) if isinstance(group, StrategyGroup)]
    order: ReductionOrder[ReducingGroup] = ReductionOrder(groups)
    for group in groups:
        group.order = order
    # The backward ends in the state whose output it reaches first, which may be any, torch's own ones included.
    for state in states:
        watched: Any = state
        watched.__class__ = WatchedState
        watched._gradients_synchronized, watched._agree_on_use = gradients_synchronized, agree_on_use


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


def factor_of(op: Any, sharded_over: int, world: int, divide_factor: float | None) -> float:
    """What a reduction of torch's multiplies the mean by.

    Args:
        op: The reduction.
        sharded_over: The ranks that torch knows of.
        world: All ranks, their replicas too.
        divide_factor: What a user told torch to divide the sum by, if anything.

    Raises:
        ValueError: If it is not a kind of sum.
    """
    summed = sharded_over if divide_factor is None else world
    if op == dist.ReduceOp.AVG:
        return summed / sharded_over
    if op == dist.ReduceOp.SUM:
        return float(summed)
    if op == dist.ReduceOp.PREMUL_SUM:
        return float(summed * op.__getstate__()[1])
    raise ValueError(f"a Strategy reduces gradients by sum or average, not by {op}")


def groups_of(state: FSDPState) -> list[FSDPParamGroup]:
    """The parameter groups of a module."""
    # torch 2.12 allows for several groups a module; before, there was one or none.
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def process_group_of(group: FSDPParamGroup) -> dist.ProcessGroup:
    """The ranks that ``group`` is sharded over."""
    return group._reduce_scatter_process_group
