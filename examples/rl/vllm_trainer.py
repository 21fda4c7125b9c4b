"""The trainer's side of vLLM's weight transfer. Written for vLLM 0.33.

Start the server with ``--weight-transfer-config '{"backend": "nccl"}'``, and call on every rank of the training:

    engine = connect(GatheredSource(model), "http://localhost:8000", "10.0.0.1", 29600, workers=2)
    for batch in batches:
        train(model, batch)
        engine.send_weights()
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

from fsdp_zpp import gathered_weights

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
