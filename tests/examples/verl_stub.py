"""A stand-in for verl 0.9.1, which needs Ray: its registry, its NCCL engine without NCCL, and what calls them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from queue import Queue
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor


class Registry:
    """``CheckpointEngineRegistry``."""

    def __init__(self) -> None:
        self._registry: dict[str, type] = {}

    def register(self, backend: str) -> Callable[[type], type]:
        return lambda cls: self._registry.setdefault(backend, cls)

    def get(self, backend: str) -> type:
        if backend not in self._registry:
            raise ValueError(f"Checkpoint engine {backend} not registered")
        return self._registry[backend]


WIRE: Queue[tuple[str, Tensor] | None] = Queue()
"""What rank 0 has broadcast."""


class NCCLCheckpointEngine:
    """Of the trainer's ranks, 0 sends; the others walk the generator. A rollout receives views of a buffer."""

    def __init__(self, bucket_size: int) -> None:
        self.bucket_size = bucket_size

    async def send_weights(self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None) -> None:
        for name, weight in weights:
            if dist.get_rank() == 0:
                WIRE.put((name, weight.clone()))
        if dist.get_rank() == 0:
            WIRE.put(None)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        while (named := WIRE.get(timeout=60)) is not None:
            yield named


class FSDPEngine:
    """The model and what an engine's ``get_per_tensor_param`` reads of the configuration."""

    get_per_tensor_param: Callable[..., Any]

    def __init__(self, module: Any, merge: bool = False) -> None:
        self.module, self.model_config = module, SimpleNamespace(lora={"merge": merge})


class Rollout:
    """What a rollout was given."""

    def __init__(self) -> None:
        self.loaded: dict[str, Tensor] = {}
        self.last: list[str] = []
        self.adapter: dict[str, Any] | None = None

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **options: Any
    ) -> None:
        assert wire_format == "named_tensors"
        self.adapter, self.last = options.get("peft_config"), []
        named = [each async for each in weights] if hasattr(weights, "__aiter__") else list(weights)
        for name, weight in named:
            self.last.append(name)
            self.loaded[name] = weight.clone()


class Worker:
    """``ActorRolloutRefWorker``, its ``update_weights`` alone: beside the trainer, and by a checkpoint engine."""

    def __init__(self, engine: FSDPEngine, rollout: Rollout, checkpoint_engine: Any = None) -> None:
        self.engine, self.rollout, self.checkpoint_engine = engine, rollout, checkpoint_engine

    async def update_weights(self, global_steps: int) -> None:
        if self.checkpoint_engine is not None:
            weights, _ = self.engine.get_per_tensor_param()
            await self.checkpoint_engine.send_weights(weights, global_steps=global_steps)
            return
        weights, peft_config = self.engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)
        await self.rollout.update_weights(
            weights, peft_config=peft_config, base_sync_done=True, global_steps=global_steps
        )


def verl() -> dict[str, Mapping[str, object]]:
    """The modules of verl that the example imports."""
    registry = Registry()
    registry.register("nccl")(NCCLCheckpointEngine)
    return {
        "verl__checkpoint_engine__base": {"CheckpointEngineRegistry": registry},
        "verl__utils__fsdp_utils": {"fully_shard": None},
        "verl__workers__engine__fsdp__transformer_impl": {"FSDPEngine": type("FSDPEngine", (FSDPEngine,), {})},
    }
