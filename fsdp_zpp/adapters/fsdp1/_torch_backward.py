"""Private names of torch's backwards: when gradients are reduced, in which streams, and what waits for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_zpp.collectives.agreement import agree_on_use
from fsdp_zpp.collectives.reduction_order import ReductionOrder

from ._torch import FlatParamHandle, HandleTrainingState, TrainingState, no_dispatch_record_stream, runtime_utils
from ._torch_handle import StrategyHandle

_ORDER = "_fsdp_zpp_reduction_order"


def after_backward(callback: Callable[[nn.Module, bool], None]) -> None:
    """Have ``callback(root, synchronized)`` run at the end of every backward, ``synchronized`` if not in no_sync."""
    original = runtime_utils._post_backward_final_callback

    @functools.wraps(original)
    def post_backward_final_callback(state: Any, module: nn.Module) -> None:
        handles = {each._handle: each for each in state._all_fsdp_states if isinstance(each._handle, StrategyHandle)}
        if state._sync_gradients:
            _reduce_accumulated(handles)
            _wait_for_reductions(state)
        else:
            for handle in _order_of(state).remaining():
                _accumulate(handles[handle], handle)
            for handle in handles:
                handle.took_part |= handle.is_of_micro_batch
                # torch does so where it reduces. Else it would clear what a parameter has got that had no gradient
                # before the forward: one that was thawed, or cleared alone, since the last reduction.
                if not handle.uses_sharded_strategy and handle._training_state == HandleTrainingState.BACKWARD_POST:
                    handle._reset_is_grad_none()
        original(state, module)
        for handle in handles:
            # FSDP takes an unsharded flat parameter for resharded, and leaves the parameters of frozen ones as views.
            # Units that this micro-batch has not run may have replaced parameters that no forward has copied yet.
            if not handle.uses_sharded_strategy and handle.shows_views:
                handle.reshard(False)
            handle.end_backward(state._sync_gradients)
        if state._sync_gradients:
            _order_of(state).restart()
        callback(module, state._sync_gradients)

    runtime_utils._post_backward_final_callback = post_backward_final_callback


def _order_of(root_state: Any) -> ReductionOrder[StrategyHandle]:
    """The order in which the units below a root reduce; made at the first call."""
    order: ReductionOrder[StrategyHandle] | None = getattr(root_state, _ORDER, None)
    if order is None:
        handles = [each._handle for each in root_state._all_fsdp_states if isinstance(each._handle, StrategyHandle)]
        order = ReductionOrder(handles)
        setattr(root_state, _ORDER, order)
        for handle in handles:
            handle.order = order
    return order


def set_up_reductions(root: Any) -> None:
    """Fix the order in which the units below a root reduce, and give every other one a second stream.

    See the top of two_hop_reduce.py.
    """
    _order_of(root)
    states = [state for state in root._all_fsdp_states if _has_two_hops(state._handle)]
    if len(states) > 1:
        second = root._device_handle.Stream()
        for state in states[1::2]:
            state._post_backward_stream = second


def _has_two_hops(handle: FlatParamHandle | None) -> bool:
    return isinstance(handle, StrategyHandle) and handle.reduction is not None and handle.reduction.has_two_hops


def _wait_for_reductions(root_state: Any) -> None:
    """Have the current stream wait for all units' gradients; torch has it wait for the root's stream alone."""
    current = root_state._device_handle.current_stream()
    for stream in {state._post_backward_stream for state in root_state._all_fsdp_states}:
        current.wait_stream(stream)


def reduce_in_every_backward() -> None:
    """Have handles of strategies reduce in every backward, inside of no_sync too, as far as their scopes say.

    See [Note: What a micro-batch reduces] in gradient_reduce.py and, for their turns, [Note: The order of reductions]
    in reduction_order.py.
    """
    hook = runtime_utils._post_backward_hook

    @functools.wraps(hook)
    def post_backward_hook(state: Any, handle: FlatParamHandle, *args: Any) -> None:
        if not isinstance(handle, StrategyHandle):
            hook(state, handle, *args)
            return
        handle.used_in_step |= handle.flat_param.grad is not None
        if not handle.uses_sharded_strategy:
            # FSDP accumulates in the gradient itself: nothing reduces it if the last micro-batch leaves the unit out.
            handle.unreduced = not state._sync_gradients
        if state._sync_gradients:
            if handle.flat_param.grad is not None and handle.order is not None:
                handle.order.synchronized.append(handle)
            hook(state, handle, *args)
            return
        hook(state, handle, *args)  # FSDP leaves the gradient unsharded
        if not handle.reduces_early or handle.flat_param.grad is None:
            return
        assert handle.reduction is not None
        assert handle.order is not None
        if not handle.reduction.communicates_early:
            _accumulate(state, handle)
            return
        for due in handle.order.finished(handle):
            _accumulate(due.state, due)

    runtime_utils._post_backward_hook = post_backward_hook


def _accumulate(state: Any, handle: StrategyHandle) -> None:
    """Reduce the gradient that FSDP has left unsharded, or zeros if there is none, as far as its scope says."""
    flat_param: Any = handle.flat_param
    _keep_reduced_gradient(handle)
    unsharded, flat_param.grad = flat_param.grad, None
    handle.hide_gradients()
    # Needed in either case: at the end of the step torch passes the gradient on only if this is set, and clears it.
    handle.took_part, flat_param._post_backward_called = True, True
    stream = state._post_backward_stream
    stream.wait_stream(state._device_handle.current_stream())
    with state._device_handle.stream(stream):
        if unsharded is None:
            gradient = _zero_gradient(handle)
        else:
            no_dispatch_record_stream(unsharded.data, stream)
            gradient = unsharded.data.to(handle.gradient_dtype)
        handle.accumulate(runtime_utils._get_reduce_scatter_tensors(state, gradient)[0])


def _keep_reduced_gradient(handle: StrategyHandle) -> None:
    """Have FSDP add to the gradient of an earlier backward of the step, as before each backward of the unit's own."""
    if handle._training_state == HandleTrainingState.IDLE:  # which it has had none of in this micro-batch
        handle.prepare_gradient_for_backward()


def _reduce_accumulated(handles: dict[StrategyHandle, Any]) -> None:
    """Reduce gradients of earlier micro-batches for units that took no part in the last one."""
    used_elsewhere = _agree_on_use(list(handles))
    for handle, state in handles.items():
        if handle.reduction is None:
            continue
        flat_param: Any = handle.flat_param
        unreduced, handle.unreduced = handle.unreduced and flat_param.grad is not None, False
        has_accumulated = handle.reduction.accumulated.sums is not None or handle in used_elsewhere
        if not unreduced and not has_accumulated:
            continue
        _enter_post_backward(state, handle)
        state._post_backward_stream.wait_stream(state._device_handle.current_stream())
        with state._device_handle.stream(state._post_backward_stream):
            if unreduced:
                runtime_utils._reduce_grad_no_shard(state, handle)
            if has_accumulated:
                gradient, shard = runtime_utils._get_reduce_scatter_tensors(state, _zero_gradient(handle))
                handle.reduce(gradient, shard)
                shard = runtime_utils._accumulate_sharded_grad(state, handle, shard)
                runtime_utils._post_reduce_grad_callback(state, handle, shard)


def _enter_post_backward(state: Any, handle: StrategyHandle) -> None:
    """Put a unit that the micro-batch did not use into the state in which FSDP reduces."""
    runtime_utils._catch_all_reshard(state)  # a unit that was run but got no gradient may still be unsharded
    _keep_reduced_gradient(handle)
    # Not true, for it had no backward: until FSDP's final callback, which resets all three.
    state.training_state = TrainingState.FORWARD_BACKWARD
    flat_param: Any = handle.flat_param
    handle._training_state, flat_param._post_backward_called = HandleTrainingState.BACKWARD_POST, True


def _zero_gradient(handle: StrategyHandle) -> Tensor:
    """The unsharded gradient of a unit that got none."""
    size = handle.flat_param._unpadded_unsharded_size
    return torch.zeros(size, dtype=handle.gradient_dtype, device=handle.device)


def _agree_on_use(handles: list[StrategyHandle]) -> set[StrategyHandle]:
    """Drop the gradients of units that micro-batches have gathered but no rank has used. Collective.

    Returns:
        The units that other ranks have used in the step, and this one has not.
    """
    used_elsewhere: set[StrategyHandle] = set()
    asked = [(handle, handle.mesh, [handle.used_in_step]) for handle in handles if handle.took_part]
    for handle, used_by_any in agree_on_use(asked):
        if handle.used_in_step:
            continue
        if all(used_by_any()):
            used_elsewhere.add(handle)
        elif handle.reduction is not None:
            handle.reduction.accumulated.drop()
            flat_param: Any = handle.flat_param
            # A gradient of an earlier backward of the step stays; FSDP would drop it, for want of another one.
            flat_param._post_backward_called = hasattr(flat_param, "_saved_grad_shard")
            if flat_param._post_backward_called and handle._use_orig_params:
                runtime_utils._catch_all_reshard(handle.state)
                handle._use_sharded_grad_views()
    return used_elsewhere
