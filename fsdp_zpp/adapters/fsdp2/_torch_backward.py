"""Private names of torch's fully_shard: the end of a backward, at which a step's gradients are complete."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from fsdp_zpp.collectives.reduction_order import ReductionOrder

from ._torch import FSDPParamGroup, FSDPState, StrategyGroup, groups_of, state_of
from ._torch_reduction import ReducingGroup
from ._torch_transforms import without_dynamo


class WatchedState(FSDPState):
    """A module's state that tells of the end of backwards."""

    _backward_ended: Callable[[bool], None]
    _agree_on_use: Callable[[], None]

    _pre_backward = without_dynamo(FSDPState._pre_backward)

    def _root_post_backward_final_callback(self) -> None:
        # From torch 2.15 on, a user may end the step by calling finalize_backward instead.
        ends_step = not getattr(self._state_ctx, "manual_backward_finalization_active", None)
        synchronized = ends_step and self._synchronizes()
        # Before torch's own callback: until then no group is idle, so nothing that a user told FSDP to keep
        # unsharded after the backward is dropped.
        self._backward_ended(synchronized)
        super()._root_post_backward_final_callback()
        self._end_backward(synchronized)

    def finalize_backward(self, **arguments: Any) -> None:
        """Ends a step at a user's request; from torch 2.15 on."""
        torchs: Any = super()
        torchs.finalize_backward(**arguments)
        synchronized = self._synchronizes()
        if synchronized:
            with ExitStack() as stack:
                # Not true, for they are idle by now: only inside of this ``with``, so that drop_unsharded() spares what
                # the user keeps unsharded, as it does at the end of a backward.
                for group in self._groups():
                    stack.enter_context(group.use_training_state(TrainingState.POST_BACKWARD))
                self._backward_ended(True)
        self._end_backward(synchronized)

    def _reset_iter_state(self) -> None:
        torchs: Any = super()
        torchs._reset_iter_state()  # from torch 2.13 on
        ours = self._strategy_groups()
        # Ranks may have failed at different points, so each forgets the order in which it reduced this time.
        order: ReductionOrder[ReducingGroup] = ReductionOrder(ours)
        for group in ours:
            group.drop_kept()
            group.reset_step()
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
            guard = group.staleness_guard
            if synchronized and guard is not None and guard.stale:  # a frozen group's weights have not changed
                group.drop_unsharded()


def watch_backwards(root: nn.Module, backward_ended: Callable[[bool], None], agree_on_use: Callable[[], None]) -> None:
    """Watch the backwards below ``root``, and have its groups reduce in one order on all ranks.

    Args:
        root: The root.
        backward_ended: Called at the end of every backward with whether it synchronizes gradients.
        agree_on_use: Called at the end of one that does, when all of its reductions have been started.
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
        watched._backward_ended, watched._agree_on_use = backward_ended, agree_on_use
