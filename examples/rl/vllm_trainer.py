"""The trainer's side of vLLM's weight transfer: whole weights, or their changes in 4 bits. Written for vLLM 0.33.

Start the server with the engine of vllm_worker.py, and call on every rank of the training:

    engine = connect(model, "http://localhost:8000", "10.0.0.1", 29600, workers=2)
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
MERGED = {"dtype": DTYPE, "merged": True}
"""What engines are sent: weights in bf16, with adapters, if there are any, merged into them."""


class GatheredSource(WeightSource):
    """The weights of a sharded model, for vLLM's own trainer engines."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        """Gather once to learn names, dtypes and shapes; they stay the same."""
        return [ParamMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in self.iter_full()]

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors, on every rank."""
        return iter(gathered_weights(self._model, **MERGED))


def connect(
    model: nn.Module, url: str, address: str, port: int, workers: int, timeout: float = 300
) -> NCCLTrainerWeightTransferEngine:
    """Join the workers of a server over NCCL, as rank 0 before them.

    Args:
        model: The sharded model.
        url: The server.
        address: Where the workers reach this training's rank 0.
        port: A free port there.
        workers: The number of the server's workers, its ``tensor_parallel_size * data_parallel_size``.
        timeout: Seconds that the server may take for a call.
    """
    return NCCLTrainerWeightTransferEngine.trainer_init(
        NCCLTrainerInitInfo(address, port, workers + 1, rank=dist.get_rank()),
        client=HTTPVLLMWeightSyncClient(url, timeout),
        source=GatheredSource(model),
    )


def send_changes(engine: NCCLTrainerWeightTransferEngine, model: nn.Module, token: SyncToken) -> None:
    """Send what has changed since the last call with ``token``; the first one sends everything. Collective.

    Raises:
        RuntimeError: On every rank, if the server refuses an update. The next call then sends everything.
    """
    call = EngineCalls()
    call(engine.client.start_weight_update)
    for bucket in buckets(gathered_weights(model, since=token, **MERGED)):
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
