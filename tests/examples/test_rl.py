"""The examples of weight updates: engines, as stand-ins have them, hold what the training has, after each update."""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import nullcontext
from queue import Queue
from types import SimpleNamespace
from typing import Any

import engine_stubs
import pytest
import torch
import torch.distributed as dist
from engine_stubs import VLLM, EngineModel, LoRAModel, modules, server
from harness import llama, models
from harness.adapter import Adapter, Case
from harness.covering import over_adapters
from harness.pool import Pool
from harness.training import train
from peft import LoraConfig, get_peft_model
from sglang_stub import SGLang, sglang
from torch import Tensor

from fsdp_zpp import Strategy, SyncToken, WeightUpdate, fully_shard, gathered_weights

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins receive on the CPU")

CASE = Case(steps=1, model=(("width", 66), ("hidden", 91), ("blocks", 2)), frozen=True)
ZEROPP = Strategy.zeropp(gpus_per_node=2)


def expected(model: Any) -> dict[str, Tensor]:
    return dict(gathered_weights(model, dtype=torch.bfloat16))


def check_close(loaded: dict[str, Tensor], model: Any, exact: bool) -> None:
    """Compare what an engine holds with the model's weights."""
    truth = expected(model)
    if not loaded:  # another rank's engine
        return
    assert loaded.keys() == truth.keys()
    for name, tensor in truth.items():
        # A step of this training changes no weight by more than 0.1, of which 4 bits leave a fourteenth.
        tolerance = 0.0 if exact else 0.1 / 14
        torch.testing.assert_close(loaded[name], tensor, rtol=0 if exact else 2**-7, atol=tolerance)


def url_for_all(url: str | None) -> str:
    urls = [url]
    dist.broadcast_object_list(urls, src=0)
    assert urls[0] is not None
    return urls[0]


def with_vllm(adapter: Adapter, changes: bool) -> None:
    """In a worker: three updates of a vLLM server, one of which it refuses if they are changes."""
    model = adapter.make(CASE, ZEROPP)
    with modules(**engine_stubs.vllm()):
        trainer, worker = importlib.import_module("vllm_trainer"), importlib.import_module("vllm_worker")
        engine_of = engine_stubs.EngineFactory.registry["fsdp_zpp"] if changes else engine_stubs.WorkerEngine
        vllm = VLLM(engine_of)
        assert engine_stubs.EngineFactory.registry["fsdp_zpp"] is worker.UpdateTransferEngine
        with server(vllm.routes()) if dist.get_rank() == 0 else nullcontext() as url:
            engine = trainer.connect(model, url_for_all(url), "localhost", 1, workers=1)
            token = SyncToken()
            for step in range(3):
                if not changes:
                    engine.send_weights()
                else:
                    trainer.send_changes(engine, model, token)
                    assert dist.get_rank() or vllm.version == str(step + 1)
                check_close(vllm.model.loaded, model, exact=not changes or step == 0)
                train(adapter, model, CASE, first_step=step)
            if not changes:
                return
            if dist.get_rank() == 0:
                vllm.engine._updates.receiver.__init__("cpu")  # type: ignore[attr-defined]  # as if it had started anew
            before = vllm.model.loaded
            with pytest.raises(RuntimeError, match=r"the engine did not take the weights: .* joined late"):
                trainer.send_changes(engine, model, token)
            assert vllm.model.loaded is before, "the model stays as it is"
            trainer.send_changes(engine, model, token)
            check_close(vllm.model.loaded, model, exact=True)


@over_adapters
@pytest.mark.parametrize("changes", [False, True], ids=["whole", "changes"])
def test_vllm_holds_the_weights(pool: Callable[[int], Pool], adapter: Adapter, changes: bool) -> None:
    pool(4).run(with_vllm, adapter, changes)


def with_sglang(adapter: Adapter, changes: bool) -> None:
    """In a worker: updates of an SGLang server, which runs beside rank 1's training."""
    model = adapter.make(CASE, ZEROPP)
    rank = dist.get_rank()
    of_both = dist.new_group([0, 1], backend="gloo")
    stub = SGLang(["sglang_loader.load_updates"], of_both)
    with modules(**sglang(of_both)):
        trainer = importlib.import_module("sglang_trainer")
        with server(stub.routes()) if rank == 1 else nullcontext() as url:
            urls = [url]
            dist.broadcast_object_list(urls, src=1)
            group = None if changes else trainer.connect(urls[0], "localhost", 1, workers=1, backend="gloo")
            token = SyncToken()
            for step in range(3):
                if changes:
                    trainer.send_changes(urls[0], model, token)
                    assert rank != 1 or (stub.version, stub.flushed) == (str(step + 1), step + 1)
                else:
                    trainer.send_weights(urls[0], model, group)
                check_close(stub.model.loaded, model, exact=not changes or step == 0)
                train(adapter, model, CASE, first_step=step)
            dist.barrier()  # the server listens until all are done
    if changes and rank == 1:
        assert "blocks.0.up.weight" in stub.model.calls[0], "everything is sent at first"
        assert not any("blocks.0." in name for call in stub.model.calls[1:] for name in call), "that is frozen"


@over_adapters
@pytest.mark.parametrize("changes", [False, True], ids=["whole", "changes"])
def test_sglang_holds_the_weights(pool: Callable[[int], Pool], adapter: Adapter, changes: bool) -> None:
    pool(4).run(with_sglang, adapter, changes)


class VerlStub:
    """What verl_weights.py imports of verl."""

    def __init__(self) -> None:
        registered: dict[str, type] = {}
        wire: Queue[tuple[str, Tensor] | None] = Queue()

        class Registry:
            get = staticmethod(registered.__getitem__)

            @staticmethod
            def register(backend: str) -> Callable[[type], type]:
                return lambda cls: registered.setdefault(backend, cls)

        @Registry.register("nccl")
        class NCCLCheckpointEngine:
            async def send_weights(self, weights: Iterator[tuple[str, Tensor]], global_steps: int | None = None) -> None:
                for name, weight in weights:
                    if dist.get_rank() == 0:
                        wire.put((name, weight.clone()))
                wire.put(None)

            async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
                while (named := wire.get()) is not None:
                    yield named

        self.registered = registered
        self.fsdp_utils = SimpleNamespace(fully_shard=None)
        self.engine = type("FSDPEngine", (), {})

    def modules(self) -> dict[str, Any]:
        registry = SimpleNamespace(register=None)
        del registry
        return {
            "verl__checkpoint_engine__base": {"CheckpointEngineRegistry": self.registry()},
            "verl__utils__fsdp_utils": {"fully_shard": None},
            "verl__workers__engine__fsdp__transformer_impl": {"FSDPEngine": self.engine},
        }

    def registry(self) -> Any:
        registered = self.registered

        class CheckpointEngineRegistry:
            @staticmethod
            def get(backend: str) -> type:
                return registered[backend]

            @staticmethod
            def register(backend: str) -> Callable[[type], type]:
                return lambda cls: registered.setdefault(backend, cls)

        return CheckpointEngineRegistry
