"""The examples of weight updates: engines, as stand-ins have them, hold what the training has, after each update.

vLLM 0.33, SGLang 0.5.23 and verl 0.9.1 need GPUs or Ray. Their stand-ins are the parts that examples/rl calls, with the
fields, orders of calls and refusals that their sources have; that of SGLang is an HTTP server on localhost. An
engine's group of NCCL is one of gloo.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
import pickle
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import llama, models
from harness.adapter import Adapter, Case, Fsdp2
from harness.covering import ADAPTERS
from harness.launch import ROOT
from harness.pool import Pool
from harness.training import train
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn

from fsdp_zpp import Strategy, fully_shard, gathered_weights, save_adapter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins receive on the CPU")
CASE = Case(steps=1, model=(("width", 66), ("hidden", 91), ("blocks", 2)), frozen=True)
ZEROPP = Strategy.zeropp(gpus_per_node=2)
EXACTLY = {"rtol": 0.0, "atol": 0.0}
Modules = dict[str, Mapping[str, object]]

# ---- what engines have in common


@contextmanager
def modules(**contents: Mapping[str, object]) -> Iterator[Callable[[str], Any]]:
    """Have modules, named with ``__`` for dots, whose parents are packages; yield what imports an example."""
    before = set(sys.modules)
    for dotted, content in contents.items():
        parts = dotted.split("__")
        for length in range(1, len(parts) + 1):
            name = ".".join(parts[:length])
            if name not in sys.modules:
                sys.modules[name] = ModuleType(name)
                if length > 1:
                    setattr(sys.modules[".".join(parts[: length - 1])], parts[length - 1], sys.modules[name])
        vars(sys.modules[".".join(parts)]).update(content)
    sys.path.insert(0, str(ROOT / "examples/rl"))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(ROOT / "examples/rl"))
        for name in set(sys.modules) - before:
            del sys.modules[name]


@contextmanager
def server(engine: object) -> Iterator[str]:
    """Serve POST requests for an engine's methods with arguments in JSON; yield the address. Errors are status 500."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, answer = 200, {"message": "done"}
            try:
                getattr(engine, self.path.removeprefix("/"))(**json.loads(body))
            except Exception as error:  # as servers do
                status, answer = 500, {"message": f"{type(error).__name__}: {error}"}
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=served.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{served.server_port}"
    finally:
        served.shutdown()
        thread.join()
        served.server_close()


@contextmanager
def server_for_all(engine: object, on: int) -> Iterator[str]:
    """In a worker: a server beside the rank ``on``, whose address all ranks have."""
    with server(engine) if dist.get_rank() == on else nullcontext() as url:
        urls = [url]
        dist.broadcast_object_list(urls, src=on)
        yield urls[0]
        dist.barrier()  # it listens until all are done


class EngineModel(nn.Module):
    """An engine's model: holds what it was last given by each name."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, Tensor] = {}

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in named:
            self.loaded[name] = tensor.clone()


def check_weights(loaded: dict[str, Tensor], model: Any, on: int) -> None:
    """Compare what an engine beside the rank ``on`` holds with the model's weights."""
    truth = dict(gathered_weights(model, dtype=torch.bfloat16))
    if dist.get_rank() != on:
        assert not loaded
        return
    torch.testing.assert_close(loaded, truth, **EXACTLY)


# ---- vLLM


@dataclass
class NCCLTrainerInitInfo:
    master_address: str
    master_port: int
    world_size: int
    rank: int = field(kw_only=True)


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class TrainerEngine:
    """``NCCLTrainerWeightTransferEngine``, which sends what a source has by itself."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.sent: dict[str, Tensor] = {}

    @classmethod
    def trainer_init(cls, init_info: NCCLTrainerInitInfo, *, client: object, source: Any) -> TrainerEngine:
        assert all(isinstance(meta, ParamMeta) for meta in source.metadata)
        assert init_info.rank == dist.get_rank()
        return cls(source)

    def send_weights(self) -> None:
        self.sent = dict(self.source.iter_full())
        shapes = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.sent.items()]
        assert shapes == [(meta.name, meta.dtype, meta.shape) for meta in self.source.metadata]


def vllm() -> Modules:
    transfer = "vllm__distributed__weight_transfer__"
    return {
        f"{transfer}base": {"ParamMeta": ParamMeta, "WeightSource": object},
        f"{transfer}clients": {"HTTPVLLMWeightSyncClient": mock.Mock()},
        f"{transfer}nccl_engine": {
            "NCCLTrainerInitInfo": NCCLTrainerInitInfo,
            "NCCLTrainerWeightTransferEngine": TrainerEngine,
        },
    }


def with_vllm(adapter: Adapter) -> None:
    """In a worker: weights for vLLM's own engine."""
    model = adapter.make(CASE, ZEROPP)
    with modules(**vllm()) as example:
        trainer = example("vllm_trainer")
        engine = trainer.connect(trainer.GatheredSource(model), "http://vllm", "localhost", 1, workers=1)
        for step in range(3):
            engine.send_weights()
            check_weights(engine.sent, model, on=dist.get_rank())
            train(adapter, model, CASE, first_step=step)


# ---- SGLang


class SGLang:
    """A server with one worker, whose methods are its routes, and whose side of the group that is made is ``group``."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.model = EngineModel()
        self.adapters: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {}
        self._group = group
        self._groups: dict[str, dist.ProcessGroup | None] = {}
        self._session = False

    def begin_weight_update(self) -> None:
        self._session = True

    def end_weight_update(self) -> None:
        self._session = False

    def init_weights_update_group(
        self, rank_offset: int, world_size: int, group_name: str, backend: str, **address: Any
    ) -> None:
        assert (rank_offset, world_size, backend) == (1, 2, "gloo")
        self._groups[group_name] = self._group

    def update_weights_from_distributed(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str
    ) -> None:
        assert self._session, "no session of updates has begun"
        weights = []
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.broadcast(weight, src=0, group=self._groups[group_name])
            weights.append((name, weight))
        self.model.load_weights(weights)

    def load_lora_adapter_from_tensors(
        self, lora_name: str, config_dict: dict[str, Any], serialized_named_tensors: list[str]
    ) -> None:
        assert lora_name not in self.adapters, "it is loaded already"
        self.adapters[lora_name] = (config_dict, pickle.loads(base64.b64decode(serialized_named_tensors[0])))

    def unload_lora_adapter(self, lora_name: str) -> None:
        del self.adapters[lora_name]


def sglang(group: dist.ProcessGroup | None) -> Modules:
    """The module of SGLang that the trainer's example imports, whose group on rank 0 is ``group``."""
    return {"sglang__srt__utils": {"init_custom_process_group": lambda **arguments: group}}


def with_sglang(adapter: Adapter) -> None:
    """In a worker: updates of an SGLang server beside rank 1's training, which then refuses them."""
    model = adapter.make(CASE, ZEROPP)
    of_both = dist.new_group([0, 1], backend="gloo")
    stub = SGLang(of_both)
    with modules(**sglang(of_both)) as example, server_for_all(stub, on=1) as url:
        trainer = example("sglang_trainer")
        group = trainer.connect(url, "localhost", 1, workers=1, backend="gloo")
        for step in range(3):
            trainer.send_weights(url, model, group)
            check_weights(stub.model.loaded, model, on=1)
            train(adapter, model, CASE, first_step=step)
        with pytest.raises(RuntimeError, match="the engine did not take the weights: "):
            trainer.send_weights(f"{url}/missing", model, group)


# ---- verl


class FSDPEngine:
    """The model and what an engine's ``get_per_tensor_param`` reads of the configuration."""

    get_per_tensor_param: Callable[..., Any]

    def __init__(self, module: Any, merge: bool = False) -> None:
        self.module, self.model_config = module, SimpleNamespace(lora={"merge": merge})


class Rollout:
    def __init__(self) -> None:
        self.loaded: dict[str, Tensor] = {}
        self.adapter: dict[str, Any] | None = None

    async def update_weights(self, weights: Any, peft_config: dict[str, Any] | None = None, **options: Any) -> None:
        self.adapter = peft_config
        self.loaded |= {name: weight.clone() for name, weight in weights}


def update_rollout(engine: FSDPEngine, rollout: Rollout) -> None:
    """As ``ActorRolloutRefWorker.update_weights`` does beside the trainer."""
    weights, peft_config = engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)
    asyncio.run(rollout.update_weights(weights, peft_config=peft_config, base_sync_done=True, global_steps=0))


def verl() -> Modules:
    return {
        "verl__utils__fsdp_utils": {"fully_shard": None},
        "verl__workers__engine__fsdp__transformer_impl": {"FSDPEngine": type("FSDPEngine", (FSDPEngine,), {})},
    }


def with_verl(adapter: Adapter) -> None:
    """In a worker: updates of a rollout beside the trainer."""
    with modules(**verl()) as example:
        example("verl_weights")
        fsdp_utils = example("verl.utils.fsdp_utils")
        net = models.make_net(**dict(CASE.model), frozen=True)
        for module in (*net.blocks, net):
            fsdp_utils.fully_shard(module, mesh=None, reshard_after_forward=True)
        engine = example("verl.workers.engine.fsdp.transformer_impl").FSDPEngine(net)
        rollout = Rollout()
        for step in range(3):
            update_rollout(engine, rollout)
            check_weights(rollout.loaded, net, on=dist.get_rank())
            train(adapter, net, CASE, first_step=step)


@pytest.mark.parametrize(
    ("engine", "adapter"), [(with_vllm, ADAPTERS[0]), (with_sglang, ADAPTERS[1]), (with_verl, Fsdp2())]
)
def test_engines_hold_the_weights(pool: Callable[[int], Pool], engine: Callable[..., None], adapter: Adapter) -> None:
    pool(4).run(engine, adapter)


# ---- adapters


def adapted() -> Any:
    model = get_peft_model(llama.make_base(), LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 10)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, strategy=ZEROPP)
    return fully_shard(model, strategy=ZEROPP)


def adapters_in_memory(folder: Path) -> None:
    """In a worker: an adapter reaches SGLang and verl as the file that ``save_adapter`` writes has it."""
    model = adapted()
    save_adapter(model, folder)
    saved = {name: tensor.bfloat16() for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
    config = json.loads((folder / "adapter_config.json").read_text())
    stub = SGLang()
    with modules(**sglang(None)) as example, server_for_all(stub, on=0) as url:
        for _ in range(2):
            example("sglang_trainer").send_adapter(url, model, config, "policy")
        if dist.get_rank() == 0:
            assert stub.adapters["policy"][0] == config
            torch.testing.assert_close(stub.adapters["policy"][1], saved, **EXACTLY)

    with modules(**verl()) as example:
        example("verl_weights")
        engine = example("verl.workers.engine.fsdp.transformer_impl").FSDPEngine
        rollout, merged = Rollout(), Rollout()
        update_rollout(engine(model), rollout)
        assert rollout.adapter["r"] == config["r"]
        torch.testing.assert_close(rollout.loaded, saved, **EXACTLY)
        update_rollout(engine(model, merge=True), merged)
        assert merged.adapter is None
        expected = dict(gathered_weights(model, merged=True, dtype=torch.bfloat16))
        torch.testing.assert_close(merged.loaded, expected, **EXACTLY)
        with pytest.raises(ValueError, match="the rollout must read the base itself"):
            engine(model).get_per_tensor_param(base_sync_done=False)


def test_adapters_reach_engines_in_memory(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    pool(4).run(adapters_in_memory, tmp_path)
