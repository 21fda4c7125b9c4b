"""fsdp_zpp in verl's workers: models sharded by a strategy, and their weights for rollouts. Written for verl 0.9.1.

Name this file in verl's configuration, so that every worker imports it:

    actor_rollout_ref.model.external_lib=verl_weights
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.rollout.load_format=safetensors
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from verl.utils import fsdp_utils
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from fsdp_zpp import Strategy, fully_shard, gathered_weights

STRATEGY = Strategy.zeropp()
DTYPE = torch.bfloat16


def weights_of(
    engine: FSDPEngine, layered_summon: bool = False, base_sync_done: bool = False, **others: Any
) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
    """Return weights for ``rollout.update_weights``, and PEFT's configuration if they are those of an adapter.

    Args:
        engine: verl's engine.
        layered_summon: Has no effect: weights are always gathered layer by layer.
        base_sync_done: Whether the rollout has the base of an adapter already.
        **others: What other engines take.

    Raises:
        ValueError: If an adapter is to be sent to a rollout without its base.
    """
    adapters = getattr(engine.module, "peft_config", None)
    merge = adapters is not None and engine.model_config.lora.get("merge", False)
    if adapters is None or merge:
        return gathered_weights(engine.module, dtype=DTYPE, merged=merge), None
    if not base_sync_done:
        raise ValueError("the rollout must read the base itself: set rollout.load_format=safetensors")
    return gathered_weights(engine.module, dtype=DTYPE, adapters_only=True), adapters["default"].to_dict()


fsdp_utils.fully_shard = functools.partial(fully_shard, strategy=STRATEGY)
FSDPEngine.get_per_tensor_param = weights_of
