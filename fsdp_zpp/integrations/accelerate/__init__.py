"""Hugging Face's accelerate: an ``Accelerator`` that shards models by a strategy.

    accelerator = use_strategy(Accelerator(), Strategy.zeropp())
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

All else stays as it is with accelerate's FSDP2. What ``accelerate launch`` or a ``FullyShardedDataParallelPlugin`` sets
(what to wrap, mixed precision, activation checkpointing, the kind of state dict) holds, too, or is refused.
"""

from fsdp_zpp.integrations._requirement import require
from fsdp_zpp.runtime.tensors_of_model import reshard

require("accelerate", "1.13")

from .accelerator import ShardingAccelerator, use_strategy

__all__ = ["ShardingAccelerator", "reshard", "use_strategy"]
