"""fsdp_zpp in verl's workers: models sharded by a strategy, and their weights for rollouts. Written for verl 0.9.1.

Name this file in verl's configuration, so that every worker imports it:

    actor_rollout_ref.model.external_lib=verl_weights
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.rollout.load_format=safetensors

With rollouts on other machines, ``actor_rollout_ref.rollout.checkpoint_engine.backend=fsdp_zpp`` sends changes in 4
bits over verl's NCCL engine; it also needs ``checkpoint_engine.custom_backend_module=verl_weights``.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.utils import fsdp_utils
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from fsdp_zpp import DeltaReceiver, Strategy, SyncToken, WeightUpdate, fully_shard, gathered_weights

STRATEGY = Strategy.zeropp()
DTYPE = torch.bfloat16

NCCLEngine = CheckpointEngineRegistry.get("nccl")


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


@CheckpointEngineRegistry.register("fsdp_zpp")
class DeltaCheckpointEngine(NCCLEngine):  # type: ignore[valid-type, misc]
    """Sends what has changed: verl's NCCL engine, with headers of updates where it has names of tensors."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._token = SyncToken()
        self._receiver = DeltaReceiver(device="cpu")

    async def send_weights(self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None) -> Any:
        """Send the changes of weights; the first call sends everything. Collective over the trainer's ranks."""
        updates = self._token.updates(weights, dist.group.WORLD)
        return await super().send_weights(((update.header, update.data) for _, update in updates), global_steps)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield the tensors that have changed."""
        async for header, data in super().receive_weights(global_steps):
            update = WeightUpdate.from_header(header, data)
            yield update.name, self._receiver.apply(update)


fsdp_utils.fully_shard = functools.partial(fully_shard, strategy=STRATEGY)
FSDPEngine.get_per_tensor_param = weights_of
