"""A parameter group with a strategy: its forward, its backward, and its resharding."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import lru_cache, partial
from types import FunctionType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import profiler
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult, foreach_reduce
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState, _get_dim0_padded_size
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import AllGatherState, FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from fsdp_zpp.comm.agreement import all_reduce_flags
from fsdp_zpp.comm.flat_layout import Sharded
from fsdp_zpp.comm.gradient_reduce import StepWatch
from fsdp_zpp.comm.hops import keep_until_read
from fsdp_zpp.comm.weight_gather import WeightGather
from fsdp_zpp.runtime.unit import StrategyUnit

from ._torch_gradients import GroupGradients
from ._torch_weights import (
    GatherPlan,
    GroupWeights,
    RegisterPostBackward,
    StrategyAllReduce,
    axes_of,
    groups_of,
    has_own_bytes,
    names_in,
    numel_of,
    order_parameters,
    show_shards,
    state_of,
    without_functorch,
)

# ---- torch's methods without overhead


def _record_if_profiled(label: str) -> AbstractContextManager[object]:
    """Return torch's ``record_function`` if a profiler is recording; without one it would take 6 us, too."""
    return record_function(label) if profiler._is_profiler_enabled else nullcontext()


def _without_overhead(method: Callable[..., Any], **called: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's ``method``, with labels only while a profiler records and dynamo disabled once and for all.

    The copy takes the functions ``called`` in place of those that torch's module has by these names.
    """
    # From torch 2.13 on, torch's decorator makes a new dynamo wrapper in every call, which takes longer than much of
    # the methods' own work. A method with another wrapper keeps it.
    decorator = getattr(_fsdp_common, "_dynamo_disable", None)
    disables = decorator is not None and method.__code__ is decorator(lambda: None).__code__
    inner: Any = method.__wrapped__ if disables else method  # type: ignore[attr-defined]
    names = {**inner.__globals__, "record_function": _record_if_profiled, **called}
    copy = FunctionType(inner.__code__, names, inner.__name__, inner.__defaults__, inner.__closure__)
    functools.update_wrapper(copy, inner)
    return torch.compiler.disable(copy) if disables else copy


class StrategyParam(FSDPParam):
    """A parameter of a group that a strategy reduces; :meth:`StrategyGroup.adopt` makes it from torch's."""

    # DTensor.__init__ does nothing, but dynamo's wrapper around it takes longer than all else.
    to_sharded_dtensor = _without_overhead(
        FSDPParam.to_sharded_dtensor, _from_local_no_grad=partial(DTensor.__new__, DTensor, requires_grad=False)
    )


_padded_size = lru_cache(maxsize=4096)(_get_dim0_padded_size)
_reduce = torch.no_grad()(_without_overhead(inspect.unwrap(foreach_reduce), _get_dim0_padded_size=_padded_size))
_post_backwards = [
    _without_overhead(FSDPParamGroup.post_backward, record_function=label, foreach_reduce=_reduce)
    for label in (nullcontext, record_function)
]
"""torch's ``post_backward`` without labels, and with labels."""


# ---- group


class StrategyGroup(FSDPParamGroup, Sharded):
    """A parameter group that a strategy gathers and reduces.

    :func:`adopt_groups` makes it from the group that torch built. It overrides torch's methods that gather, reshard and
    reduce.
    """

    def adopt(self, state: FSDPState, unit: StrategyUnit, path: str, on_lazy_init: Callable[[nn.Module], None]) -> None:
        """Set this class's attributes, in place of a constructor; the arguments are those of :func:`adopt_groups`."""
        self.unit, self._path = unit, path
        self.weights = GroupWeights(self, unit)
        self.gradients = GroupGradients(self, self.weights, unit)
        self.gradients.post_backwards = [partial(each, self) for each in _post_backwards]
        self._state = state
        for param in self.fsdp_params:
            param.__class__ = StrategyParam
        self._on_lazy_init: Callable[[nn.Module], None] | None = on_lazy_init
        self._is_ordered, self._knows_formats = unit.stock, False
        self._known_names: dict[FSDPParam, str] = {}

    # ---- lazy initialization

    def lazy_init(self) -> None:
        if not self._is_ordered:  # torch may call this again, but the order of the first call stays
            order_parameters(self)
            self._is_ordered = True
        super().lazy_init()
        if not self._knows_formats:
            self._knows_formats = True
            if not self.unit.stock and has_own_bytes(self.fsdp_params):
                self._leave_weights_uncoded()
        states = self._state._state_ctx.all_states  # empty before the first forward
        if states:
            self._set_missing_names(states[0]._modules[0])
        groups = [group for state in states for group in groups_of(state) if isinstance(group, StrategyGroup)]
        # Lazy initialization may replace a group's parameters, so the callback waits for the last group.
        if groups and groups[-1] is self and self._on_lazy_init is not None:
            self._on_lazy_init(states[0]._modules[0])  # the root's state comes first
            self._on_lazy_init = None

    def _leave_weights_uncoded(self) -> None:
        """Gather without a codec, since parameters encode themselves; call it before the first gather, on all ranks."""
        was_encoded, self.unit.encodes_itself = self.weights.is_encoded, True
        if was_encoded:
            self.unit.leave_weights_uncoded(in_place_of_torch=True)
            self.weights.follow(self.unit)
            if self.weights.comm is not None:
                self._all_gather_comm = self.weights.comm

    def _set_missing_names(self, root: nn.Module) -> None:
        """Set FQNs that torch left None: an earlier ``unshard()`` had replaced the parameters on their modules."""
        if all(param._param_fqn is not None for param in self.fsdp_params):
            return
        paths = {module: path for path, module in root.named_modules()}
        for param in self.fsdp_params:
            info = param._module_info
            param._param_fqn = ".".join(filter(None, (paths[info.module], info.param_name)))
        # The plan and the layouts were made without these names.
        self.weights.plan = None
        self.gradients.layouts.clear()

    # ---- gathering weights

    pre_forward = _without_overhead(FSDPParamGroup.pre_forward)
    post_forward = _without_overhead(FSDPParamGroup.post_forward)
    pre_backward = _without_overhead(FSDPParamGroup.pre_backward)
    _register_post_backward_hook = _without_overhead(
        FSDPParamGroup._register_post_backward_hook, RegisterPostBackwardFunction=RegisterPostBackward
    )
    _prefetch_unshard = staticmethod(_without_overhead(FSDPParamGroup._prefetch_unshard))

    @without_functorch
    def unshard(self, async_op: bool = False) -> None:
        if self._all_gather_result is not None:
            return
        weights = self.weights
        if self.is_unsharded:
            if weights.staleness_guard is not None:
                weights.staleness_guard.check_version(weights.shard_version())
            return
        is_needed = self.unshard_in_backward or self._training_state != TrainingState.PRE_BACKWARD
        if is_needed and weights.is_kept and weights.is_fresh():
            weights.puts_back = True
            return
        gathers = is_needed and self._all_gather_process_group.size() > 1
        weights.was_gathered |= gathers  # on all ranks, or none
        if not gathers or weights.gather is None or self._all_gather_comm is not weights.comm:
            super().unshard(async_op)
            return
        plan = weights.plan or weights.make_plan()
        self._all_gather_result = self._gathered(weights.gather, plan, async_op)

    def _gathered(self, gather: WeightGather, plan: GatherPlan, async_op: bool) -> AllGatherResult:
        """Gather as torch's ``foreach_all_gather`` does, but without its two copies of the shards."""
        secondary, shard = gather.secondary, None
        _, stream = self.comm_ctx.get_all_gather_streams(async_op, self._training_state)
        with _record_if_profiled(self._with_fqn("FSDP::all_gather")), self.device_handle.stream(stream):
            if plan.joins and (secondary.encoded_by is None or plan.numel == 0):
                shard = plan.join_inputs()
            # If ``shard`` is None, a stale secondary shard calls ``weights.read()``, which also returns the version.
            is_compared = self.weights.reuses and not (secondary.stale and shard is None)
            out = torch.empty(plan.numel, dtype=plan.dtype, device=self.device)
            gather(shard, out, self.weights.shard_version() if is_compared else None)
            event = stream.record_event()
        if plan.joins:
            plan.tell_torch()
        return plan.result(out, event)

    @without_functorch
    def wait_for_unshard(self) -> None:
        """Unshard as torch does; from the second time on, use the plan's swaps instead of torch's lookups."""
        weights, result = self.weights, self._all_gather_result
        plan = weights.plan
        if result is None:
            if weights.puts_back:
                weights.is_kept = weights.puts_back = False
                self._to_unsharded()
            return
        by_strategy = result.all_gather_work is None and self._all_gather_comm is weights.comm
        if plan is None or not plan.swaps or not by_strategy:
            if by_strategy and plan is not None and plan.mixed and plan.dtype != torch.uint8:
                self.device_handle.current_stream().wait_event(result.all_gather_event)
                # torch keeps only ``as_bytes`` alive, so the memory of the output could be reused too early.
                as_bytes = plan.as_torch_gathers(keep_until_read(result.all_gather_output))
                self._all_gather_result = result._replace(all_gather_output=as_bytes)
            super().wait_for_unshard()
            if plan is not None and not plan.swaps:
                plan.prepare_swaps(self)
            return
        in_forward = self._training_state == TrainingState.FORWARD
        if in_forward and (previous := self.comm_ctx.all_gather_state) is not None:
            self._gather_after(previous.event)
            self.comm_ctx.all_gather_state = None
        stream = self.device_handle.current_stream()
        with _record_if_profiled(self._with_fqn("FSDP::all_gather_copy_out")):
            stream.wait_event(result.all_gather_event)
            plan.fill(result.all_gather_output)
        if not self.is_unsharded:
            plan.unshard()
            self._sharded_state = ShardedState.UNSHARDED
        copied = stream.record_event()
        # A forward keeps the output until it unshards the next group, whose gather need not wait for the copy-out.
        if in_forward:
            self.comm_ctx.all_gather_state = AllGatherState(result, copied)
        else:
            self._gather_after(copied)
        self._all_gather_result = None

    def _gather_after(self, event: torch.Event | None) -> None:
        context = self.comm_ctx
        if event is not None and hasattr(context, "all_gather_stream"):  # lazy initialization creates the streams
            context.all_gather_copy_in_stream.wait_event(event)
            context.all_gather_stream.wait_event(event)

    def _to_unsharded(self) -> None:
        plan = self.weights.plan
        if plan is None or not plan.swaps or self.is_unsharded:
            super()._to_unsharded()
        else:
            plan.unshard()
            self._sharded_state = ShardedState.UNSHARDED

    def _to_sharded(self) -> None:
        plan = self.weights.plan
        if plan is None or not plan.swaps or self.is_sharded:
            super()._to_sharded()
        else:
            plan.reshard()
            self._sharded_state = ShardedState.SHARDED

    def reshard(self) -> None:
        """Reshard as torch does, but keep the memory under parameter scope N; see [Note: Kept weights]."""
        weights = self.weights
        if weights.staleness_guard is None:
            super().reshard()
        elif self._training_state == TrainingState.IDLE:  # a user calls ``reshard()``
            super().reshard()
            weights.drop_kept()
        elif self.is_unsharded and (self._training_state != TrainingState.FORWARD or self._reshard_after_forward):
            if weights.plan is not None and weights.plan.swaps:
                weights.plan.show_shards()
            else:
                show_shards(self.fsdp_params)
            self._sharded_state = ShardedState.SHARDED
            weights.is_kept = weights.was_gathered = True

    # ---- reducing gradients

    def post_backward(self, *unused: object) -> None:
        self.gradients.post_backward(*unused)

    def _set_separate_reduce_scatter_group(self, enable: bool, *groups: object) -> None:
        if enable and self.gradients.reductions.current is not None:
            raise NotImplementedError(
                f"set_separate_reduce_scatter_group(True) applies to torch's own reduction, but a Strategy reduces the "
                f"gradients of {self.name} over process groups of its own; remove the call"
            )
        parent: Any = super()
        parent._set_separate_reduce_scatter_group(enable, *groups)  # from torch 2.13 on

    # ---- as Sharded

    @property
    def name(self) -> str:
        return ".".join(filter(None, (self._module_fqn, self._path))) or "root"

    def numel(self) -> int:
        return numel_of(self)

    def parameters(self) -> list[nn.Parameter]:
        return [param.sharded_param for param in self.fsdp_params]

    def parameter_owners(self) -> list[tuple[nn.Module, ...]]:
        infos = [param._module_info for param in self.fsdp_params]
        return [(info.module, *info.shared_modules) for info in infos]

    def model_parallel_groups(self) -> list[dist.ProcessGroup]:
        # torch's mesh of a parameter has data-parallel axes, too, whose ranks this unit shards over.
        sharded: list[Any] = self.parameters()
        groups = dict.fromkeys(g for p in sharded if p.device_mesh.ndim > 1 for g in p.device_mesh.get_all_groups())
        own = {*dist.get_process_group_ranks(self.unit.ranks.group)}
        return [group for group in groups if not own.issuperset(dist.get_process_group_ranks(group))]

    def is_trained(self) -> bool:
        return self.weights.is_trained()

    def trained_names(self) -> list[str]:
        # The next forward finds these parameters on the modules.
        shown = (getattr(param._module_info.module, param._module_info.param_name) for param in self.fsdp_params)
        named = zip(self._names(), shown, self.fsdp_params, strict=True)
        return [name for name, each, param in named if each.requires_grad or param.sharded_param.grad is not None]

    def shards(self) -> list[Tensor]:
        return [param._sharded_param_data for param in self.fsdp_params]

    def named_shards(self) -> dict[str, Tensor]:
        return dict(zip(self._names(), self.shards(), strict=True))

    def named_parts(self, parameter: nn.Parameter, of: Tensor) -> dict[str, Tensor]:
        pairs = zip(self._names(), self.fsdp_params, strict=True)
        return {name: of for name, param in pairs if param.sharded_param is parameter}

    def placements(self) -> dict[str, tuple[str, ...]]:
        return dict(zip(self._names(), axes_of(self.fsdp_params), strict=True))

    def _names(self) -> list[str]:
        if not all(param in self._known_names for param in self.fsdp_params):
            self._known_names = names_in(self)
        return [self._known_names[param] for param in self.fsdp_params]

    def weights_changed(self, by_step: bool) -> None:
        self.drop_unsharded()
        if not by_step:
            self.weights.plan = None
            # A user records this event after a step, maybe before this change. Without it, gathers wait for all writes.
            self._state._state_ctx.post_optim_event = None

    def drop_unsharded(self) -> None:
        """Drop weights that FSDP keeps unsharded between forwards, so that the next forward gathers them again."""
        if self._training_state == TrainingState.IDLE:
            self.weights.drop_kept()
            self.wait_for_unshard()
            self._to_sharded()

    def drop_gradients(self) -> None:
        self.gradients.drop()


# ---- adoption


class StockGroup(StrategyGroup):
    """A parameter group that a strategy leaves to torch, so no event drops weights or gradients of the group."""

    def weights_changed(self, by_step: bool) -> None: ...

    def drop_gradients(self) -> None: ...


def adopt_groups(
    module: nn.Module,
    units: Sequence[StrategyUnit],
    paths: Sequence[str],
    infos: Sequence[FSDPMeshInfo],
    on_lazy_init: Callable[[nn.Module], None],
) -> list[StrategyGroup | None]:
    """Make torch gather and reduce the parameter groups of ``module`` through ``units``.

    Each unit has the parameters that this call of ``fully_shard`` shards over one mesh. ``infos`` has the mesh of each
    unit, or is empty if there is one mesh. The result has each unit's group, or None for a unit without parameters.
    """
    state = state_of(module)
    # A group without FSDPMeshInfo is left to torch: its dp_mesh_dims only replicate it.
    sharded = [group for group in groups_of(state) if isinstance(group.mesh_info, FSDPMeshInfo)]
    groups: list[FSDPParamGroup | None] = [*sharded] or [None]
    if infos:
        by_ranks = {cast(FSDPMeshInfo, group.mesh_info).shard_process_group: group for group in sharded}
        groups = [by_ranks.get(info.shard_process_group) for info in infos]
    adopted: list[StrategyGroup | None] = []
    for group, unit, path in zip(groups, units, paths, strict=True):
        if group is None:
            adopted.append(None)
            continue
        own: Any = group
        own.__class__ = StockGroup if unit.stock else StrategyGroup
        own.adopt(state, unit, path, on_lazy_init)
        adopted.append(own)
        if unit.stock:
            continue
        unit.sharded = own
        # Set the comms here: the module's public setters support one group a module.
        if own.weights.comm is not None:
            group._all_gather_comm = own.weights.comm
        if isinstance(own.gradients.comm, StrategyAllReduce):
            group._all_reduce_hook = own.gradients.comm
        elif own.gradients.comm is not None:
            group._reduce_scatter_comm = own.gradients.comm
        # Loading a part of the model runs the hooks of that part only, so each module that owns a parameter gets hooks.
        for owner in {owner for owners in own.parameter_owners() for owner in owners}:
            owner.register_load_state_dict_post_hook(lambda module, incompatible_keys, unit=unit: unit.weights_loaded())
            # A partial, since torch sets an attribute on the hook, and methods allow none.
            owner.register_state_dict_post_hook(partial(own.weights.share_version_counters))
    return adopted


# ---- backward


class GroupBackwardWatch(StepWatch):
    """Watch over the groups of a model: ``groups`` have strategies, ``others`` are torch's alone.

    Make it after the root's lazy initialization, when the groups are final.
    """

    def __init__(self, root: nn.Module, on_backward_end: Callable[[bool], None]) -> None:
        # Until torch 2.12, if one call shards a list of modules, ``all_states`` has their state once per module.
        states = dict.fromkeys(state_of(root)._state_ctx.all_states)
        groups = [group for state in states for group in groups_of(state)]
        self.groups = [group for group in groups if isinstance(group, StrategyGroup)]
        self.others = [group for group in groups if not isinstance(group, StrategyGroup)]
        super().__init__([group.gradients for group in self.groups], on_backward_end)


class WatchedState(FSDPState):
    """A module's state that reports the end of backwards to ``watch``, which all states of a model share."""

    watch: GroupBackwardWatch

    _pre_backward = _without_overhead(FSDPState._pre_backward)

    def _root_post_backward_final_callback(self) -> None:
        last = [group.gradients.is_last_micro_batch for group in self.watch.groups]
        # From torch 2.15 on, a user may end the step by calling finalize_backward instead.
        ends_step = not getattr(self._state_ctx, "manual_backward_finalization_active", None)
        synchronized = ends_step and (any(last) or any(group.reduce_grads for group in self.watch.others))
        # Call on_backward_end() before torch's own callback, which makes groups idle. drop_unsharded() drops weights of
        # idle groups, even if a user told FSDP to keep them unsharded after the backward.
        self.watch.on_backward_end(synchronized)
        super()._root_post_backward_final_callback()
        if self.watch.arriving.waiting:
            self.watch.arriving.step_all()
        self._end_backward(last, synchronized)

    def finalize_backward(self, **arguments: object) -> None:
        parent: Any = super()
        parent.finalize_backward(**arguments)
        watch = self.watch
        watch.arriving.step_all()
        last = [group.gradients.is_last_micro_batch for group in watch.groups]
        synchronized = any(last) or any(group.reduce_grads for group in watch.others)
        if synchronized:
            with ExitStack() as stack:
                # In POST_BACKWARD, as at the end of a backward, drop_unsharded() leaves weights unsharded.
                for group in (*watch.groups, *watch.others):
                    stack.enter_context(group.use_training_state(TrainingState.POST_BACKWARD))
                watch.on_backward_end(True)
        self._end_backward(last, synchronized)

    def _end_backward(self, last: list[bool], synchronized: bool) -> None:
        """End a backward; ``last`` says for each group of ``watch`` whether this was the group's last micro-batch."""
        watch = self.watch
        if all(last):
            watch.restart()
        else:
            watch.reduce_remaining()
        if synchronized:
            shared = [each for group in watch.groups if (each := group.gradients).use.took_part or each.use.has_errors]
            asked = [(each.use, each.reductions.mesh, used) for each in shared if (used := each.use.in_step())]
            for use, used_by_any in all_reduce_flags(asked) if asked else ():
                use.drop_unused(used_by_any)
        for group, is_last in zip(watch.groups, last, strict=True):
            group.gradients.end_backward(synchronized and is_last)
            guard = group.weights.staleness_guard
            if synchronized and guard is not None and guard.stale:  # a frozen group's weights have not changed
                group.drop_unsharded()

    def _reset_iter_state(self) -> None:
        parent: Any = super()
        parent._reset_iter_state()  # from torch 2.13 on
        for group in self.watch.groups:
            group.weights.drop_kept()
            group.gradients.reset()
        self.watch.arriving.drop()
        # Ranks may have failed at different points, some after they took this backward's order: return to the model's.
        self.watch.restart_in_order_of_model()


def watch_backwards(root: nn.Module, on_backward_end: Callable[[bool], None]) -> None:
    """Watch the backwards below ``root``, and order reductions alike on all ranks. Needs a lazily initialized root."""
    watch = GroupBackwardWatch(root, on_backward_end)
    # torch ends a backward in the state whose output it reaches first. That may be any state, so all report.
    for state in state_of(root)._state_ctx.all_states:
        watched: Any = state
        watched.__class__ = WatchedState
        watched.watch = watch
