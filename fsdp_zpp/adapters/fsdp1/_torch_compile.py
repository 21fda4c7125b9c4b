"""Private names of torch's FullyShardedDataParallel: telling that torch.compile traces a whole model."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

_REASON = (
    "torch.compile can't compile a whole FullyShardedDataParallel with a Strategy: its graphs do not see where weights "
    "are gathered; compile each layer before you wrap the model, layer.compile(), and pass use_orig_params=True, or "
    "use fully_shard"
)


def refuse_whole_graphs(instance: FullyShardedDataParallel) -> None:
    """Make forwards of ``instance`` raise if torch.compile traces them and it is the root of a model."""
    own = weakref.ref(instance)

    def is_inner() -> bool:
        itself = own()
        return itself is not None and itself._is_root is False  # None before the first forward, which finds the root

    # Dynamo leaves this call out of its graphs. If a frame that it traces raised, it would run the frame again without
    # a graph. With fullgraph=True it raises an error with the reason.
    @torch.compiler.disable(reason=_REASON)
    def refuse(unused: Tensor) -> None:
        if not is_inner():
            raise RuntimeError(_REASON)

    def before_forward(*unused: object) -> None:
        # Dynamo does not trace frames that touch an instance with a flat parameter, or that have no tensor. So this one
        # does not look at the instance, and makes a tensor.
        if torch.compiler.is_compiling():
            refuse(torch.empty(0))
        elif is_inner():
            handle.remove()

    handle = instance.register_forward_pre_hook(before_forward)
