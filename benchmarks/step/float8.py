"""Linear layers that compute in float8, whose weights torchao casts to 8 bits before the gather, under ``fully_shard``.

Needs ``pip install torchao`` and a GPU of compute capability 8.9 or later; on a CPU torchao emulates the products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_zpp.bench.contenders import TorchFSDP


class Float8(TorchFSDP):
    """``fully_shard`` with torchao's float8 training of all layers but the head: ``fsdp2:float8-...``.

    Scales of all weights are computed after the step, by one all-reduce, as torchao recommends.
    """

    def _materialize(self, module: nn.Module, base: Any) -> None:
        super()._materialize(module, base)
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=self._task.device == "cpu")
        convert_to_float8_training(module, config=config, module_filter_fn=_is_in_a_layer)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        loss = super().step(tokens)
        precompute_float8_dynamic_scale_for_fsdp(self.model)
        return loss


def _is_in_a_layer(module: nn.Module, name: str) -> bool:
    """Return whether torchao is to convert a module: not the head, nor what was converted with its layer."""
    if name.endswith("lm_head") or isinstance(module.weight, DTensor):
        return False
    return all(size % 16 == 0 for size in module.weight.shape)  # as its products need it
