"""Private names of torch's fully_shard: the end of a backward, at which a step's gradients are complete."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from fsdp_zpp.collectives.agreement import agree_on_use
from fsdp_zpp.collectives.arriving_gradients import ArrivingGradients
from fsdp_zpp.collectives.reduction_order import ReductionOrder

from ._torch import groups_of, state_of
from ._torch_group import StrategyGroup
from ._torch_step_gradients import StepGradients
from ._torch_transforms import without_dynamo


class BackwardWatch:
    """Knows the groups of a model, and who hears of the end of its backwards.

    Args:
        root: The model, initialized lazily, after which it has the same groups for good.
        on_backward_end: Called at the end of every backward with whether it synchronizes gradients.

    Attributes:
        groups: The groups of strategies.
        others: The groups that torch alone manages.
        on_backward_end: As given.
        order: The order in which groups reduce on all ranks.
        arriving: The optimizers in the backward that wait for gradients.
    """

    def __init__(self, root: nn.Module, on_backward_end: Callable[[bool], None]) -> None:
        # Until torch 2.12, the state of modules that were passed as a list is there once for each of them.
        states = dict.fromkeys(state_of(root)._state_ctx.all_states)
        groups = [group for state in states for group in groups_of(state)]
        self.groups = [group for group in groups if isinstance(group, StrategyGroup)]
        self.others = [group for group in groups if not isinstance(group, StrategyGroup)]
        self.on_backward_end = on_backward_end
        self.arriving = ArrivingGradients()
        self.restart_order()

    def restart_order(self) -> None:
        """Start with the order of the model, before the first backward or after an exception."""
        self.order: ReductionOrder[StepGradients] = ReductionOrder(group.gradients for group in self.groups)
        for group in self.groups:
            group.gradients.order, group.gradients.arriving = self.order, self.arriving


class WatchedState(FSDPState):
    """A module's state that tells of the end of backwards.

    Attributes:
        watch: Of the model; the same for all of its states.
    """

    watch: BackwardWatch

    _pre_backward = without_dynamo(FSDPState._pre_backward)

    def _root_post_backward_final_callback(self) -> None:
        last = [group.gradients.is_last_micro_batch for group in self.watch.groups]
        # From torch 2.15 on, a user may end the step by calling finalize_backward instead.
        ends_step = not getattr(self._state_ctx, "manual_backward_finalization_active", None)
        synchronized = ends_step and (any(last) or any(group.reduce_grads for group in self.watch.others))
        # Before torch's own callback: until then no group is idle, so nothing that a user told FSDP to keep
        # unsharded after the backward is dropped.
        self.watch.on_backward_end(synchronized)
        super()._root_post_backward_final_callback()
        if self.watch.arriving.waiting:
            self.watch.arriving.step_all()
        self._end_backward(last, synchronized)

    def finalize_backward(self, **arguments: object) -> None:
        """End a step at a user's request; from torch 2.15 on."""
        parent: Any = super()
        parent.finalize_backward(**arguments)
        watch = self.watch
        watch.arriving.step_all()
        last = [group.gradients.is_last_micro_batch for group in watch.groups]
        synchronized = any(last) or any(group.reduce_grads for group in watch.others)
        if synchronized:
            with ExitStack() as stack:
                # Not true, for they are idle by now: only inside of this ``with``, so that drop_unsharded() spares what
                # the user keeps unsharded, as it does at the end of a backward.
                for group in (*watch.groups, *watch.others):
                    stack.enter_context(group.use_training_state(TrainingState.POST_BACKWARD))
                watch.on_backward_end(True)
        self._end_backward(last, synchronized)

    def _end_backward(self, last: list[bool], synchronized: bool) -> None:
        """End a backward of the model.

        Args:
            last: For each group of a strategy, whether this was its last micro-batch.
            synchronized: Whether gradients are left for a step.
        """
        watch = self.watch
        if all(last):
            watch.order.restart()
        else:
            for gradients in watch.order.remaining():
                gradients.reduce_micro_batch()
        if synchronized:
            shared = [each for group in watch.groups if (each := group.gradients).use.took_part or each.use.has_errors]
            if shared:
                _drop_unused(shared)
        for group, is_last in zip(watch.groups, last, strict=True):
            group.gradients.end_backward(synchronized and is_last)
            guard = group.weights.staleness_guard
            if synchronized and guard is not None and guard.stale:  # a frozen group's weights have not changed
                group.drop_unsharded()

    def _reset_iter_state(self) -> None:
        """Recover from an exception."""
        parent: Any = super()
        parent._reset_iter_state()  # from torch 2.13 on
        for group in self.watch.groups:
            group.weights.drop_kept()
            group.gradients.reset()
        self.watch.arriving.drop()
        # Ranks may have failed at different points, so each forgets the order in which it reduced this time.
        self.watch.restart_order()


def _drop_unused(gradients: list[StepGradients]) -> None:
    """Remove gradients of parameters that no rank has used in the step that ends. Collective.

    Args:
        gradients: The gradients of groups whose ranks may have reduced more parameters than they have used.
    """
    asked = [(each.use, each.unit.reductions.mesh, used) for each in gradients if (used := each.use.in_step())]
    for use, used_by_any in agree_on_use(asked):
        use.drop_unused(used_by_any)


def watch_backwards(root: nn.Module, on_backward_end: Callable[[bool], None]) -> None:
    """Watch the backwards below ``root``, and let its groups reduce in one order on all ranks.

    Args:
        root: The root, initialized lazily.
        on_backward_end: Called at the end of every backward with whether it synchronizes gradients.
    """
    watch = BackwardWatch(root, on_backward_end)
    # The backward ends in the state whose output it reaches first, which may be any, torch's own ones included.
    for state in state_of(root)._state_ctx.all_states:
        watched: Any = state
        watched.__class__ = WatchedState
        watched.watch = watch
