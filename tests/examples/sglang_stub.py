"""A stand-in for SGLang 0.5.23, which needs a GPU: a server with one worker, and what trainers import of it."""

from __future__ import annotations

import base64
import importlib
import pickle
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from engine_stubs import EngineModel, Routes


class SGLang:
    """A server's worker.

    Args:
        loaders: What ``--custom-weight-loader`` names.
        group: The worker's side of the group that ``init_weights_update_group`` makes.
    """

    def __init__(self, loaders: list[str], group: dist.ProcessGroup | None = None) -> None:
        self.model = EngineModel()
        self.adapters: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {}
        self.version: str | None = None
        self.flushed = 0
        self._loaders, self._group = loaders, group
        self._groups: dict[str, dist.ProcessGroup | None] = {}
        self._session = False

    def begin(self, selector: str = "all") -> None:
        self._session = True

    def end(self) -> None:
        self._session = False

    def from_tensor(
        self,
        serialized_named_tensors: list[str],
        load_format: str | None = None,
        flush_cache: bool = True,
        weight_version: str | None = None,
    ) -> None:
        self._check_session("update_weights_from_tensor")
        named = pickle.loads(base64.b64decode(serialized_named_tensors[0], validate=True))
        if load_format is None:
            self.model.load_weights(named)
        elif load_format in self._loaders:
            module, _, function = load_format.rpartition(".")
            getattr(importlib.import_module(module), function)(self.model, named)
        else:
            raise NotImplementedError(f"Unknown load_format={load_format}")
        self.version = weight_version
        self.flushed += flush_cache

    def init_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "weight_update_group",
        backend: str = "nccl",
    ) -> None:
        assert (rank_offset, world_size, backend) == (1, 2, "gloo")
        self._groups[group_name] = self._group

    def from_distributed(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str = "weight_update_group",
        flush_cache: bool = True,
    ) -> None:
        self._check_session("update_weights_from_distributed")
        weights = []
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.broadcast(weight, src=0, group=self._groups[group_name])
            weights.append((name, weight))
        self.model.load_weights(weights)
        self.flushed += flush_cache

    def load_adapter(self, lora_name: str, config_dict: dict[str, Any], serialized_named_tensors: list[str]) -> None:
        if lora_name in self.adapters:
            raise ValueError(f"LoRA adapter {lora_name} is loaded already")
        self.adapters[lora_name] = (config_dict, pickle.loads(base64.b64decode(serialized_named_tensors[0])))

    def unload_adapter(self, lora_name: str) -> None:
        del self.adapters[lora_name]

    def flush(self) -> None:
        self.flushed += 1

    def _check_session(self, call: str) -> None:
        if not self._session:
            raise RuntimeError(f"{call} must run between begin_weight_update() and end_weight_update()")

    def routes(self) -> Routes:
        return {
            "begin_weight_update": self.begin,
            "end_weight_update": self.end,
            "update_weights_from_tensor": self.from_tensor,
            "init_weights_update_group": self.init_group,
            "update_weights_from_distributed": self.from_distributed,
            "load_lora_adapter_from_tensors": self.load_adapter,
            "unload_lora_adapter": self.unload_adapter,
            "flush_cache": self.flush,
        }


def sglang(group: dist.ProcessGroup | None) -> dict[str, Mapping[str, object]]:
    """The module of SGLang that the trainer's example imports, whose group on rank 0 is ``group``."""
    return {"sglang__srt__utils": {"init_custom_process_group": lambda **arguments: group}}
