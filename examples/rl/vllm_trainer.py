"""The trainer's side of vLLM's weight transfer: whole weights, or their changes in 4 bits. Written for vLLM 0.33.

Start the server with the engine of vllm_worker.py, and call on every rank of the training:

    engine = connect(GatheredSource(model), "http://localhost:8000", "10.0.0.1", 29600, workers=2)
    token = SyncToken()
    for batch in batches:
        train(model, batch)
        send_changes(engine, model, token)

For a server with vLLM's own ``--weight-transfer-config '{"backend": "nccl"}'``, ``engine.send_weights()`` instead of
``send_changes`` sends whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import torch
import torch.distributed as dist
from engine_calls import EngineCalls, buckets
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

from fsdp_zpp import SyncToken, WeightUpdate, gathered_weights

DTYPE = torch.bfloat16


class GatheredSource(WeightSource):
    """The weights of a sharded model, for vLLM's own trainer engines.

    Args:
        model: The sharded model.
        merged: Whether it is a PEFT model, whose adapters are merged into what is sent.
    """

    def __init__(self, model: nn.Module, merged: bool = False) -> None:
        self._model, self._merged = model, merged

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        """Gather once to learn names, dtypes and shapes; they stay the same."""
        return [ParamMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in self.iter_full()]

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors, on every rank."""
        return iter(gathered_weights(self._model, dtype=DTYPE, merged=self._merged))


def connect(
    source: GatheredSource, url: str, address: str, port: int, workers: int, timeout: float = 300
) -> NCCLTrainerWeightTransferEngine:
    """Join the workers of a server over NCCL, as rank 0 before them.

    Args:
        source: What is sent.
        url: The server.
        address: Where the workers reach this training's rank 0.
        port: A free port there.
        workers: The number of the server's workers, its ``tensor_parallel_size * data_parallel_size``.
        timeout: Seconds that the server may take for a call.
    """
    return NCCLTrainerWeightTransferEngine.trainer_init(
        NCCLTrainerInitInfo(address, port, workers + 1, rank=dist.get_rank()),
        client=HTTPVLLMWeightSyncClient(url, timeout),
        source=source,
    )


def send_changes(
    engine: NCCLTrainerWeightTransferEngine, model: nn.Module, token: SyncToken, merged: bool = False
) -> None:
    """Send what has changed since the last call with ``token``; the first one sends everything. Collective.

    Args:
        engine: What :func:`connect` has returned.
        model: The sharded model.
        token: The token of this server.
        merged: Whether it is a PEFT model, whose adapters are merged into what is sent.

    Raises:
        RuntimeError: On every rank, if the server refuses an update. The next call then sends everything.
    """
    call = EngineCalls()
    call(engine.client.start_weight_update)
    for bucket in buckets(gathered_weights(model, since=token, dtype=DTYPE, merged=merged)):
        call(_broadcast, engine, bucket)
    call(engine.client.finish_weight_update, str(token.version))
    call.finish(token)


def _broadcast(engine: NCCLTrainerWeightTransferEngine, bucket: list[WeightUpdate]) -> None:
    """Announce updates as tensors that have headers for names, and broadcast them."""
    info = {
        "names": [update.header for update in bucket],
        "dtype_names": [str(update.data.dtype).removeprefix("torch.") for update in bucket],
        "shapes": [list(update.data.shape) for update in bucket],
    }
    with ThreadPoolExecutor(1) as pool:  # the server answers once its workers have what is broadcast meanwhile
        answer = pool.submit(engine.client.update_weights, info)
        packed_nccl_broadcast_producer(
            ((update.header, update.data) for update in bucket),
            engine.model_update_group,
            src=0,
            post_iter_func=lambda named: named[1],
            buffer_size_bytes=engine.packed_buffer_size_bytes,
            num_buffers=engine.packed_num_buffers,
        )
        answer.result()
