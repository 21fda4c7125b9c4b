"""Sharding strategies for PyTorch FSDP: ZeRO++ and its relatives.

Importing this package teaches ``torch.distributed.fsdp.FullyShardedDataParallel`` to take a :class:`Strategy`
as its ``sharding_strategy``; models with torch's own strategies are not affected. :func:`fully_shard` is torch's with a
``strategy=``.
"""

from fsdp_zpp.adapters import fsdp1 as _fsdp1  # noqa: F401  (teaches FullyShardedDataParallel)
from fsdp_zpp.adapters.comm_hook import QuantizedReduceState, quantized_reduce_hook
from fsdp_zpp.adapters.fsdp2 import clip_grad_norm_, fully_shard
from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.codecs.blockwise import Int4, Int8
from fsdp_zpp.codecs.delta import Int4Delta
from fsdp_zpp.codecs.nf4 import NF4
from fsdp_zpp.codecs.top_k import TopK
from fsdp_zpp.config.elastic import Elastic
from fsdp_zpp.config.error_feedback import LoCo
from fsdp_zpp.config.local_steps import LocalSteps
from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.frozen.files.loading import load_frozen_params
from fsdp_zpp.frozen.files.saving import save_frozen_params
from fsdp_zpp.frozen.hugging_face.peft_saving import save_adapter
from fsdp_zpp.frozen.quantize import dequantize_frozen_params, quantize_frozen_params
from fsdp_zpp.inference.delta_receiver import DeltaReceiver, OutOfSyncError
from fsdp_zpp.inference.gathered_weights import gathered_weights
from fsdp_zpp.inference.sync_token import SyncToken
from fsdp_zpp.inference.weight_update import WeightUpdate
from fsdp_zpp.planner.plan import plan
from fsdp_zpp.planner.running_job import choose_strategy
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
from fsdp_zpp.runtime.monitor import Monitor, monitor

__all__ = [
    "NF4",
    "Codec",
    "CodecState",
    "DeltaReceiver",
    "Elastic",
    "Int4",
    "Int4Delta",
    "Int8",
    "LoCo",
    "LocalSteps",
    "Monitor",
    "OutOfSyncError",
    "QuantizedReduceState",
    "Strategy",
    "SyncToken",
    "TopK",
    "WeightUpdate",
    "agreed_weights",
    "choose_strategy",
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
    "monitor",
    "plan",
    "quantize_frozen_params",
    "quantized_reduce_hook",
    "save_adapter",
    "save_frozen_params",
    "traffic",
]
