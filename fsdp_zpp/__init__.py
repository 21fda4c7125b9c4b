"""Sharding strategies for PyTorch FSDP: ZeRO++ and its relatives.

Once this package is imported, ``torch.distributed.fsdp.FullyShardedDataParallel`` takes a :class:`Strategy`
as its ``sharding_strategy``; models with torch's own strategies are not affected. :func:`fully_shard` is torch's
function with an additional ``strategy``.
"""

import sys

from ._torch_compat import check_torch

check_torch()  # before any module that uses torch's internals is imported

from fsdp_zpp.codecs import NF4, Codec, Int2Delta, Int3, Int4, Int4Delta, Int8
from fsdp_zpp.frozen.base_files import load_frozen_params, save_frozen_params
from fsdp_zpp.frozen.hugging_face import save_adapter
from fsdp_zpp.frozen.quantize import dequantize_frozen_params, quantize_frozen_params
from fsdp_zpp.fsdp1.wrapping import QuantizedReduceState, quantized_reduce_hook
from fsdp_zpp.fsdp2.fully_shard import clip_grad_norm_, fully_shard
from fsdp_zpp.planner.plan import plan
from fsdp_zpp.runtime.api import (
    agreed_weights,
    count_tokens,
    end_training,
    exchange_weights,
    invalidate,
    members,
    traffic,
)
from fsdp_zpp.runtime.checkpoint import CodecState
from fsdp_zpp.strategy.error_feedback import LoCo
from fsdp_zpp.strategy.local_steps import Elastic, LocalSteps
from fsdp_zpp.strategy.strategy import Strategy

from .inference_weights import gathered_weights
from .names import REMOVED

__all__ = [
    "NF4",
    "Codec",
    "CodecState",
    "Elastic",
    "Int2Delta",
    "Int3",
    "Int4",
    "Int4Delta",
    "Int8",
    "LoCo",
    "LocalSteps",
    "QuantizedReduceState",
    "Strategy",
    "agreed_weights",
    "clip_grad_norm_",
    "count_tokens",
    "dequantize_frozen_params",
    "end_training",
    "exchange_weights",
    "fully_shard",
    "gathered_weights",
    "invalidate",
    "load_frozen_params",
    "members",
    "plan",
    "quantize_frozen_params",
    "quantized_reduce_hook",
    "save_adapter",
    "save_frozen_params",
    "traffic",
]


def __getattr__(name: str) -> object:
    if name in REMOVED:
        raise ImportError(f"{name} is not in fsdp_zpp any more: {REMOVED[name]}")
    return object.__getattribute__(sys.modules[__name__], name)
