"""The reduction of a parameter group's gradients: a subclass of fully_shard's group that uses its private names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from fsdp_zpp.collectives.hops import PendingReduction
from fsdp_zpp.collectives.reduction_order import ReductionOrder
from fsdp_zpp.collectives.streams import keep_until_read

from ._torch_gradients import GradientGroup, flatten_gradients, has_gradient, take_gradient, with_gradient
from ._torch_transforms import without_dynamo

_torchs_post_backward = without_dynamo(FSDPParamGroup.post_backward)


class FinishReduction:
    """Finishes a reduction in torch's all-reduce hook, so that the inter-node hop runs in the stream of the all-reduce.

    Attributes:
        pending: What has been started and is to be finished, if anything.
        then: A user's hook, which runs afterwards.
    """

    def __init__(self) -> None:
        self.pending: PendingReduction | None = None
        self.then: Callable[[Tensor], None] | None = None

    def __call__(self, gradient: Tensor) -> None:
        """Complete ``gradient`` in place."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.finish()
        # torch frees the gradient in the stream of the reduce-scatter, which is not the one that reads it now.
        keep_until_read(gradient)
        if self.then is not None:
            self.then(gradient)


class ReducingGroup(GradientGroup):
    """A parameter group whose gradients a strategy reduces.

    Ranks may use different parameters in a micro-batch, but must reduce the same ones. So a micro-batch that is not the
    last of its step reduces all parameters of a group, and so does the last one of that step. Parameters that no rank
    has used get no gradient in the end, as with torch's own reduction (:meth:`drop_unused_gradients`).

    Small groups, too, are reduced one by one. torch casts, accumulates and hands out a gradient right after its hops.
    To send those of several groups at once, each would have to be copied into a flat buffer once more, which takes the
    CPU longer than the hop that it saves.

    Attributes:
        order: The order in which groups reduce; set before the first forward.
        own_all_reduce: The function that must be the all-reduce hook; None if users may set one.
        completion: The all-reduce hook, which runs a user's; None if reductions are finished where they start.
    """

    order: ReductionOrder[ReducingGroup]
    own_all_reduce: Callable[[Tensor], None] | None
    completion: FinishReduction | None
    _was_gathered: bool
    _reduced: bool
    _took_part: bool
    _used: set[int]
    _unused: dict[int, tuple[FSDPParam, Any, Any]]
    _step: list[FSDPParam]

    def adopt(self) -> None:
        """Initialize the attributes of this class; torch reduces until ``reduction`` is set."""
        super().adopt()
        self.own_all_reduce, self.completion = None, None
        self._was_gathered, self._reduced, self._took_part = False, False, False
        self._used, self._unused, self._step = set(), {}, []

    @property
    def is_last_micro_batch(self) -> bool:
        """Whether a backward completes the gradients of its step, as FSDPModule's setters say."""
        defers_hops = self.reduction is not None and self.reduction.defers_hops
        # torch has no all-reduce without replicas of its own, so set_requires_all_reduce governs our deferred hops.
        return self.reduce_grads and (self.all_reduce_grads or not defers_hops)

    @property
    def takes_part(self) -> bool:
        """Whether ranks have gathered the group for this micro-batch, and it has hops to make before the last one."""
        early = self.reduction is not None and self.reduction.communicates_early and not self.is_last_micro_batch
        return early and (self._was_gathered or self.is_unsharded) and bool(self.reduced_params())

    def post_backward(self, *unused: Any) -> None:
        """See [Note: What a micro-batch reduces] in gradient_reduce.py."""
        self._check_hooks()
        if self._orig_dtype is None:  # all was frozen at the first forward, where torch looks for what it reduces in
            self._init_mp_dtypes()
        # Until torch 2.12, the end of a backward comes once for each of the modules that were passed as a list.
        if self._reduced and self._training_state == TrainingState.IDLE:
            return
        self._reduced = True
        self._was_gathered |= self.is_unsharded  # before it is resharded
        if self.reduction is None or self.is_last_micro_batch:
            self._reduce_step(*unused)
            return
        # reduce_grads may be True here: set_requires_all_reduce(False) alone can say that more micro-batches follow.
        # Even then, torch must keep the gradients unreduced until the group's turn.
        reduce_grads, self.reduce_grads = self.reduce_grads, False
        try:
            _torchs_post_backward(self, *unused)
        finally:
            self.reduce_grads = reduce_grads
        if not self.reduction.communicates_early:
            self.reduce_micro_batch()
            return
        for group in self.order.finished(self):
            group.reduce_micro_batch()

    def _check_hooks(self) -> None:
        if self.own_all_reduce is not None and self._all_reduce_hook is not self.own_all_reduce:
            raise RuntimeError(
                f"set_all_reduce_hook has replaced the hook with which the strategy reduces the gradients of "
                f"{self._module_fqn or 'root'} under optimizer scope N; remove the call, or choose another optimizer "
                "scope"
            )
        if self.completion is not None and self._all_reduce_hook is not self.completion:
            self.completion.then, self._all_reduce_hook = self._all_reduce_hook, self.completion

    # ---- before the last micro-batch

    @torch.no_grad()
    def reduce_micro_batch(self) -> None:
        """Reduce the gradients that torch has kept, and zeros for missing ones, as far as the gradient scope says."""
        assert self.reduction is not None
        self._drop_prefetch()
        params = self.reduced_params()
        gradients = [take_gradient(param) for param in params]
        used = {id(param) for param, gradient in zip(params, gradients, strict=True) if gradient is not None}
        self._used |= used
        self._took_part |= self._was_gathered and bool(params)
        if not params or not (used or self.reduction.communicates_early):
            return
        flat = flatten_gradients(self, params, gradients)
        inside, between = self.comm_ctx.reduce_scatter_stream, self.comm_ctx.all_reduce_stream
        if self.own_all_reduce is not None:
            inside = between  # where the last micro-batch adds its sums to the accumulated ones
        inside.wait_stream(self.device_handle.current_stream())
        with self.device_handle.stream(inside):
            # It was allocated in the backward's stream.
            pending = self.reduction.accumulate(keep_until_read(flat), self.layout_of(params))
        # Under scope G the inter-node hop completes the sum. It runs in the stream of torch's all-reduce, so that the
        # intra-node hop of the next group, in the stream of its reduce-scatter, need not wait for the slow network.
        if self.completion is None:
            between = inside
        elif between is not inside:
            between.wait_stream(inside)
        with self.device_handle.stream(between):
            pending.finish()

    def _drop_prefetch(self) -> None:
        """Finish a first gather that was prefetched and not used.

        Until a group's first gather is complete, its parameters have no unsharded tensor that could get a gradient.
        """
        if self._all_gather_result is not None and not all(hasattr(p, "_unsharded_param") for p in self.fsdp_params):
            self.wait_for_unshard()
            self._to_sharded()

    # ---- the last micro-batch

    def _reduce_step(self, *unused: Any) -> None:
        """Reduce in the last micro-batch of a step, by torch's own post_backward."""
        params = self._step = self.reduced_params()
        any_gradient = bool(with_gradient(params))
        # Errors that are fed back have the layout of the whole group's gradient, so that must not change.
        whole = any_gradient and self.reduction is not None and self.reduction.errors is not None
        if self.reduction is not None and (self._took_part or whole):
            self._fill_missing(params)
        # Where torch reduces what is not used, all ranks do, whatever this one has.
        if self._took_part or any_gradient or (params and self.reduces_unused):
            self.order.synchronized.append(self)
        # Optimizers in the backward must not step on gradients that perhaps no rank has used.
        for param, _, _ in self._unused.values():
            param.sharded_param._post_accumulate_grad_hooks = None  # type: ignore[assignment]
        if self.reduction is not None:
            self.step_layout = self.layout_of(self.reduced_by_torch(params))
        try:
            _torchs_post_backward(self, *unused)
        finally:
            for param, _, hooks in self._unused.values():
                param.sharded_param._post_accumulate_grad_hooks = hooks

    def _fill_missing(self, params: list[FSDPParam]) -> None:
        """Add zero gradients where this micro-batch has none, but earlier ones or other ranks may have some."""
        for param in params:
            if has_gradient(param):
                self._used.add(id(param))
            else:
                dtype = getattr(param, "unsharded_grad_dtype", None) or param.unsharded_param.dtype
                param.unsharded_param.grad = torch.zeros_like(param.unsharded_param, dtype=dtype)
        # Until torch 2.14, accumulated gradients have another dtype, and torch reduces gradients of a single dtype.
        kept = any(param.unsharded_accumulated_grad is not None for param in params)
        if kept and hasattr(FSDPParam, "to_accumulated_grad_if_needed"):
            for param in params:
                param.accumulate_unsharded_grad_if_needed()  # or the next line replaces what is accumulated
                param.to_accumulated_grad_if_needed()
        for param in filter(self._goes_without, params):
            if id(param) in self._used:
                self._unused.pop(id(param), None)  # a module that runs twice comes here twice
            elif id(param) not in self._unused:
                sharded = param.sharded_param
                self._unused[id(param)] = param, sharded.grad, getattr(sharded, "_post_accumulate_grad_hooks", None)

    def _goes_without(self, param: FSDPParam) -> bool:
        """Whether a parameter gets no gradient if no rank has used it, so that ranks exchange whether they have.

        Not with error feedback, whose errors must be sent on, nor where set_reduce_scatter_unused_params asks for
        zeros, as it does for what requires a gradient by now.
        """
        assert self.reduction is not None
        return self.reduction.errors is None and not (self.reduces_unused and param._unsharded_param.requires_grad)

    def _set_separate_reduce_scatter_group(self, enable: bool, *groups: Any) -> None:
        if enable and self.reduction is not None:
            raise NotImplementedError(
                f"set_separate_reduce_scatter_group(True) applies to torch's own reduction, but a Strategy reduces the "
                f"gradients of {self._module_fqn or 'root'} over process groups of its own; remove the call"
            )
        torchs: Any = super()
        torchs._set_separate_reduce_scatter_group(enable, *groups)  # from torch 2.13 on

    # ---- gradients that are dropped

    def drop_gradients(self) -> None:
        """Outside of a backward, drop the gradients that torch has kept, and forget which parameters they were of."""
        if torch._C._current_graph_task_id() != -1:
            return  # an optimizer in the backward has cleared what it has stepped with
        self._used = set()
        for param in self.fsdp_params:
            if hasattr(param, "_unsharded_param") and has_gradient(param):
                while take_gradient(param) is not None:  # until torch 2.14, there may be two
                    pass

    # ---- after the backward

    def used_in_step(self) -> list[bool]:
        """For each parameter, whether this rank has used it in the step; empty if ranks need not agree on that."""
        if not self._took_part or not any(map(self._goes_without, self._step)):
            return []
        return [id(param) in self._used for param in self._step]

    def drop_unused_gradients(self, used_by_any: Callable[[], list[bool]]) -> None:
        """Remove gradients of parameters that no rank has used in the step; run the postponed hooks of the others."""
        if not self._unused:
            return
        by_id = dict(zip(map(id, self._step), used_by_any(), strict=True))
        for param, before, hooks in self._unused.values():
            if not by_id[id(param)]:
                param.sharded_param.grad = before
                continue
            for hook in (hooks or {}).values():
                hook(param.sharded_param)

    def end_backward(self, synchronized: bool) -> None:
        """The backward is over."""
        self._was_gathered = self._reduced = False
        if synchronized:
            self._took_part, self._used, self._unused = False, set(), {}

    def reset_step(self) -> None:
        """An exception has ended a step: drop the gradients of its micro-batches."""
        if self.reduction is not None:
            self.reduction.accumulated.drop()
        ReducingGroup.drop_gradients(self)  # torch itself drops unsharded ones from 2.15 on only
        self.end_backward(synchronized=True)
