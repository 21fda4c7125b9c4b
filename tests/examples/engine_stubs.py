"""Stand-ins for vLLM 0.33, SGLang 0.5.23 and verl 0.9.1, which need GPUs: the parts that examples/rl calls.

Servers listen on localhost and speak those engines' HTTP routes, with the fields, orders of calls and refusals that
their sources have. Where an engine broadcasts over NCCL, tensors go through a queue, or a group of gloo.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from types import ModuleType
from typing import Any, ClassVar

import requests
import torch
from harness.launch import ROOT
from torch import Tensor, nn

Routes = Mapping[str, Callable[..., object]]


@contextmanager
def modules(**contents: Mapping[str, object]) -> Iterator[None]:
    """Have modules, named with ``__`` for dots, whose parents are packages; and the examples on the path."""
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
        yield
    finally:
        sys.path.remove(str(ROOT / "examples/rl"))
        for name in set(sys.modules) - before:
            del sys.modules[name]


@contextmanager
def server(routes: Routes) -> Iterator[str]:
    """Serve POST requests with JSON bodies, whose fields are arguments; yield the address. Errors are status 500."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, answer = 200, {"message": "done"}
            try:
                routes[self.path.removeprefix("/")](**(json.loads(body or b"{}") or {}))
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


# ---- vLLM


@dataclass
class NCCLTrainerInitInfo:
    master_address: str
    master_port: int
    world_size: int
    packed: bool = True
    packed_buffer_size_bytes: int = 2**30
    packed_num_buffers: int = 2
    rank: int = field(kw_only=True)


@dataclass
class UpdateInfo:
    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    pass


class HTTPClient:
    """``HTTPVLLMWeightSyncClient``, as it is in vLLM."""

    def __init__(self, base_url: str, timeout: float = 300) -> None:
        self.base_url, self.timeout = base_url, timeout

    def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
        requests.post(f"{self.base_url}/{path}", json=json, timeout=self.timeout).raise_for_status()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("finish_weight_update", {"weight_version": weight_version} if weight_version is not None else None)


WIRE: Queue[Tensor] = Queue()
"""What is broadcast and not yet received."""


def packed_nccl_broadcast_producer(
    iterator: Iterator[tuple[str, Tensor]],
    group: Queue[Tensor],
    src: int,
    post_iter_func: Callable[[tuple[str, Tensor]], Tensor],
    buffer_size_bytes: int,
    num_buffers: int,
) -> None:
    for named in iterator:
        group.put(post_iter_func(named).contiguous().view(-1).view(torch.uint8).clone())


class TrainerEngine:
    """``NCCLTrainerWeightTransferEngine``: rank 0 sends, all ranks gather."""

    def __init__(self, init_info: NCCLTrainerInitInfo, client: HTTPClient, source: Any) -> None:
        self.is_sender, self.client, self.source = init_info.rank == 0, client, source
        self.packed_buffer_size_bytes, self.packed_num_buffers = 2**30, 2
        self.model_update_group: Queue[Tensor] | None = None

    @classmethod
    def trainer_init(cls, init_info: NCCLTrainerInitInfo, *, client: HTTPClient, source: Any) -> TrainerEngine:
        engine = cls(init_info, client, source)
        assert all(isinstance(meta, ParamMeta) for meta in source.metadata)
        if engine.is_sender:
            client.init_weight_transfer_engine({"world_size": init_info.world_size, "rank_offset": 1})
            engine.model_update_group = WIRE
        return engine

    def send_weights(self) -> None:
        meta = self.source.metadata
        if not self.is_sender:
            for _ in self.source.iter_full():
                pass
            return
        self.client.start_weight_update()
        names, dtypes = [m.name for m in meta], [str(m.dtype).split(".")[-1] for m in meta]
        pairs = list(self.source.iter_full())
        assert [(n, t.dtype, tuple(t.shape)) for n, t in pairs] == [(m.name, m.dtype, m.shape) for m in meta]
        for _, tensor in pairs:
            WIRE.put(tensor.contiguous().view(-1).view(torch.uint8).clone())
        self.client.update_weights({"names": names, "dtype_names": dtypes, "shapes": [list(m.shape) for m in meta]})
        self.client.finish_weight_update()


class WorkerEngine:
    """``NCCLWeightTransferEngine``: reloads the model layer by layer, so that all of it must be loaded again."""

    def __init__(self, config: object, vllm_config: object, device: object, model: EngineModel) -> None:
        self.model = model
        self.before: dict[str, Tensor] = {}

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        assert init_info["rank_offset"] == 1

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
    """A server's worker, and its state of an update."""

    def __init__(self, make_engine: Callable[..., WorkerEngine]) -> None:
        self.model = EngineModel()
        self.engine = make_engine(None, None, None, self.model)
        self.active = False
        self.version: str | None = None

    def start(self) -> None:
        if self.active:
            raise RuntimeError("start_weight_update called while a weight update is already active.")
        self.engine.start_weight_update()
        self.active = True

    def update(self, update_info: dict[str, Any]) -> None:
        if not self.active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        try:
            self.engine.receive_weights(UpdateInfo(**update_info))
        except BaseException:
            self.active = False
            raise

    def finish(self, weight_version: str | None = None) -> None:
        if not self.active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self.engine.finish_weight_update()
        self.active, self.version = False, weight_version

    def routes(self) -> Routes:
        return {
            "init_weight_transfer_engine": lambda init_info: self.engine.init_transfer_engine(init_info),
            "start_weight_update": self.start,
            "update_weights": self.update,
            "finish_weight_update": self.finish,
        }


class EngineFactory:
    registry: ClassVar[dict[str, type[WorkerEngine]]] = {}

    @classmethod
    def register_engine(cls, name: str, engine: type[WorkerEngine]) -> None:
        cls.registry[name] = engine


class PEFTHelper:
    def __init__(self, config: dict[str, Any]) -> None:
        self.r = config["r"]

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> PEFTHelper:
        return cls(config)

    def validate_legal(self, lora_config: Any) -> None:
        if self.r > lora_config.max_lora_rank:
            raise ValueError(f"LoRA rank {self.r} is greater than max_lora_rank {lora_config.max_lora_rank}.")


class LoRAModel:
    def __init__(self, number: int, tensors: dict[str, Tensor]) -> None:
        self.id, self.tensors = number, tensors

    @classmethod
    def from_lora_tensors(
        cls,
        lora_model_id: int,
        tensors: dict[str, Tensor],
        peft_helper: PEFTHelper,
        device: str = "cuda",
        dtype: torch.dtype | None = None,
    ) -> LoRAModel:
        assert all(name.split(".")[-2] in ("lora_A", "lora_B") for name in tensors), "names are as in PEFT's files"
        return cls(lora_model_id, {name: tensor.to(device, dtype) for name, tensor in tensors.items()})


def vllm() -> dict[str, Mapping[str, object]]:
    """The modules of vLLM that the examples import."""
    EngineFactory.registry.clear()
    transfer = "vllm__distributed__weight_transfer__"
    return {
        f"{transfer}base": {"ParamMeta": ParamMeta, "WeightSource": WeightSource},
        f"{transfer}clients": {"HTTPVLLMWeightSyncClient": HTTPClient},
        f"{transfer}factory": {"WeightTransferEngineFactory": EngineFactory},
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
