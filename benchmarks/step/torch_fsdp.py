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
from models import Task, base_of, materialize, network, prepare
from strategies import STRATEGIES, base_codec
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard as torch_fully_shard,
    register_fsdp_forward_method,
)
from training import Training

from fsdp_zpp import Strategy, fully_shard, quantize_frozen_params, traffic


class TorchFSDP(Training):
    """FullyShardedDataParallel, or fully_shard for a name with ``fsdp2:``.

    Attributes:
        model: The sharded model.
        optimizer: AdamW over the trainable parameters.
    """

    def __init__(self, task: Task, name: str):
        torch.manual_seed(0)
        self._task, self._fsdp2 = task, name.startswith("fsdp2:")
        self._strategy = STRATEGIES[name.removeprefix("fsdp2:")]
        self._in_one_unit = "once-" in name
        self._base_codec = base_codec(name)
        self._mesh = self._make_mesh()
        self.model = self._build()
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=1e-4, fused=task.device == "cuda")

    def _make_mesh(self) -> DeviceMesh | None:
        """Make the mesh that the strategy shards over, if it does not find that out by itself."""
        task = self._task
        if self._strategy is ShardingStrategy.HYBRID_SHARD:
            shape = (task.nodes, task.gpus_per_node)
            return init_device_mesh(task.device, shape, mesh_dim_names=("replicate", "shard"))
        return init_device_mesh(task.device, (dist.get_world_size(),)) if self._fsdp2 else None

    def _build(self) -> nn.Module:
        """Build the model, layer by layer."""
        is_torchs_fsdp1 = not self._fsdp2 and not isinstance(self._strategy, Strategy)
        model = network(self._task, one_dtype=is_torchs_fsdp1)
        layers = base_of(model).model.layers
        for index, layer in enumerate(layers):
            self._materialize(layer)
            prepare(self._task, layers, index)
            if not self._in_one_unit:
                layers[index] = self._shard(layers[index])
        self._materialize(model)
        return self._shard(model)

    def _materialize(self, module: nn.Module) -> None:
        """Give values to a module, and quantize its part of a base."""
        materialize(module, self._task.place)
        if self._base_codec is not None:
            quantize_frozen_params(module, self._base_codec)

    def _shard(self, module: nn.Module) -> nn.Module:
        """Shard one unit, by fsdp_zpp for a Strategy and by torch for torch's."""
        half = torch.bfloat16
        if not self._fsdp2:
            return FullyShardedDataParallel(
                module,
                sharding_strategy=self._strategy,
                mixed_precision=MixedPrecision(half, half, half),
                device_id=self._task.place,
                device_mesh=self._mesh,
                use_orig_params=True,
            )
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half)
        if isinstance(self._strategy, Strategy):
            return fully_shard(module, strategy=self._strategy, mesh=self._mesh, mp_policy=policy)
        return torch_fully_shard(module, mesh=self._mesh, mp_policy=policy)

    def accumulating(self, accumulates: bool) -> AbstractContextManager[Any]:
        """Return a context that keeps gradients local, if ``accumulates``."""
        if isinstance(self.model, FullyShardedDataParallel):
            return self.model.no_sync() if accumulates else nullcontext()
        self.model.set_requires_gradient_sync(not accumulates)
        return nullcontext()

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        for index, micro_batch in enumerate(tokens):
            with self.accumulating(index < len(tokens) - 1):
                loss = self.model(input_ids=micro_batch, labels=micro_batch).loss
                loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def sent(self) -> dict[str, int] | None:
        if not isinstance(self._strategy, Strategy):
            return None
        return {f"{kind} {hop}": sent for kind, hops in traffic(self.model).items() for hop, sent in hops.items()}

    def generate(self, prompt: torch.Tensor, tokens: int) -> torch.Tensor:
        context: AbstractContextManager[Any] = nullcontext()
        # generate() calls the model past FSDP's wrapper, which holds the root's own parameters.
        if isinstance(self.model, FullyShardedDataParallel):
            context = FullyShardedDataParallel.summon_full_params(self.model, recurse=False, writeback=False)
        else:
            register_fsdp_forward_method(self.model, "generate")
        options = {"do_sample": False, "use_cache": True, "pad_token_id": 0}
        self.model.eval()
        with torch.no_grad(), context:
            return self.model.generate(input_ids=prompt, min_new_tokens=tokens, max_new_tokens=tokens, **options)
