"""The examples of weight updates: engines, as stand-ins have them, hold what the training has, after each update.

vLLM 0.33, SGLang 0.5.23 and verl 0.9.1 need GPUs or Ray. Their stand-ins are the parts that examples/rl calls, with the
fields, orders of calls and refusals that their sources have; that of SGLang is an HTTP server on localhost. Where an
engine broadcasts over NCCL, tensors go through a queue, or a group of gloo.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
import pickle
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
import requests
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

from fsdp_zpp import Strategy, SyncToken, WeightUpdate, fully_shard, gathered_weights, save_adapter

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
        self.calls: list[set[str]] = []

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self.calls.append(set())
        for name, tensor in named:
            self.loaded[name] = tensor.clone()
            self.calls[-1].add(name)


def check_close(loaded: dict[str, Tensor], model: Any, exact: bool, on: int = 0) -> None:
    """Compare what an engine beside the rank ``on`` holds with the model's weights."""
    truth = dict(gathered_weights(model, dtype=torch.bfloat16))
    if dist.get_rank() != on:
        assert not loaded
        return
    # A step of this training changes no weight by more than 0.1, of which 4 bits leave a fourteenth.
    tolerances = EXACTLY if exact else {"rtol": 2**-7, "atol": 0.1 / 14}
    torch.testing.assert_close(loaded, truth, **tolerances)


# ---- vLLM


@dataclass
class NCCLTrainerInitInfo:
    master_address: str
    master_port: int
    world_size: int
    rank: int = field(kw_only=True)


@dataclass
class UpdateInfo:
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


WIRE: Queue[Tensor] = Queue()
"""Tensors that are broadcast and not yet received."""


def packed_nccl_broadcast_producer(
    iterator: Iterator[Any],
    group: Queue[Tensor],
    src: int,
    post_iter_func: Callable[[Any], Tensor],
    buffer_size_bytes: int,
    num_buffers: int,
) -> None:
    for named in iterator:
        group.put(post_iter_func(named).contiguous().view(-1).view(torch.uint8).clone())


class TrainerEngine:
    """``NCCLTrainerWeightTransferEngine``, which sends what a source has by itself; the examples send changes by it."""

    packed_buffer_size_bytes, packed_num_buffers = 2**30, 2

    def __init__(self, client: VLLM) -> None:
        self.client, self.model_update_group = client, WIRE

    @classmethod
    def trainer_init(cls, init_info: NCCLTrainerInitInfo, *, client: VLLM, source: Any) -> TrainerEngine:
        assert all(isinstance(meta, ParamMeta) for meta in source.metadata)
        assert init_info.rank == dist.get_rank()
        return cls(client)


class WorkerEngine:
    """``NCCLWeightTransferEngine``: reloads the model layer by layer, so that all of it must be loaded again."""

    def __init__(self, config: object, vllm_config: object, device: object, model: EngineModel) -> None:
        self.model = model
        self.before: dict[str, Tensor] = {}

    def start_weight_update(self) -> None:
        self.before, self.model.loaded = self.model.loaded, {}

    def receive_weights(self, update_info: UpdateInfo) -> None:
        received = []
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            received.append((name, WIRE.get(timeout=60).view(getattr(torch, dtype)).view(shape)))
        self.model.load_weights(received)

    def finish_weight_update(self) -> None:
        missing = self.before.keys() - self.model.loaded.keys()
        assert not missing, f"a layer is half loaded: {missing}"


class VLLM:
    """A server with one worker, as its client of HTTP has it, with the state of an update."""

    def __init__(self, make_engine: Callable[..., WorkerEngine]) -> None:
        self.model = EngineModel()
        self.engine = make_engine(None, None, None, self.model)
        self.active = False
        self.version: str | None = None

    def start_weight_update(self) -> None:
        assert not self.active, "a weight update is already active"
        self.engine.start_weight_update()
        self.active = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        assert self.active, "no weight update is active"
        try:
            self.engine.receive_weights(UpdateInfo(**json.loads(json.dumps(update_info))))
        except RuntimeError as error:
            self.active = False
            raise requests.RequestException(str(error)) from error

    def finish_weight_update(self, weight_version: str) -> None:
        assert self.active, "no weight update is active"
        self.engine.finish_weight_update()
        self.active, self.version = False, weight_version


SERVERS: dict[str, VLLM] = {}
"""By address."""


def client_of(base_url: str, timeout: float) -> VLLM:
    """A stand-in for vLLM's ``HTTPVLLMWeightSyncClient``."""
    return SERVERS[base_url]


class PEFTHelper:
    def __init__(self, config: dict[str, Any]) -> None:
        self.r = config["r"]

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> PEFTHelper:
        return cls(config)

    def validate_legal(self, lora_config: Any) -> None:
        if self.r > lora_config.max_lora_rank:
            raise ValueError(f"LoRA rank {self.r} is greater than max_lora_rank {lora_config.max_lora_rank}.")


@dataclass
class LoRAModel:
    id: int
    tensors: dict[str, Tensor]

    @classmethod
    def from_lora_tensors(
        cls, lora_model_id: int, tensors: dict[str, Tensor], peft_helper: PEFTHelper, device: str, dtype: torch.dtype
    ) -> LoRAModel:
        assert all(name.split(".")[-2] in ("lora_A", "lora_B") for name in tensors), "names are as in PEFT's files"
        return cls(lora_model_id, {name: tensor.to(device, dtype) for name, tensor in tensors.items()})


def vllm() -> Modules:
    transfer = "vllm__distributed__weight_transfer__"
    return {
        f"{transfer}base": {"ParamMeta": ParamMeta, "WeightSource": object},
        f"{transfer}clients": {"HTTPVLLMWeightSyncClient": client_of},
        f"{transfer}factory": {"WeightTransferEngineFactory": mock.Mock()},
        f"{transfer}packed_tensor": {"packed_nccl_broadcast_producer": packed_nccl_broadcast_producer},
        f"{transfer}nccl_engine": {
            "NCCLTrainerInitInfo": NCCLTrainerInitInfo,
            "NCCLTrainerWeightTransferEngine": TrainerEngine,
            "NCCLWeightTransferEngine": WorkerEngine,
            "NCCLWeightTransferUpdateInfo": UpdateInfo,
        },
        "vllm__lora__lora_model": {"LoRAModel": LoRAModel},
        "vllm__lora__peft_helper": {"PEFTHelper": PEFTHelper},
    }


def with_vllm(adapter: Adapter) -> None:
    """In a worker: whole weights for vLLM's engines, and updates of a server by changes, one of which it refuses."""
    model = adapter.make(CASE, ZEROPP)
    with modules(**vllm()) as example:
        trainer, worker = example("vllm_trainer"), example("vllm_worker")
        registered = example("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory.register_engine
        registered.assert_called_once_with("fsdp_zpp", worker.UpdateTransferEngine)
        changes, token = VLLM(worker.UpdateTransferEngine), SyncToken()
        SERVERS["http://vllm"] = changes
        source = trainer.GatheredSource(model)
        engine = trainer.connect(source, "http://vllm", "localhost", 1, workers=1)
        for step in range(3):
            whole = dict(source.iter_full())
            check_close(whole, model, exact=True, on=dist.get_rank())
            shapes = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in whole.items()]
            assert shapes == [(meta.name, meta.dtype, meta.shape) for meta in source.metadata]
            trainer.send_changes(engine, model, token)
            assert dist.get_rank() or changes.version == str(step + 1)
            check_close(changes.model.loaded, model, exact=step == 0)
            train(adapter, model, CASE, first_step=step)
        if dist.get_rank() == 0:
            changes.engine._updates.receiver.__init__("cpu")  # as if it had started anew
        before = changes.model.loaded
        with pytest.raises(RuntimeError, match=r"the engine did not take the weights: .* joined late"):
            trainer.send_changes(engine, model, token)
        assert changes.model.loaded is before, "the model stays as it is"
        trainer.send_changes(engine, model, token)
        check_close(changes.model.loaded, model, exact=True)


# ---- SGLang


class SGLang:
    """A server with one worker, whose methods are its routes, and whose side of the group that is made is ``group``."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.model = EngineModel()
        self.adapters: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {}
        self.version: str | None = None
        self.flushed = 0
        self._group = group
        self._groups: dict[str, dist.ProcessGroup | None] = {}
        self._session = False

    def begin_weight_update(self) -> None:
        self._session = True

    def end_weight_update(self) -> None:
        self._session = False

    def update_weights_from_tensor(
        self, serialized_named_tensors: list[str], load_format: str, flush_cache: bool, weight_version: str
    ) -> None:
        assert self._session, "no session of updates has begun"
        assert load_format == "sglang_loader.load_updates", "the name in --custom-weight-loader"
        named = pickle.loads(base64.b64decode(serialized_named_tensors[0], validate=True))
        module, _, function = load_format.rpartition(".")
        getattr(importlib.import_module(module), function)(self.model, named)
        self.version = weight_version
        self.flushed += flush_cache

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

    def flush_cache(self) -> None:
        self.flushed += 1


def sglang(group: dist.ProcessGroup | None) -> Modules:
    """The module of SGLang that the trainer's example imports, whose group on rank 0 is ``group``."""
    return {"sglang__srt__utils": {"init_custom_process_group": lambda **arguments: group}}


def with_sglang(adapter: Adapter) -> None:
    """In a worker: updates of two SGLang servers beside rank 1's training, of whole weights and of changes."""
    model = adapter.make(CASE, ZEROPP)
    rank, of_both = dist.get_rank(), dist.new_group([0, 1], backend="gloo")
    whole, changes, token = SGLang(of_both), SGLang(), SyncToken()
    with modules(**sglang(of_both)) as example:
        trainer = example("sglang_trainer")
        with server_for_all(whole, on=1) as url, server_for_all(changes, on=1) as url_of_changes:
            group = trainer.connect(url, "localhost", 1, workers=1, backend="gloo")
            for step in range(3):
                trainer.send_weights(url, model, group)
                check_close(whole.model.loaded, model, exact=True, on=1)
                trainer.send_changes(url_of_changes, model, token)
                assert rank != 1 or (changes.version, changes.flushed) == (str(step + 1), step + 1)
                check_close(changes.model.loaded, model, exact=step == 0, on=1)
                train(adapter, model, CASE, first_step=step)
    if rank == 1:
        assert "blocks.0.up.weight" in changes.model.calls[0], "everything is sent at first"
        assert not any("blocks.0." in name for call in changes.model.calls[1:] for name in call), "that is frozen"


# ---- verl


class Registry:
    def __init__(self) -> None:
        self._registry: dict[str, type] = {}

    def register(self, backend: str) -> Callable[[type], type]:
        return lambda cls: self._registry.setdefault(backend, cls)

    def get(self, backend: str) -> type:
        return self._registry[backend]


class NCCLCheckpointEngine:
    """Rank 0 of the trainer sends; the others walk the generator. A rollout receives views of a buffer."""

    wire: ClassVar[Queue[tuple[str, Tensor] | None]] = Queue()
    """Tensors that rank 0 has broadcast."""

    async def send_weights(self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None) -> None:
        for name, weight in weights:
            if dist.get_rank() == 0:
                self.wire.put((name, weight.clone()))
        if dist.get_rank() == 0:
            self.wire.put(None)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        while (named := self.wire.get(timeout=60)) is not None:
            yield named


class FSDPEngine:
    """The model and what an engine's ``get_per_tensor_param`` reads of the configuration."""

    get_per_tensor_param: Callable[..., Any]

    def __init__(self, module: Any, merge: bool = False) -> None:
        self.module, self.model_config = module, SimpleNamespace(lora={"merge": merge})


class Rollout:
    def __init__(self) -> None:
        self.loaded: dict[str, Tensor] = {}
        self.last: list[str] = []
        self.adapter: dict[str, Any] | None = None

    async def update_weights(self, weights: Any, peft_config: dict[str, Any] | None = None, **options: Any) -> None:
        self.adapter, self.last = peft_config, []
        named = [each async for each in weights] if hasattr(weights, "__aiter__") else list(weights)
        for name, weight in named:
            self.last.append(name)
            self.loaded[name] = weight.clone()


def update_rollout(engine: FSDPEngine, rollout: Rollout) -> None:
    """As ``ActorRolloutRefWorker.update_weights`` does beside the trainer."""
    weights, peft_config = engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)
    asyncio.run(rollout.update_weights(weights, peft_config=peft_config, base_sync_done=True, global_steps=0))


def verl() -> Modules:
    registry = Registry()
    registry.register("nccl")(NCCLCheckpointEngine)
    return {
        "verl__checkpoint_engine__base": {"CheckpointEngineRegistry": registry},
        "verl__utils__fsdp_utils": {"fully_shard": None},
        "verl__workers__engine__fsdp__transformer_impl": {"FSDPEngine": type("FSDPEngine", (FSDPEngine,), {})},
    }


def with_verl(adapter: Adapter) -> None:
    """In a worker: updates of two rollouts, beside the trainer and by the checkpoint engine."""
    with modules(**verl()) as example:
        example("verl_weights")
        changed, fsdp_utils = example("verl_changes"), example("verl.utils.fsdp_utils")
        net = models.make_net(**dict(CASE.model), frozen=True)
        for module in (*net.blocks, net):
            fsdp_utils.fully_shard(module, mesh=None, reshard_after_forward=True)
        engine = example("verl.workers.engine.fsdp.transformer_impl").FSDPEngine(net)
        sender, receiver = (changed.DeltaCheckpointEngine() for _ in range(2))
        beside, apart = Rollout(), Rollout()
        for step in range(3):
            update_rollout(engine, beside)
            check_close(beside.loaded, net, exact=True, on=dist.get_rank())
            weights, _ = engine.get_per_tensor_param()
            asyncio.run(sender.send_weights(weights, global_steps=step))
            if dist.get_rank() == 0:
                asyncio.run(apart.update_weights(receiver.receive_weights(step)))
            check_close(apart.loaded, net, exact=step == 0)
            train(adapter, net, CASE, first_step=step)
        assert not any("blocks.0." in name for name in apart.last), "that is frozen"


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
    """In a worker: an adapter reaches vLLM, SGLang and verl as the file that ``save_adapter`` writes has it."""
    model = adapted()
    save_adapter(model, folder)
    saved = {name: tensor.bfloat16() for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
    config = json.loads((folder / "adapter_config.json").read_text())
    updates = gathered_weights(model, adapters_only=True, dtype=torch.bfloat16, since=SyncToken())
    packed = base64.b64encode(WeightUpdate.pack(update for _, update in updates)).decode()

    with modules(**vllm()) as example:
        worker, adapters = type("Worker", (example("vllm_worker").AdapterExtension,), {})(), mock.Mock()
        limits = SimpleNamespace(max_lora_rank=8, lora_dtype=torch.bfloat16)
        manager = SimpleNamespace(_adapter_manager=adapters, lora_config=limits)
        worker.model_runner = SimpleNamespace(lora_manager=manager)
        worker.set_adapter("1", json.dumps(config), packed)
        ((sent,), _) = adapters.add_adapter.call_args
        torch.testing.assert_close(sent.tensors, saved, **EXACTLY)
        # It replaces one of that number.
        assert adapters.mock_calls == [
            mock.call.remove_adapter(1),
            mock.call.add_adapter(sent),
            mock.call.activate_adapter(1),
        ]
        with pytest.raises(ValueError, match="greater than max_lora_rank"):
            worker.set_adapter("1", json.dumps(config | {"r": 64}), packed)

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
