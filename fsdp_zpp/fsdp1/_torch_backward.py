"""Private names of torch's backwards: when gradients are reduced, in which streams, and what waits for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..torch_internals import Needed, check_needed
from ._torch import FlatParamHandle, HandleTrainingState, TrainingState, runtime_utils
from ._torch_handle import StrategyHandle

_RUNTIME = "torch.distributed.fsdp._runtime_utils"
_INSTANCE = "torch.distributed.fsdp.FullyShardedDataParallel"
_NEEDED = (
    Needed(_RUNTIME, "_post_backward_final_callback _post_backward_hook", "reducing at the end of backwards"),
    Needed(_RUNTIME, "_reduce_grad _reduce_grad_no_shard", "reducing or accumulating"),
    Needed(_RUNTIME, "_accumulate_sharded_grad _post_reduce_grad_callback", "gradients that wait"),
    Needed(_RUNTIME, "_get_reduce_scatter_tensors", "the size of a gradient's shard"),
    Needed(_RUNTIME, "_share_state_and_init_handle_attrs _post_backward_stream", "reducing in two streams"),
    Needed(_INSTANCE, "_all_fsdp_states _sync_gradients _handle training_state _device_handle", "states of the units"),
    Needed(
        "torch.distributed.fsdp._flat_param.FlatParamHandle",
        "_training_state _reduce_dtype reshard uses_sharded_strategy flat_param device",
        "the same",
    ),
    Needed("torch.distributed.fsdp._flat_param.FlatParameter", "_unpadded_unsharded_size", "gradients of zero"),
)
check_needed("adapter for FullyShardedDataParallel", _NEEDED)


def after_synchronizing_backward(callback: Callable[[nn.Module], None]) -> None:
    """Have ``callback(root)`` run at the end of every backward that is not inside of no_sync."""
    original = runtime_utils._post_backward_final_callback

    @functools.wraps(original)
    def post_backward_final_callback(state: Any, module: nn.Module) -> None:
        if state._sync_gradients:
            _reduce_what_waits(state)
            _wait_for_reductions(state)
        original(state, module)
        for each in state._all_fsdp_states:
            handle = each._handle
            if not isinstance(handle, StrategyHandle):
                continue
            # FSDP takes an unsharded flat parameter for resharded, and leaves the parameters of frozen ones as views.
            if not handle.uses_sharded_strategy:
                handle.reshard(False)
            # The last micro-batch may have left out a unit that earlier ones have used.
            if handle._hides_gradients and state._sync_gradients:
                handle._use_sharded_grad_views()
        if state._sync_gradients:
            callback(module)

    runtime_utils._post_backward_final_callback = post_backward_final_callback


def reduce_in_turns() -> None:
    """Have every other unit reduce in a second stream; see [Note: Two hops at once] in gradient_reduce.py."""
    original = runtime_utils._share_state_and_init_handle_attrs

    @functools.wraps(original)
    def share_state_and_init_handle_attrs(root_state: Any, root_module: nn.Module) -> None:
        original(root_state, root_module)
        states = [state for state in root_state._all_fsdp_states if _has_two_hops(state._handle)]
        if len(states) > 1:
            second = root_state._device_handle.Stream()
            for state in states[1::2]:
                state._post_backward_stream = second

    runtime_utils._share_state_and_init_handle_attrs = share_state_and_init_handle_attrs


def _has_two_hops(handle: FlatParamHandle | None) -> bool:
    return isinstance(handle, StrategyHandle) and handle._reduce is not None and handle._reduce.has_two_hops


def _wait_for_reductions(root_state: Any) -> None:
    """Have the current stream wait for all units' gradients; torch has it wait for the root's stream alone."""
    current = root_state._device_handle.current_stream()
    for stream in {state._post_backward_stream for state in root_state._all_fsdp_states}:
        current.wait_stream(stream)


def reduce_in_every_backward() -> None:
    """Have handles of strategies hand over their gradients in every backward, inside of no_sync too.

    What becomes of them there is said in [Note: What a micro-batch reduces] in gradient_reduce.py.
    """
    hook, reduce_grad = runtime_utils._post_backward_hook, runtime_utils._reduce_grad

    @functools.wraps(hook)
    def post_backward_hook(state: Any, handle: FlatParamHandle, *args: Any) -> None:
        if isinstance(handle, StrategyHandle) and handle.reduces_now and not state._sync_gradients:
            state._sync_gradients = handle._more_micro_batches = True
            try:
                hook(state, handle, *args)
            finally:
                state._sync_gradients = handle._more_micro_batches = False
            return
        if isinstance(handle, StrategyHandle) and not handle.uses_sharded_strategy:
            handle._unreduced = not state._sync_gradients
        hook(state, handle, *args)

    @functools.wraps(reduce_grad)
    def reduce_or_accumulate(state: Any, handle: FlatParamHandle) -> None:
        if (
            isinstance(handle, StrategyHandle)
            and handle._more_micro_batches
            and handle._reduce is not None
            and handle._reduce.accumulates
        ):
            flat_param: Any = handle.flat_param
            gradient, flat_param.grad = flat_param.grad.data, None
            handle._reduce.accumulate(runtime_utils._get_reduce_scatter_tensors(state, gradient)[0])
        else:
            reduce_grad(state, handle)

    runtime_utils._post_backward_hook = post_backward_hook
    runtime_utils._reduce_grad = reduce_or_accumulate


def shard_gradients_in_constant_time() -> None:
    """Have the size of a gradient's shard computed, where torch cuts the gradient into a view for every rank.

    Of a thousand views one is looked at, and they take longer than all the rest of a unit's backward.
    """
    original = runtime_utils._get_reduce_scatter_tensors

    @functools.wraps(original)
    def get_reduce_scatter_tensors(state: Any, unsharded_grad: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(state._handle, StrategyHandle):
            return original(state, unsharded_grad)
        numel = unsharded_grad.numel()
        of_shard = -(-numel // state.world_size)
        padding = of_shard * state.world_size - numel
        padded = F.pad(unsharded_grad, [0, padding]) if padding else unsharded_grad
        return padded, unsharded_grad.new_empty(of_shard)

    runtime_utils._get_reduce_scatter_tensors = get_reduce_scatter_tensors


def _reduce_what_waits(root_state: Any) -> None:
    """Reduce gradients of earlier micro-batches for units that took no part in the last one."""
    for state in root_state._all_fsdp_states:
        handle = state._handle
        if not isinstance(handle, StrategyHandle) or handle._reduce is None:
            continue
        flat_param: Any = handle.flat_param
        unreduced, handle._unreduced = handle._unreduced and flat_param.grad is not None, False
        if not unreduced and not handle._reduce.waiting:
            continue
        # As after a backward of its own, until FSDP's callback.
        state.training_state = TrainingState.FORWARD_BACKWARD
        handle._training_state = HandleTrainingState.BACKWARD_POST
        state._post_backward_stream.wait_stream(state._device_handle.current_stream())
        with state._device_handle.stream(state._post_backward_stream):
            if unreduced:
                runtime_utils._reduce_grad_no_shard(state, handle)
            if handle._reduce.waiting:
                size, dtype = flat_param._unpadded_unsharded_size, handle._reduce_dtype
                nothing = torch.zeros(size, dtype=dtype, device=handle.device)
                gradient, shard = runtime_utils._get_reduce_scatter_tensors(state, nothing)
                handle._reduce(gradient, shard)
                shard = runtime_utils._accumulate_sharded_grad(state, handle, shard)
                runtime_utils._post_reduce_grad_callback(state, handle, shard)
