"""The examples of weight updates: engines, as stand-ins have them, hold what the training has, after each update."""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_stubs
import pytest
import torch
import torch.distributed as dist
from engine_stubs import VLLM, LoRAModel, modules, server
from harness import llama, models
from harness.adapter import Adapter, Case
from harness.covering import over_adapters
from harness.fsdp2 import Fsdp2
from harness.pool import Pool
from harness.training import train
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from sglang_stub import SGLang, sglang
from torch import Tensor
from verl_stub import Rollout, Worker, verl

from fsdp_zpp import Strategy, SyncToken, WeightUpdate, fully_shard, gathered_weights, save_adapter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins receive on the CPU")

CASE = Case(steps=1, model=(("width", 66), ("hidden", 91), ("blocks", 2)), frozen=True)
ZEROPP = Strategy.zeropp(gpus_per_node=2)


def expected(model: Any) -> dict[str, Tensor]:
    return dict(gathered_weights(model, dtype=torch.bfloat16))


def check_close(loaded: dict[str, Tensor], model: Any, exact: bool, on: int = 0) -> None:
    """Compare what an engine beside the rank ``on`` holds with the model's weights."""
    truth = expected(model)
    if dist.get_rank() != on:
        assert not loaded
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
            engine = trainer.connect(trainer.GatheredSource(model), url_for_all(url), "localhost", 1, workers=1)
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
                check_close(stub.model.loaded, model, exact=not changes or step == 0, on=1)
                train(adapter, model, CASE, first_step=step)
            dist.barrier()  # the server listens until all are done
    if changes and rank == 1:
        assert "blocks.0.up.weight" in stub.model.calls[0], "everything is sent at first"
        assert not any("blocks.0." in name for call in stub.model.calls[1:] for name in call), "that is frozen"


@over_adapters
@pytest.mark.parametrize("changes", [False, True], ids=["whole", "changes"])
def test_sglang_holds_the_weights(pool: Callable[[int], Pool], adapter: Adapter, changes: bool) -> None:
    pool(4).run(with_sglang, adapter, changes)


def with_verl(changes: bool) -> None:
    """In a worker: updates of a rollout, beside the trainer or by the checkpoint engine."""
    with modules(**verl()):
        importlib.import_module("verl_weights")
        changed = importlib.import_module("verl_changes")
        fsdp_utils = importlib.import_module("verl.utils.fsdp_utils")
        net = models.make_net(**dict(CASE.model), frozen=True)
        for module in (*net.blocks, net):
            fsdp_utils.fully_shard(module, mesh=None, reshard_after_forward=True)
        engine_class = importlib.import_module("verl.workers.engine.fsdp.transformer_impl").FSDPEngine
        sender, receiver = (changed.DeltaCheckpointEngine(bucket_size=1) for _ in range(2))
        rollout = Rollout()
        worker = Worker(engine_class(net), rollout, sender if changes else None)
        for step in range(3):
            asyncio.run(worker.update_weights(step))
            if changes and dist.get_rank() == 0:
                asyncio.run(rollout.update_weights(receiver.receive_weights(step)))
            on = 0 if changes else dist.get_rank()  # where a rollout is
            check_close(rollout.loaded, net, exact=not changes or step == 0, on=on)
            train(Fsdp2(), net, CASE, first_step=step)
        if changes and dist.get_rank() == 0:
            assert not any("blocks.0." in name for name in rollout.last), "that is frozen"


@pytest.mark.parametrize("changes", [False, True], ids=["whole", "changes"])
def test_verls_rollout_holds_the_weights(pool: Callable[[int], Pool], changes: bool) -> None:
    pool(4).run(with_verl, changes)


def adapted() -> Any:
    """A small Llama with adapters that do something, sharded."""
    model = get_peft_model(llama.make_base(), LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 10)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, strategy=ZEROPP)
    return fully_shard(model, strategy=ZEROPP)


def adapters_in_memory(folder: Path) -> None:
    """In a worker: an adapter reaches vLLM, SGLang and verl as the file that ``save_adapter`` writes has it."""
    model = adapted()
    save_adapter(model, folder)
    saved = {name: tensor.bfloat16() for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
    config = json.loads((folder / "adapter_config.json").read_text())
    packed = WeightUpdate.pack(
        update for _, update in gathered_weights(model, adapters_only=True, dtype=torch.bfloat16, since=SyncToken())
    )

    with modules(**engine_stubs.vllm()):
        extension = importlib.import_module("vllm_worker").AdapterExtension
        manager = AdapterManager()
        worker = type("Worker", (extension,), {})()
        worker.model_runner = SimpleNamespace(
            lora_manager=SimpleNamespace(
                _adapter_manager=manager, lora_config=SimpleNamespace(max_lora_rank=8, lora_dtype=torch.bfloat16)
            )
        )
        for _ in range(2):  # the second replaces the first
            worker.set_adapter("1", json.dumps(config), base64.b64encode(packed).decode())
        assert_equal(manager.active[1].tensors, saved)
        with pytest.raises(ValueError, match="greater than max_lora_rank"):
            worker.set_adapter("1", json.dumps(config | {"r": 64}), base64.b64encode(packed).decode())

    stub = SGLang([])
    with modules(**sglang(None)), server(stub.routes()) if dist.get_rank() == 0 else nullcontext() as url:
        trainer = importlib.import_module("sglang_trainer")
        for _ in range(2):
            trainer.send_adapter(url, model, config, "policy")
        if dist.get_rank() == 0:
            assert stub.adapters["policy"][0] == config
            assert_equal(stub.adapters["policy"][1], saved)

    with modules(**verl()):
        importlib.import_module("verl_weights")
        engine_class = importlib.import_module("verl.workers.engine.fsdp.transformer_impl").FSDPEngine
        rollout = Rollout()
        asyncio.run(Worker(engine_class(model), rollout).update_weights(0))
        assert rollout.adapter is not None
        assert rollout.adapter["r"] == config["r"]
        assert_equal(rollout.loaded, saved)
        merged = Rollout()
        asyncio.run(Worker(engine_class(model, merge=True), merged).update_weights(0))
        assert merged.adapter is None
        assert_equal(merged.loaded, dict(gathered_weights(model, merged=True, dtype=torch.bfloat16)))
        with pytest.raises(ValueError, match="the rollout must read the base itself"):
            engine_class(model).get_per_tensor_param(base_sync_done=False)


class AdapterManager:
    """vLLM's adapters of a worker."""

    def __init__(self) -> None:
        self.registered: dict[int, LoRAModel] = {}
        self.active: dict[int, LoRAModel] = {}

    def remove_adapter(self, number: int) -> bool:
        self.active.pop(number, None)
        return self.registered.pop(number, None) is not None

    def add_adapter(self, adapter: LoRAModel) -> bool:
        return self.registered.setdefault(adapter.id, adapter) is adapter

    def activate_adapter(self, number: int) -> bool:
        return self.active.setdefault(number, self.registered[number]) is not None


def assert_equal(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name


def test_adapters_reach_engines_in_memory(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    pool(4).run(adapters_in_memory, tmp_path)
