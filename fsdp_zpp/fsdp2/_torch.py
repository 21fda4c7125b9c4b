"""Every private name of torch's fully_shard that the adapter touches, but for those in _torch_owned.py.

They are in a table, which is checked before anything is imported from there.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.profiler import record_function

from ..labels import profiled
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
    Needed(_GROUP, "post_backward reduce_grads all_reduce_grads", "reducing in every micro-batch"),
    Needed(_GROUP, "_reduce_scatter_process_group _all_reduce_hook", "taking over the reduction"),
    Needed("torch.distributed.fsdp.FSDPModule", "set_all_reduce_hook", "the same"),
    Needed(_GROUP, "gradient_divide_factor force_sum_reduction_for_comms", "what gradients are divided by"),
    Needed(_PARAM, "sharded_param _sharded_param_data _sharded_local_tensor _param_fqn _module_info", "the shards"),
    Needed(f"{_FSDP}._fsdp_param.ParamModuleInfo", "module shared_modules", "the modules that hold a parameter"),
    Needed(_PARAM, "param_dtype unsharded_param _unsharded_param unsharded_accumulated_grad", "unsharded parameters"),
    Needed("torch.Tensor", "_post_accumulate_grad_hooks grad_dtype", "gradients that wait for the last micro-batch"),
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
    "after_zero_grad",
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


class Gradients(Protocol):
    """Knows of gradients of earlier micro-batches."""

    @property
    def accumulates(self) -> bool: ...

    @property
    def waiting(self) -> bool: ...


class Completion(Protocol):
    """Completes a reduction, and runs a user's all-reduce hook after that."""

    then: Callable[[Tensor], None] | None

    def __call__(self, gradient: Tensor) -> None: ...


class StrategyGroup(FSDPParamGroup):
    """A parameter group that a strategy gathers and reduces. Made by :func:`adopt_group` from the one torch built.

    Attributes:
        kept: What is to be asked before weights are used that stay unsharded from one micro-batch to the next; None
            if they don't.
        gradients: What is to accumulate gradients where the strategy does; None where torch does.
        every_backward_reduces: Whether a micro-batch hands over its gradients although it is not the last.
        more_micro_batches: Whether the backward that runs is such a micro-batch's.
        own_all_reduce: What must be the all-reduce hook; None if that is free for users.
        completion: What runs as the all-reduce hook before a user's; None if nothing does.
    """

    _state: FSDPState
    _root_is_known: Callable[[nn.Module], None] | None
    kept: Weights | None
    gradients: Gradients | None
    every_backward_reduces: bool
    more_micro_batches: bool
    own_all_reduce: Callable[[Tensor], None] | None
    completion: Completion | None
    _received: set[int]

    @property
    def is_last_micro_batch(self) -> bool:
        """Whether a backward leaves the gradients of its step, as FSDPModule's setters say."""
        accumulates = self.gradients is not None and self.gradients.accumulates
        # Without replicas that torch knows of, its all-reduce is ours, for letters that leave something to be reduced.
        return self.reduce_grads and (self.all_reduce_grads or not accumulates)

    @_without_functorch
    def unshard(self, async_op: bool = False) -> None:
        if self.kept is not None and self.is_unsharded:
            self.kept.check_unchanged(self.shard_version())
        if isinstance(self._all_gather_comm, ShardGather) and self._must_gather():
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

    def post_backward(self, *unused: Any) -> None:
        """See [Note: What a micro-batch reduces] in gradient_reduce.py."""
        if self.own_all_reduce is not None and self._all_reduce_hook is not self.own_all_reduce:
            raise RuntimeError(
                f"set_all_reduce_hook has replaced the hook by which the strategy reduces the gradients of "
                f"{self.name}, which are sharded over no ranks; choose a strategy whose third letter is not N"
            )
        if self.completion is not None and self._all_reduce_hook is not self.completion:
            self.completion.then, self._all_reduce_hook = self._all_reduce_hook, self.completion
        self.more_micro_batches = self.every_backward_reduces and not self.is_last_micro_batch
        reduce_grads, self.reduce_grads = self.reduce_grads, self.reduce_grads or self.more_micro_batches
        never_used = self._zero_missing_gradients()
        before = [(param, param.sharded_param.grad) for param in never_used]
        try:
            with self._optimizers_kept_away() if self.more_micro_batches else nullcontext():
                super().post_backward(*unused)
        finally:
            self.reduce_grads, self.more_micro_batches = reduce_grads, False
        for param, gradient in before:
            param.sharded_param.grad = gradient

    def _zero_missing_gradients(self) -> list[FSDPParam]:
        """Micro-batches can be added up only if they reduce the same parameters, used or not.

        Returns:
            Those that no micro-batch of the step has used so far, of which an optimizer is to see no zeros.
        """
        if self.gradients is None or not self.gradients.accumulates:
            return []
        if not self.gradients.waiting:
            self._received = set()
        trainable = [p for p in self.fsdp_params if p.sharded_param.requires_grad and hasattr(p, "_unsharded_param")]
        missing = [p for p in trainable if p.unsharded_accumulated_grad is None and p.unsharded_param.grad is None]
        self._received |= {id(p) for p in trainable} - {id(p) for p in missing}
        if not self.gradients.waiting and (not self.more_micro_batches or len(missing) == len(trainable)):
            return []
        for param in missing:
            param.unsharded_param.grad = torch.zeros_like(param.unsharded_param)
        return [p for p in missing if id(p) not in self._received]

    @contextmanager
    def _optimizers_kept_away(self) -> Iterator[None]:
        """Before the last micro-batch, no optimizer in the backward may step, and none may see what only waits."""
        params: list[Any] = [param.sharded_param for param in self.fsdp_params]
        aside = [(param, param.grad, param._post_accumulate_grad_hooks) for param in params]
        waits = self.gradients is not None and self.gradients.accumulates
        for param in params:
            param._post_accumulate_grad_hooks = None
            if waits:
                param.grad = None
        try:
            yield
        finally:
            for param, gradient, hooks in aside:
                param._post_accumulate_grad_hooks = hooks
                if waits:
                    param.grad = gradient

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

    def parameter_owners(self) -> set[nn.Module]:
        """The modules on which the parameters are registered."""
        infos = [param._module_info for param in self.fsdp_params]
        return {module for info in infos for module in (info.module, *info.shared_modules)}

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
        """Changes with every write to the shards that torch can see from here."""
        return tuple(
            tensor._version
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

    def _root_post_backward_final_callback(self) -> None:
        groups = [group for state in self._state_ctx.all_states for group in groups_of(state)]
        synchronized = any(
            group.is_last_micro_batch if isinstance(group, StrategyGroup) else group.reduce_grads for group in groups
        )
        # Before torch's own callback: until then no group is idle, so nothing that a user told FSDP to keep
        # unsharded after the backward is dropped.
        if synchronized:
            self._gradients_synchronized()
        super()._root_post_backward_final_callback()
        if synchronized:
            for group in groups:
                if isinstance(group, StrategyGroup) and group.kept is not None:
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
    group._state, group._root_is_known = state, root_is_known
    group.kept, group.gradients, group.every_backward_reduces, group.more_micro_batches = None, None, False, False
    group.own_all_reduce, group.completion, group._received = None, None, set()
    return group


def strategy_group_of(module: FSDPModule) -> StrategyGroup | None:
    """The group of a module, if it was adopted."""
    groups = [group for group in groups_of(module._get_fsdp_state()) if isinstance(group, StrategyGroup)]
    return groups[0] if groups else None


def watch_backwards(root: nn.Module, callback: Callable[[], None]) -> None:
    """Have ``callback()`` run in every backward below ``root`` that synchronizes gradients."""
    # The backward ends in the state whose output it reaches first, which may be any, torch's own ones included.
    for state in state_of(root)._state_ctx.all_states:
        watched: Any = state
        watched.__class__ = WatchedState
        watched._gradients_synchronized = callback


def after_zero_grad(callback: Callable[[nn.Module], None]) -> None:
    """Have ``callback(module)`` run after every ``zero_grad()`` of a module that is sharded by ``fully_shard``."""

    def zero_grad(self: FSDPModule, set_to_none: bool = True) -> None:
        super(FSDPModule, self).zero_grad(set_to_none)  # type: ignore[misc]  # of the module's own class
        callback(cast(nn.Module, self))

    FSDPModule.zero_grad = zero_grad  # type: ignore[attr-defined]


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
