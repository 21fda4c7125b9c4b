"""The trainer's side of SGLang's weight updates: whole weights, and adapters. Written for SGLang 0.5.23.

Call on every rank of the training:

    group = connect("http://localhost:30000", "10.0.0.1", 29600, workers=2)
    for batch in batches:
        train(model, batch)
        send_weights("http://localhost:30000", model, group)
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import requests
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_zpp import gathered_weights

DTYPE = torch.bfloat16
TIMEOUT = 300
BUCKET = 256 * 2**20
"""Bytes that are announced at a time."""
NAMED = "fsdp_zpp"
"""The name of the group."""


class EngineCalls:
    """Calls of an engine by rank 0 in the course of a pass, which every rank iterates to its end.

    After the first call that fails, no more are made; the other ranks would hang if rank 0 raised before the end.
    """

    def __init__(self) -> None:
        self._refusal: str | None = None

    def __call__(self, call: Callable[..., object], *arguments: object) -> None:
        """Call the engine, if this is rank 0 and nothing has failed."""
        if dist.get_rank() or self._refusal is not None:
            return
        try:
            call(*arguments)
        except requests.RequestException as error:
            self._refusal = f"{error} {'' if error.response is None else error.response.text}"

    def finish(self) -> None:
        """Raise on every rank if a call has failed."""
        refusals = [self._refusal]
        dist.broadcast_object_list(refusals, src=0)
        if refusals[0] is not None:
            raise RuntimeError(f"the engine did not take the weights: {refusals[0]}")


def connect(url: str, address: str, port: int, workers: int, backend: str = "nccl") -> dist.ProcessGroup | None:
    """Join the workers of a server, as rank 0 before them; return the group on rank 0, and None on other ranks.

    Args:
        url: The server.
        address: Where the workers reach this training's rank 0.
        port: A free port there.
        workers: The number of the server's workers, its ``tp_size``.
        backend: The backend of the group.
    """
    if dist.get_rank():
        return None
    from sglang.srt.utils import init_custom_process_group

    rendezvous = {"world_size": workers + 1, "group_name": NAMED, "backend": backend}
    where = {"master_address": address, "master_port": port, "rank_offset": 1}
    with ThreadPoolExecutor(1) as pool:  # the server answers once all have joined
        answer = pool.submit(_post, url, "init_weights_update_group", **where, **rendezvous)
        group = init_custom_process_group(init_method=f"tcp://{address}:{port}", rank=0, **rendezvous)
        answer.result()
    return group


def send_weights(url: str, model: nn.Module, group: dist.ProcessGroup | None, merged: bool = False) -> None:
    """Send whole tensors over the group of :func:`connect`. Collective.

    Args:
        url: The server.
        model: The sharded model.
        group: The group.
        merged: Whether it is a PEFT model, whose adapters are merged into what is sent.
    """
    call = EngineCalls()
    call(_post, url, "begin_weight_update")
    for bucket in _whole_buckets(gathered_weights(model, dtype=DTYPE, merged=merged)):
        call(_broadcast, url, bucket, group)
    call(_post, url, "end_weight_update")
    call.finish()


def send_adapter(url: str, model: nn.Module, config: dict[str, Any], name: str, workers: int = 1) -> None:
    """Send the LoRA adapter of a PEFT model, which replaces that of the name. Collective.

    Args:
        url: The server, started with ``--enable-lora``.
        model: The sharded model.
        config: PEFT's ``adapter_config.json``.
        name: The name under which requests find the adapter.
        workers: The number of the server's workers, its ``tp_size``.
    """
    call = EngineCalls()
    adapter = {key: tensor.cpu() for key, tensor in gathered_weights(model, dtype=DTYPE, adapters_only=True)}
    call(_unload, url, name)
    copies = [_pickled(adapter)] * workers
    fields = {"lora_name": name, "config_dict": config, "serialized_named_tensors": copies}
    call(partial(_post, url, "load_lora_adapter_from_tensors", **fields))
    call.finish()


def _whole_buckets(weights: Iterator[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    bucket: list[tuple[str, Tensor]] = []
    for named in weights:
        bucket.append(named)
        if sum(tensor.nbytes for _, tensor in bucket) >= BUCKET:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _broadcast(url: str, bucket: list[tuple[str, Tensor]], group: dist.ProcessGroup) -> None:
    fields = {
        "names": [name for name, _ in bucket],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
        "group_name": NAMED,
    }
    with ThreadPoolExecutor(1) as pool:  # the server answers once its workers have what is broadcast meanwhile
        answer = pool.submit(_post, url, "update_weights_from_distributed", **fields)
        for _, tensor in bucket:
            dist.broadcast(tensor.contiguous(), src=0, group=group)
        answer.result()


def _pickled(tensors: object) -> str:
    """Return tensors as SGLang's ``MultiprocessingSerializer`` reads them, with their values rather than handles."""
    return base64.b64encode(pickle.dumps(tensors)).decode()


def _unload(url: str, name: str) -> None:
    """Unload an adapter; that there is none yet is no error."""
    requests.post(f"{url}/unload_lora_adapter", json={"lora_name": name}, timeout=TIMEOUT)


def _post(url: str, path: str, **fields: object) -> None:
    requests.post(f"{url}/{path}", json=fields, timeout=TIMEOUT).raise_for_status()
