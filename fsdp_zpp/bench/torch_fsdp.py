"""Training under torch's FSDPs, with torch's strategies or those of fsdp_zpp.

[Note: Equal terms]
All compute and communicate in bf16 and have fp32 master weights in full training; one unit for each decoder layer and
one for the rest, or one for all (``once-...``); fused AdamW. With LoRA the base is in bf16 and the adapters in fp32,
except under torch's own FSDP1, which flattens frozen and trainable parameters together and so wants one dtype. Layers
are made and sharded one by one, so that no rank ever holds the model.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard as torch_fully_shard,
)

from fsdp_zpp.adapters.fsdp2 import fully_shard
from fsdp_zpp.frozen.quantize import quantize_frozen_params
from fsdp_zpp.runtime.api import traffic

from .contenders import HSDP, Contender
from .materialize import materialize
from .models import base_of, layer_places, network, prepare
from .task import Task
from .training import Training


class TorchFSDP(Training):
    """A model under a contender's strategy: ``fully_shard``, or ``FullyShardedDataParallel``.

    Attributes:
        model: The sharded model.
        optimizer: AdamW over the trainable parameters.
    """

    def __init__(self, task: Task, contender: Contender):
        torch.manual_seed(0)
        if task.compile:
            # Graphs of earlier contenders would count toward the number that a function may have.
            torch._dynamo.reset()
        self._task, self._contender, self._strategy = task, contender, contender.strategy
        self._mesh = self._make_mesh()
        self.model = self._build()
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=1e-4, fused=task.device == "cuda")

    def _make_mesh(self) -> DeviceMesh | None:
        """Make the mesh that the strategy shards over, if it does not find that out by itself."""
        task = self._task
        if self._contender.preset == HSDP:
            shape = (task.nodes, task.gpus_per_node)
            return init_device_mesh(task.device, shape, mesh_dim_names=("replicate", "shard"))
        return init_device_mesh(task.device, (dist.get_world_size(),)) if self._contender.fsdp2 else None

    def _build(self) -> nn.Module:
        """Build the model, layer by layer."""
        contender = self._contender
        model = network(self._task, one_dtype=contender.is_torchs and not contender.fsdp2)
        base = base_of(model)
        for stack, index in list(layer_places(model)):
            self._materialize(stack[index], base)
            prepare(self._task, stack, index)
            if contender.base is None:
                stack[index] = self._shard(stack[index])
        self._materialize(model, base)
        return self._shard(model)

    def _materialize(self, module: nn.Module, base: Any) -> None:
        """Give values to a module, and quantize its part of a base."""
        materialize(module, base, self._task.place)
        if self._contender.base is not None:
            quantize_frozen_params(module, self._contender.base)

    def _shard(self, module: nn.Module) -> nn.Module:
        """Shard one unit, by fsdp_zpp for a Strategy and by torch for torch's."""
        half = torch.bfloat16
        if not self._contender.fsdp2:
            return FullyShardedDataParallel(
                module,
                sharding_strategy=self._strategy,
                mixed_precision=MixedPrecision(half, half, half),
                device_id=self._task.place,
                device_mesh=self._mesh,
                use_orig_params=True,
            )
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half)
        if self._contender.is_torchs:
            torch_fully_shard(module, mesh=self._mesh, mp_policy=policy)
        else:
            fully_shard(module, strategy=self._strategy, mesh=self._mesh, mp_policy=policy)
        return module

    def accumulating(self, accumulates: bool) -> AbstractContextManager[Any]:
        """Return a context that keeps gradients local, if ``accumulates``."""
        if isinstance(self.model, FullyShardedDataParallel):
            return self.model.no_sync() if accumulates else nullcontext()
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(not accumulates)
        return nullcontext()

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        for index, micro_batch in enumerate(tokens):
            with self.accumulating(index < len(tokens) - 1):
                loss: torch.Tensor = self.model(input_ids=micro_batch, labels=micro_batch).loss
                loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def sent(self) -> dict[str, int] | None:
        if self._contender.is_torchs:
            return None
        return {f"{kind} {hop}": sent for kind, hops in traffic(self.model).items() for hop, sent in hops.items()}
