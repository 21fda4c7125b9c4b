"""DeepSpeed configurations, and what becomes of them."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_zpp import Int4, Strategy

# The zero_optimization of DeepSpeed's ZeRO++ tutorial.
ZEROPP = {
    "stage": 3,
    "reduce_bucket_size": 10000000,
    "reduce_scatter": True,
    "zero_quantized_weights": True,
    "zero_hpz_partition_size": 16,
    "zero_quantized_gradients": True,
    "contiguous_gradients": True,
    "overlap_comm": True,
}

# ZeRO-3 as projects around Hugging Face's Trainer ship it.
HUGGING_FACE: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "offload_param": {"device": "none", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
QUANTIZED = {"stage": 3, "zero_quantized_gradients": True}
LOCO = QUANTIZED | {"zeropp_loco_param": {"err_beta": 0.5, "reset_T": 512}}
INT4_BOTH = {"gradients": Int4(128), "intra_gradients": Int4(128)}


def from_zero(**zero: Any) -> Strategy:
    return Strategy.from_deepspeed({"zero_optimization": zero})


def refusal(config: Any, error: type[Exception] = ValueError) -> str:
    with pytest.raises(error) as raised:
        Strategy.from_deepspeed(config)
    return str(raised.value)
