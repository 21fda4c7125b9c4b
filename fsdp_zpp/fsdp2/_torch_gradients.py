"""Gradients of a parameter group, reduced by a strategy."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from fsdp_zpp.comm.flat_layout import FlatLayout, keep_recent
from fsdp_zpp.comm.gradient_reduce import ArrivingGradients, StepGradients, StepReductions
from fsdp_zpp.comm.hops import keep_until_read
from fsdp_zpp.runtime.unit import StrategyUnit

from ._torch_weights import (
    GroupWeights,
    StrategyAllReduce,
    StrategyReduceScatter,
    flatten_gradients,
    has_gradient,
    layout_of,
    take_gradient,
)

# ---- use

Hooks = Mapping[int, Callable[[Tensor], None]]
"""A parameter's post-accumulate-grad hooks, by id. They may step optimizers in the backward."""


class UnusedParameter(NamedTuple):
    """A parameter that this rank has not used, its sharded gradient before the reduction, and its postponed hooks."""

    param: FSDPParam
    gradient: Tensor | None
    hooks: Hooks | None


@dataclass(eq=False, repr=False)
class ParameterUse:
    """Record of the parameters of a group that this rank has used in one step.

    Ranks may use different parameters in a micro-batch, but must reduce the same ones. So a step of several
    micro-batches reduces all parameters of a group in every micro-batch. With error feedback, a step of a single
    micro-batch does so, too, since the error state has the layout of the whole group. A parameter that no rank has used
    ends up without a gradient, as with torch's own reduction (:meth:`drop_unused`).

    Attributes:
        took_part: Whether ranks have gathered the group in an earlier micro-batch of the step.
        has_errors: Whether the last micro-batch has error feedback.
        unused: The parameters that this rank has not used, by id.
        used: The ids of the parameters that this rank has used.
        reduced: The parameters that the last micro-batch of the step reduces.
    """

    group: FSDPParamGroup
    reductions: StepReductions
    took_part: bool = False
    has_errors: bool = False
    reduced: list[FSDPParam] = field(default_factory=list)
    unused: dict[int, UnusedParameter] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)

    def fill_missing(self, params: Sequence[FSDPParam]) -> None:
        """Give zero gradients to ``params`` without one, since other micro-batches or other ranks may have one."""
        for param in params:
            if has_gradient(param):
                self.used.add(id(param))
            else:
                dtype = getattr(param, "unsharded_grad_dtype", None) or param.unsharded_param.dtype
                param.unsharded_param.grad = torch.zeros_like(param.unsharded_param, dtype=dtype)
        # Until torch 2.14, accumulated gradients have another dtype than new ones, but torch reduces a single dtype.
        any_accumulated = any(param.unsharded_accumulated_grad is not None for param in params)
        if any_accumulated and hasattr(FSDPParam, "to_accumulated_grad_if_needed"):
            for param in params:
                param.accumulate_unsharded_grad_if_needed()  # else the next line replaces the accumulated gradient
                param.to_accumulated_grad_if_needed()
        for param in filter(self._goes_without, params):
            if id(param) in self.used:
                self.unused.pop(id(param), None)  # a module that runs twice comes here twice
            elif id(param) not in self.unused:
                sharded = param.sharded_param
                hooks = getattr(sharded, "_post_accumulate_grad_hooks", None)
                self.unused[id(param)] = UnusedParameter(param, sharded.grad, hooks)

    def _goes_without(self, param: FSDPParam) -> bool:
        """Return whether a parameter must end up without a gradient if no rank has used it; ranks then compare use."""
        # With ``set_reduce_scatter_unused_params``, a parameter that still requires a gradient gets zeros.
        if self.reductions.current is None:
            return False
        zeros_reduced = getattr(self.group, "reduce_scatter_unused_params", False)  # from torch 2.13 on
        return not (zeros_reduced and param._unsharded_param.requires_grad)

    def idle(self) -> list[str]:
        """Return the names of the reduced parameters that this rank has not used in the step."""
        return [param._param_fqn or "" for param in self.reduced if id(param) not in self.used]

    # ---- after the backward

    def in_step(self) -> list[bool]:
        """Return, for each reduced parameter, whether this rank has used it; empty if ranks need not compare."""
        if not any(map(self._goes_without, self.reduced)):
            return []
        return [id(param) in self.used for param in self.reduced]

    def drop_unused(self, used_by_any: Callable[[], list[bool]]) -> None:
        """Undo the gradients of parameters that no rank has used in the step; run the postponed hooks of the others."""
        if not self.unused:
            return
        by_id = dict(zip(map(id, self.reduced), used_by_any(), strict=True))
        for param, before, hooks in self.unused.values():
            if not by_id[id(param)]:
                param.sharded_param.grad = before
                continue
            _run([(param, hooks or {})])


@contextmanager
def without_hooks(hooked: Sequence[tuple[FSDPParam, Hooks | None]]) -> Iterator[None]:
    for param, _ in hooked:
        param.sharded_param._post_accumulate_grad_hooks = None  # type: ignore[assignment]  # torch declares a dict
    try:
        yield
    finally:
        for param, hooks in hooked:
            param.sharded_param._post_accumulate_grad_hooks = hooks  # type: ignore[assignment]


# ---- offload
#
# Hooks of an offloaded parameter must not see a gradient before its copy to the CPU is complete. Before torch 2.13,
# torch runs them too early; since then, it makes the CPU wait for the copy. Here torch finds no hooks while it reduces,
# so it does not wait; the hooks run later, see "arriving gradients" in comm/gradient_reduce.py.


@contextmanager
def stepping_on_arrival(group: FSDPParamGroup, arriving: ArrivingGradients, left_out: Container[int]) -> Iterator[None]:
    """Take the hooks off an offloaded group while torch reduces it; run them when the gradients are on the CPU.

    ``left_out`` has the ids of parameters whose hooks are postponed for another reason.
    """
    hooked: list[tuple[FSDPParam, Hooks, object]] = []
    for param in group.fsdp_params:
        hooks: Hooks | None = getattr(param.sharded_param, "_post_accumulate_grad_hooks", None)
        if hooks and id(param) not in left_out:
            hooked.append((param, hooks, _state_of_gradient(param)))
    with without_hooks([(param, hooks) for param, hooks, _ in hooked]):
        yield
    stepping = [(param, hooks) for param, hooks, before in hooked if _state_of_gradient(param) != before]
    if stepping:
        events = [param.grad_offload_event for param, _ in stepping if param.grad_offload_event is not None]
        # One stream copies all gradients of a group, so the last event comes after all copies.
        arriving.step_on_arrival(events[-1] if events else None, partial(_run, stepping))


def _state_of_gradient(param: FSDPParam) -> object:
    """Return a value that changes when torch sets a parameter's sharded gradient or adds to it."""
    gradient: Any = param.sharded_param.grad
    return None if gradient is None else (id(gradient), gradient._local_tensor._version)


def _run(stepping: list[tuple[FSDPParam, Hooks]]) -> None:
    for param, hooks in stepping:
        for hook in hooks.values():
            hook(param.sharded_param)


# ---- step gradients


# Small groups are not coalesced: torch casts and accumulates a group's gradient right after its hops. To send several
# groups in one hop, each must be copied into another flat buffer, and that costs the CPU more than the saved hops.
class GroupGradients(StepGradients):
    """Accumulates and reduces a parameter group's gradients: torch calls ``comm``, or reduces itself if it is None.

    ``post_backwards`` are torch's method for the group, without labels and with labels.
    """

    post_backwards: Sequence[Callable[..., None]]

    def __init__(self, group: FSDPParamGroup, weights: GroupWeights, unit: StrategyUnit) -> None:
        self._group, self._weights, self.reductions = group, weights, unit.reductions
        self._is_offloaded = isinstance(group.offload_policy, CPUOffloadPolicy)
        self.comm: StrategyReduceScatter | StrategyAllReduce | None = None
        self._all_reduce_hook: Callable[[Tensor], None] | None = None  # must stay set on the group
        if unit.reductions.all and unit.scopes.optimizer == "N":  # torch has nothing to scatter
            self.comm = self._all_reduce_hook = StrategyAllReduce(unit.reductions, group)
        elif unit.reductions.all:
            self.comm = StrategyReduceScatter(unit.reductions, group)
            self._all_reduce_hook = self.comm.finish if unit.reductions.have_two_hops else None
        self.use = ParameterUse(group, unit.reductions)
        self.layouts: dict[tuple[FSDPParam, ...], FlatLayout] = {}  # of the last few sets of parameters
        self._reduced = False

    @property
    def is_last_micro_batch(self) -> bool:
        """Return whether a backward completes the gradients of its step, according to FSDPModule's setters."""
        # Without HSDP torch has no all-reduce, so set_requires_all_reduce controls the deferred hops instead.
        return self._group.reduce_grads and (
            self._group.all_reduce_grads or self.reductions.current is None or not self.reductions.current.defers_hops
        )

    @property
    def takes_part(self) -> bool:
        current = self.reductions.current
        early = current is not None and current.communicates_early and not self.is_last_micro_batch
        return early and (self._weights.was_gathered or self._group.is_unsharded) and bool(self._reduced_params())

    def post_backward(self, *unused: object) -> None:
        """Reduce in torch's place; see [Note: What a micro-batch reduces] in gradient_reduce.py."""
        group = self._group
        if self._all_reduce_hook is not None and group._all_reduce_hook is not self._all_reduce_hook:
            self._replace_hook()
        if group._orig_dtype is None:  # at the first forward, all was frozen and torch set no reduce dtype
            group._init_mp_dtypes()
        # Until torch 2.12, a group of several modules gets a call for each at the end of a backward: ignore repeats.
        if self._reduced and group._training_state == TrainingState.IDLE:
            return
        self._reduced = True
        self._weights.was_gathered |= group.is_unsharded  # before it is resharded
        if self.reductions.current is None or self.is_last_micro_batch:
            self._reduce_step(*unused)
            return
        # reduce_grads may be True here: set_requires_all_reduce(False) alone can say that more micro-batches follow.
        # Even then, torch must keep the gradients unreduced until the group's turn, for :meth:`reduce_micro_batch`.
        reduce_grads, group.reduce_grads = group.reduce_grads, False
        try:
            self.post_backwards[profiler._is_profiler_enabled](*unused)
        finally:
            group.reduce_grads = reduce_grads
        self.micro_batch_ended()

    def _replace_hook(self) -> None:
        group = self._group
        if not isinstance(self.comm, StrategyReduceScatter):
            raise RuntimeError(
                f"set_all_reduce_hook has replaced the hook with which the strategy reduces the gradients of "
                f"{group._module_fqn or 'root'} under optimizer scope N; remove the call, or choose another optimizer "
                "scope"
            )
        self.comm.hook, group._all_reduce_hook = group._all_reduce_hook, self._all_reduce_hook

    # ---- before the last micro-batch

    @torch.no_grad()
    def reduce_micro_batch(self) -> None:
        assert self.reductions.current is not None
        self._drop_prefetch()
        group, params = self._group, self._reduced_params()
        gradients = [take_gradient(param) for param in params]
        used = {id(param) for param, gradient in zip(params, gradients, strict=True) if gradient is not None}
        self.use.used |= used
        self.use.took_part |= self._weights.was_gathered and bool(params)
        if not params or not (used or self.reductions.current.communicates_early):
            return
        flat = flatten_gradients(group, params, gradients)
        # Under gradient scope G the inter-node hop completes the sum. It runs in torch's all-reduce stream, so that the
        # next group's intra-node hop, in the reduce-scatter stream, does not wait for the slow network.
        intra, inter = group.comm_ctx.reduce_scatter_stream, group.comm_ctx.all_reduce_stream
        if isinstance(self.comm, StrategyAllReduce):
            intra = inter  # the stream in which the last micro-batch adds to these sums
        elif not self.reductions.current.has_two_hops:
            inter = intra
        intra.wait_stream(group.device_handle.current_stream())
        with group.device_handle.stream(intra):
            # ``flat`` was allocated in the backward's stream, which must not reuse its memory before this one reads it.
            finish = self.reductions.current.accumulate(keep_until_read(flat), self._layout_of(params))
        if inter is not intra:
            inter.wait_stream(intra)
        with group.device_handle.stream(inter):
            finish()

    def _drop_prefetch(self) -> None:
        # Only a complete first gather gives parameters the unsharded tensors that hold gradients: complete it if begun.
        group = self._group
        if group._all_gather_result is not None and not all(hasattr(p, "_unsharded_param") for p in group.fsdp_params):
            group.wait_for_unshard()
            group._to_sharded()

    # ---- the last micro-batch

    def _reduce_step(self, *unused: object) -> None:
        use, params = self.use, self._reduced_params()
        use.reduced, reduced = params, _with_gradient(params)
        takes_unused = getattr(self._group, "reduce_scatter_unused_params", False)  # from torch 2.13 on
        # If torch reduces unused parameters, all ranks reduce, even a rank without gradients.
        reduces = use.took_part or bool(reduced) or bool(params and takes_unused)
        current = self.reductions.current
        use.has_errors = current is not None and current.errors is not None
        # The error state has the layout of the whole group's gradient, so each parameter must get a gradient.
        fills = current is not None and (use.took_part or (reduces and use.has_errors))
        if fills:
            use.fill_missing(params)
        if takes_unused:
            reduced = [param for param in params if param._unsharded_param.requires_grad or has_gradient(param)]
        elif fills:
            reduced = _with_gradient(params)
        if self.comm is not None:
            self.comm.layout, self.comm.idle = self._layout_of(reduced), use.idle() if use.has_errors else ()
        if reduces:
            self.watch.synchronized.append(self)
        with (
            # Postpone the hooks: an optimizer must not step a parameter that no rank has used.
            without_hooks([(param, hooks) for param, _, hooks in use.unused.values()]) if use.unused else nullcontext(),
            stepping_on_arrival(self._group, self.watch.arriving, use.unused) if self._is_offloaded else nullcontext(),
        ):
            self.post_backwards[profiler._is_profiler_enabled](*unused)

    def _reduced_params(self) -> list[FSDPParam]:
        """Return the parameters whose gradients a micro-batch reduces, in torch's order; the same on all ranks.

        They require a gradient, or have one from an earlier micro-batch and may be frozen now.
        """
        params = self._group.fsdp_params
        if (order := getattr(self._group, "_reduce_scatter_param_indices", None)) is not None:  # from torch 2.14 on
            params = [params[index] for index in order]
        unsharded = [param for param in params if hasattr(param, "_unsharded_param")]
        # The condition of requires_gradient() in _torch_weights.py, without a call for each parameter.
        reduced = [
            param
            for param in unsharded
            if param.sharded_param.requires_grad or param._unsharded_param.requires_grad or has_gradient(param)
        ]
        if self.reductions.current is None or len(reduced) == len(unsharded):
            return reduced
        accumulated, others = self.reductions.current.accumulated.names, set(reduced)
        return [param for param in unsharded if param in others or param._param_fqn in accumulated]

    def _layout_of(self, params: Sequence[FSDPParam]) -> FlatLayout:
        key = tuple(params)
        layout = self.layouts.get(key)
        if layout is None:
            group = self._group
            order = getattr(group, "_reduce_scatter_param_indices", None) or range(len(group.fsdp_params))
            places = {id(group.fsdp_params[index]): place for place, index in enumerate(order)}
            made = layout_of(group, params, [places[id(param)] for param in params])
            layout = keep_recent(self.layouts, key, made)
        return layout

    # ---- the end of a backward or of a step

    def end_backward(self, synchronized: bool) -> None:
        self._reduced = False
        # A group that keeps its weights needs no gather to use them, so it counts as gathered in every micro-batch.
        self._weights.was_gathered = self._weights.is_kept
        if synchronized:
            self.use = ParameterUse(self._group, self.reductions)

    def drop(self) -> None:
        """Drop torch's unsharded gradients, and forget which parameters were used; do nothing during a backward."""
        if torch._C._current_graph_task_id() != -1:
            return  # an optimizer in the backward has cleared only the gradients of its own step
        self.use.used = set()
        for param in self._group.fsdp_params:
            if hasattr(param, "_unsharded_param") and has_gradient(param):
                while take_gradient(param) is not None:  # until torch 2.14, it may have a new and an accumulated one
                    pass

    def reset(self) -> None:
        """Drop the gradients of the step's micro-batches after an exception."""
        if self.reductions.current is not None:
            self.reductions.current.accumulated.drop()
        self.drop()  # only from 2.15 on, torch itself drops unsharded gradients
        self.end_backward(synchronized=True)


def _with_gradient(params: Sequence[FSDPParam]) -> list[FSDPParam]:
    """Return the parameters that have a gradient, as :func:`has_gradient` does, without a call for each."""
    return [p for p in params if p._unsharded_param.grad is not None or p.unsharded_accumulated_grad is not None]
