"""Private names of torch's backwards: the gradient of a flat parameter over the micro-batches of a step."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_zpp.collectives.arriving_gradients import ArrivingGradients
from fsdp_zpp.collectives.flat_layout import FlatLayout
from fsdp_zpp.collectives.reduction_order import ReductionOrder
from fsdp_zpp.runtime.unit import StrategyUnit

from ._torch import (
    FlatParamHandle,
    HandleTrainingState,
    TrainingState,
    no_dispatch_record_stream,
    runtime_utils as runtime,
)
from ._torch_flat_layout import FlatParameterLayout


@dataclass(eq=False, repr=False)
class StepGradients:
    """Accumulates and reduces the gradient of a flat parameter over the micro-batches of a step.

    Args:
        instance: The instance of FSDP.
        handle: The flat parameter's handle.
        layout: Where its parameters lie.
        unit: Its unit.

    Attributes:
        order: The order in which the model's units reduce; set before the first forward.
        arriving: The model's optimizers in the backward that wait for gradients; likewise.
        was_gathered: Whether ranks have gathered the weights for the micro-batch.
        took_part: Whether ranks have gathered them in an earlier micro-batch of the step.
        is_used: Whether this rank has used the unit in the step.
        is_unreduced: Whether a unit that is not sharded has gradients that nothing has reduced.
        used: The places of the original parameters that this rank has used in the step, noted with error feedback.
    """

    instance: FullyShardedDataParallel
    handle: FlatParamHandle
    layout: FlatParameterLayout
    unit: StrategyUnit
    order: ReductionOrder[StepGradients] = field(init=False)
    arriving: ArrivingGradients = field(init=False)
    was_gathered: bool = False
    took_part: bool = False
    is_used: bool = False
    is_unreduced: bool = False
    used: set[int] = field(default_factory=set)

    @property
    def reduces_early(self) -> bool:
        """Tell whether micro-batches before the last one reduce, as far as the gradient scope says."""
        # Without shards, FSDP accumulates in the unsharded gradient, which is what the optimizer will see.
        return self.handle.uses_sharded_strategy and self.unit.reductions.current is not None

    @property
    def is_of_micro_batch(self) -> bool:
        """Tell whether ranks have gathered the weights for this micro-batch, used or not; the same on all of them."""
        is_gathered = self.was_gathered or (self.unit.keep_unsharded and not FlatParamHandle.needs_unshard(self.handle))
        return is_gathered and self.reduces_early and self.handle.flat_param.requires_grad

    @property
    def takes_part(self) -> bool:
        """Tell whether the unit is of this micro-batch, and has hops to make before the last one."""
        return (
            self.unit.reductions.current is not None
            and self.unit.reductions.current.communicates_early
            and self.is_of_micro_batch
        )

    @property
    def _dtype(self) -> torch.dtype:
        """Return the dtype in which gradients are reduced."""
        handle = self.handle
        dtype = handle._orig_param_dtype if handle._force_full_precision else handle._reduce_dtype
        assert dtype is not None
        return dtype

    # ---- which parameters are used

    def watch_use(self) -> None:
        """In the next backward, note which of the views that modules show now get a gradient.

        The gradient of a flat parameter does not tell: it has zeros for a parameter that was not used.
        """
        flat_param = self.handle.flat_param
        name, module, _ = flat_param._param_infos[0]
        node = getattr(module, name).grad_fn
        if node is None:  # frozen
            return
        # All views come from one split of the flat parameter, the last node before its gradient accumulates.
        while (before := node.next_functions[0][0]).next_functions:
            node = before
        # The views keep the node, and this object keeps the views, so the node must not keep this object.
        node.register_prehook(functools.partial(_note_use, self.used, flat_param._is_padding_mask))

    # ---- before the last micro-batch

    def reduce_micro_batch(self) -> None:
        """Reduce the gradient that FSDP has left unsharded, or zeros if there is none, as far as its scope says."""
        assert self.unit.reductions.current is not None
        instance, flat_param = self.instance, self.handle.flat_param
        self._keep_reduced_gradient()
        unsharded, flat_param.grad = flat_param.grad, None
        # FSDP would take accumulated gradients for those that a user has set, and copy them without waiting for the
        # reduction; and optimizers in the backward must not see them.
        for param in (*(flat_param._params or ()), *(flat_param._shared_params or ())):
            param.grad = None
        # Needed in either case: at the end of the step torch passes the gradient on only if this is set, and clears it.
        self.took_part = True
        self._set_post_backward_called(True)
        stream = instance._post_backward_stream
        stream.wait_stream(instance._device_handle.current_stream())
        with instance._device_handle.stream(stream):
            if unsharded is None:
                gradient = self._zeros()
            else:
                no_dispatch_record_stream(unsharded.data, stream)
                gradient = unsharded.data.to(self._dtype)
            gradient, _ = runtime._get_reduce_scatter_tensors(instance, gradient)
            self.unit.reductions.current.accumulate(gradient, self._layout_in(gradient)).finish()

    def _keep_reduced_gradient(self) -> None:
        """Let FSDP add to the gradient of an earlier backward of the step, as before each backward of the unit.

        An idle unit has had no backward in this micro-batch.
        """
        if self.handle._training_state == HandleTrainingState.IDLE:
            self.handle.prepare_gradient_for_backward()

    def _zeros(self) -> Tensor:
        """Return the unsharded gradient of a unit that got none."""
        handle = self.handle
        return torch.zeros(handle.flat_param._unpadded_unsharded_size, dtype=self._dtype, device=handle.device)

    # ---- the last micro-batch

    def reduce(self, gradient: Tensor, out: Tensor | None = None) -> None:
        """Write this rank's part of the mean of ``gradient``, and of what was accumulated, to ``out``.

        FSDP calls this as a communication hook. For a unit that it does not shard it passes no ``out``: the mean then
        replaces ``gradient``.
        """
        if self.unit.reductions.current is None:
            assert out is None, "one rank is not sharded over"
            return  # a node of one rank that trains on its own
        out_or_gradient = gradient if out is None else out
        layout, idle = self._layout_in(gradient), []
        if self.unit.reductions.current.errors is not None:
            idle = [piece.name for piece in layout.pieces if piece.order not in self.used]
        self.unit.reductions.current.start(gradient, out_or_gradient, 1.0, layout, idle=idle).finish()
        if out is None:
            # FSDP adds the next gradient to this tensor, and all is encoded together. What overflows takes its whole
            # blocks along, of which zero_grad(set_to_none=False) clears only the gradients that parameters show.
            for start, stop in self.layout.trained(gradient.shape[0]).gaps:
                gradient[start:stop].zero_()

    def _layout_in(self, gradient: Tensor) -> FlatLayout:
        # Only errors are to know which parameters are frozen.
        knows_frozen = self.unit.reductions.current is not None and self.unit.reductions.current.errors is not None
        return (self.layout.trained if knows_frozen else self.layout.whole)(gradient.shape[0])

    def reduce_accumulated(self, used_elsewhere: bool) -> None:
        """Reduce gradients of earlier micro-batches, if the unit took no part in the last one.

        Args:
            used_elsewhere: Whether other ranks have used it in the step, and this one has not.
        """
        if self.unit.reductions.current is None:
            return
        instance, handle = self.instance, self.handle
        is_unreduced, self.is_unreduced = self.is_unreduced and handle.flat_param.grad is not None, False
        has_accumulated = self.unit.reductions.current.accumulated.sums is not None or used_elsewhere
        if not is_unreduced and not has_accumulated:
            return
        self._enter_post_backward()
        instance._post_backward_stream.wait_stream(instance._device_handle.current_stream())
        with instance._device_handle.stream(instance._post_backward_stream):
            if is_unreduced:
                runtime._reduce_grad_no_shard(instance, handle)
            if has_accumulated:
                gradient, shard = runtime._get_reduce_scatter_tensors(instance, self._zeros())
                self.reduce(gradient, shard)
                shard = runtime._accumulate_sharded_grad(instance, handle, shard)
                runtime._post_reduce_grad_callback(instance, handle, shard)

    def _enter_post_backward(self) -> None:
        """Put a unit that the micro-batch did not use into the state in which FSDP reduces."""
        # A unit that was run but got no gradient may still be unsharded.
        runtime._catch_all_reshard(self.instance)
        self._keep_reduced_gradient()
        # Not true, for it had no backward: until FSDP's final callback, which resets all three.
        self.instance.training_state = TrainingState.FORWARD_BACKWARD
        self.handle._training_state = HandleTrainingState.BACKWARD_POST
        self._set_post_backward_called(True)

    def _set_post_backward_called(self, called: bool) -> None:
        self.handle.flat_param._post_backward_called = called  # type: ignore[attr-defined]  # nor does torch declare it

    def drop_unused(self) -> None:
        """Drop the gradient of a unit that micro-batches have gathered but no rank has used in the step."""
        if self.unit.reductions.current is None:
            return
        self.unit.reductions.current.accumulated.drop()
        handle, flat_param = self.handle, self.handle.flat_param
        # A gradient of an earlier backward of the step stays; FSDP would drop it, for want of another one.
        has_gradient = hasattr(flat_param, "_saved_grad_shard")
        self._set_post_backward_called(has_gradient)
        if has_gradient and handle._use_orig_params:
            runtime._catch_all_reshard(self.instance)
            handle._use_sharded_grad_views()

    # ---- the end of a backward

    def end_backward(self, synchronized: bool) -> None:
        """Handle the end of a backward, which may have completed the gradients of a step."""
        self.was_gathered = False
        if synchronized:
            self.took_part = self.is_used = False
            self.used.clear()


def _note_use(used: set[int], is_padding: Sequence[bool], gradients: tuple[Tensor | None, ...]) -> None:
    """Note which parts of a flat parameter have gradients; those that are padding are not counted."""
    of_parameters = compress(gradients, map(operator.not_, is_padding))
    used.update(place for place, gradient in enumerate(of_parameters) if gradient is not None)


def shard_gradients_in_constant_time() -> None:
    """Compute the size of a gradient's shard, where torch cuts the gradient into a view for every rank.

    On a thousand ranks, torch makes a thousand views and reads one of them, which takes longer than all the rest of a
    unit's backward.
    """
    original = runtime._get_reduce_scatter_tensors

    @functools.wraps(original)
    def get_reduce_scatter_tensors(state: FullyShardedDataParallel, unsharded_grad: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(state._comm_hook_state, StepGradients):
            return original(state, unsharded_grad)
        numel = unsharded_grad.numel()
        of_shard = -(-numel // state.world_size)
        padding = of_shard * state.world_size - numel
        padded = F.pad(unsharded_grad, [0, padding]) if padding else unsharded_grad
        return padded, unsharded_grad.new_empty(of_shard)

    runtime._get_reduce_scatter_tensors = get_reduce_scatter_tensors
