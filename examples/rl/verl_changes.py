"""Sends verl's rollouts on other machines what has changed, in 4 bits. Written for verl 0.9.1.

Beside the settings in verl_weights.py:

    actor_rollout_ref.rollout.checkpoint_engine.backend=fsdp_zpp
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=verl_changes
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngineRegistry

from fsdp_zpp import DeltaReceiver, SyncToken, WeightUpdate

NCCLEngine = CheckpointEngineRegistry.get("nccl")


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
