"""Private names of torch's backwards: when the units of a model reduce, in which streams, and what waits for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_zpp.collectives.agreement import agree_on_use
from fsdp_zpp.collectives.arriving_gradients import ArrivingGradients
from fsdp_zpp.collectives.reduction_order import ReductionOrder

from ._torch import FlatParamHandle, HandleTrainingState, runtime_utils as runtime
from ._torch_handle import StrategyHandle
from ._torch_offload import step_on_arrival
from ._torch_step_gradients import StepGradients

_WATCH = "_fsdp_zpp_backward_watch"
_end_backward = runtime._post_backward_final_callback


class BackwardWatch:
    """Knows the units of a model that strategies gather, and reports the end of each of its backwards.

    Args:
        root: The model.
        on_backward_end: Called at the end of every backward with whether it synchronizes gradients.

    Attributes:
        on_backward_end: As given.
        arriving: The optimizers in the backward that wait for gradients.
    """

    def __init__(self, root: nn.Module, on_backward_end: Callable[[bool], None]) -> None:
        self.on_backward_end = on_backward_end
        self._instances = FullyShardedDataParallel.fsdp_modules(root)
        self._handles = [each._handle for each in self._instances if isinstance(each._handle, StrategyHandle)]
        self._order: ReductionOrder[StepGradients] = ReductionOrder(handle.gradients for handle in self._handles)
        self.arriving = ArrivingGradients()
        for handle in self._handles:
            handle.gradients.order, handle.gradients.arriving = self._order, self.arriving
        if any(handle._offload_params for handle in self._handles):
            step_on_arrival()  # only now, or the backward of each unit would take one call more

    def reduce_in_two_streams(self) -> None:
        """Give every other unit a second stream to reduce in; see the top of two_hop_reduce.py."""
        two_hops = [each.gradients for each in self._handles if each.gradients.unit.reductions.have_two_hops]
        if len(two_hops) > 1:
            second = two_hops[0].instance._device_handle.Stream()
            for gradients in two_hops[1::2]:
                gradients.instance._post_backward_stream = second

    def begin_forward(self, root: FullyShardedDataParallel, *unused: object) -> None:
        """End a backward that an exception has ended, before a forward of the model.

        torch would take the forward for a recomputation in that backward, and so run no hooks at the end of the next.
        Gradients stay until they are cleared, as torch leaves them.
        """
        began = getattr(root, "_post_backward_callback_queued", False)  # there is none until a forward with gradients
        if not began or torch._C._current_graph_task_id() != -1:
            return
        self.arriving.drop()
        self._order.abandon()
        instances: list[Any] = self._instances
        synchronized = [instance._sync_gradients for instance in instances]
        for instance in instances:
            instance._sync_gradients = False  # for which torch finishes no gradients
        try:
            _end_backward(root, root)
        finally:
            for instance, each in zip(instances, synchronized, strict=True):
                instance._sync_gradients = each
        for handle in self._handles:
            handle.gradients.end_backward(synchronized=True)

    def reduce_rest(self, root: FullyShardedDataParallel) -> None:
        """Reduce what is left at the end of a backward, before FSDP finishes gradients."""
        if root._sync_gradients:
            used_elsewhere = self._drop_unused()
            for handle in self._handles:
                gradients = handle.gradients
                if gradients.took_part or gradients.is_unreduced:
                    gradients.reduce_accumulated(handle in used_elsewhere)
            # torch has the current stream wait for the root's stream alone.
            current = root._device_handle.current_stream()
            for stream in {instance._post_backward_stream for instance in self._instances}:
                current.wait_stream(stream)
            return
        for gradients in self._order.remaining():
            gradients.reduce_micro_batch()
        for handle in self._handles:
            handle.gradients.took_part |= handle.gradients.is_of_micro_batch
            # torch does so where it reduces. Else it would clear what a parameter has got that had no gradient
            # before the forward: one that was thawed, or cleared alone, since the last reduction.
            if not handle.uses_sharded_strategy and handle._training_state == HandleTrainingState.BACKWARD_POST:
                handle._reset_is_grad_none()

    def _drop_unused(self) -> set[StrategyHandle]:
        """Drop the gradients of units that micro-batches have gathered but no rank has used. Collective.

        Returns:
            The units that other ranks have used in the step, and this one has not.
        """
        used_elsewhere: set[StrategyHandle] = set()
        gathered = [handle for handle in self._handles if handle.gradients.took_part]
        if not gathered:
            return used_elsewhere
        asked = [(handle, handle.gradients.unit.reductions.mesh, [handle.gradients.is_used]) for handle in gathered]
        for handle, used_by_any in agree_on_use(asked):
            if handle.gradients.is_used:
                continue
            if all(used_by_any()):
                used_elsewhere.add(handle)
            else:
                handle.gradients.drop_unused()
        return used_elsewhere

    def end(self, synchronized: bool) -> None:
        """End a backward, after FSDP has ended it."""
        for handle in self._handles:
            # FSDP takes an unsharded flat parameter for resharded, and leaves the parameters of frozen ones as views.
            # Units that this micro-batch has not run may have replaced parameters that no forward has copied yet.
            if not handle.uses_sharded_strategy and handle.views.are_shown:
                handle.reshard(False)
            handle.gradients.end_backward(synchronized)
        if synchronized:
            self._order.restart()
        self.on_backward_end(synchronized)


def watch_backwards(root: nn.Module, on_backward_end: Callable[[bool], None]) -> BackwardWatch:
    """Watch the backwards of a model, and fix the order in which its units reduce.

    Args:
        root: The model.
        on_backward_end: Called at the end of every backward with whether it synchronizes gradients.
    """
    watch = BackwardWatch(root, on_backward_end)
    setattr(root, _WATCH, watch)
    root.register_forward_pre_hook(torch.compiler.disable(watch.begin_forward), prepend=True)
    return watch


def hear_of_backwards() -> None:
    """Let the watch of a model hear of the end of every backward."""
    original = runtime._post_backward_final_callback

    @functools.wraps(original)
    def post_backward_final_callback(state: FullyShardedDataParallel, module: nn.Module) -> None:
        watch: BackwardWatch | None = vars(module).get(_WATCH)
        if watch is None:
            original(state, module)
            return
        watch.reduce_rest(state)
        if watch.arriving.waiting:
            watch.arriving.step_all()
        original(state, module)
        watch.end(state._sync_gradients)

    runtime._post_backward_final_callback = post_backward_final_callback


def reduce_in_every_backward() -> None:
    """Let handles of strategies reduce in every backward, inside of no_sync too, as far as their scopes say.

    See [Note: What a micro-batch reduces] in gradient_reduce.py and, for their turns, [Note: The order of reductions]
    in reduction_order.py.
    """
    hook = runtime._post_backward_hook

    @functools.wraps(hook)
    def post_backward_hook(state: FullyShardedDataParallel, handle: FlatParamHandle, *args: object) -> None:
        if not isinstance(handle, StrategyHandle):
            hook(state, handle, *args)
            return
        gradients, has_gradient = handle.gradients, handle.flat_param.grad is not None
        gradients.is_used |= has_gradient
        if not handle.uses_sharded_strategy:
            # FSDP accumulates in the gradient itself: nothing reduces it if the last micro-batch leaves the unit out.
            gradients.is_unreduced = not state._sync_gradients
        if state._sync_gradients:
            if has_gradient:
                gradients.order.synchronized.append(gradients)
            hook(state, handle, *args)
            return
        hook(state, handle, *args)  # FSDP leaves the gradient unsharded
        if not gradients.reduces_early or handle.flat_param.grad is None:
            return
        assert gradients.unit.reductions.current is not None
        if not gradients.unit.reductions.current.communicates_early:
            gradients.reduce_micro_batch()
            return
        for due in gradients.order.finished(gradients):
            due.reduce_micro_batch()

    runtime._post_backward_hook = post_backward_hook
