"""Sharding strategies for PyTorch FSDP: ZeRO++ and its relatives.

Importing this package teaches ``torch.distributed.fsdp.FullyShardedDataParallel`` to take a :class:`Strategy`
as its ``sharding_strategy``; models with torch's own strategies are not affected. :func:`fully_shard` is torch's with a
``strategy=``.
"""

from . import fsdp1 as _fsdp1  # noqa: F401  (teaches FullyShardedDataParallel)
from .codec_state import CodecState
from .codecs import Codec, Int4, Int8
from .comm_hook import QuantizedReduceState, quantized_reduce_hook
from .error_feedback import LoCo
from .frozen.adapters import save_adapter
from .frozen.loading import load_frozen_params
from .frozen.quantize import dequantize_frozen_params, quantize_frozen_params
from .frozen.saving import save_frozen_params
from .fsdp2 import fully_shard
from .nf4 import NF4
from .planner.plan import plan
from .strategy import Strategy
from .units import invalidate, traffic
from .weight_difference import Int4Delta

__all__ = [
    "NF4",
    "Codec",
    "CodecState",
    "Int4",
    "Int4Delta",
    "Int8",
    "LoCo",
    "QuantizedReduceState",
    "Strategy",
    "dequantize_frozen_params",
    "fully_shard",
    "invalidate",
    "load_frozen_params",
    "plan",
    "quantize_frozen_params",
    "quantized_reduce_hook",
    "save_adapter",
    "save_frozen_params",
    "traffic",
]
