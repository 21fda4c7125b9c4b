"""Private names of torch's backwards: optimizers in the backward that step on offloaded parameters.

torch copies the gradient of such a unit to the CPU while the CPU waits, and steps at once. Here it copies without a
wait, and optimizers step as collectives/arriving_gradients.py says.
"""

from __future__ import annotations

import functools
from functools import partial

from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from ._torch import FlatParamHandle, runtime_utils as runtime
from ._torch_handle import StrategyHandle


def step_on_arrival() -> None:
    """Let optimizers in the backward step on offloaded parameters of strategies when their gradients have arrived.

    It replaces torch's function once, however often it is called.
    """
    original = runtime._post_reduce_grad_callback
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def post_reduce_grad_callback(
        state: FullyShardedDataParallel, handle: FlatParamHandle, grad_to_offload: Tensor
    ) -> None:
        waits = isinstance(handle, StrategyHandle) and handle._offload_params and handle._has_optim_in_backward
        # torch found copies of gradients that are not sharded to need the wait.
        if not waits or not handle.uses_sharded_strategy:
            original(state, handle, grad_to_offload)
            return
        assert isinstance(handle, StrategyHandle)
        handle._has_optim_in_backward = False  # by which torch decides whether to wait
        try:
            runtime._offload_grad(state, handle, grad_to_offload)
        finally:
            handle._has_optim_in_backward = True
        event = state._device_handle.current_stream().record_event() if handle.device.type != "cpu" else None
        step = partial(runtime._post_backward_use_sharded_grad_views, handle)
        handle.gradients.arriving.step_on_arrival(event, step)

    runtime._post_reduce_grad_callback = post_reduce_grad_callback
