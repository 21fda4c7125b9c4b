"""What a program trains: sharded models, and optimizers of their units."""

from __future__ import annotations

from typing import Any

import torch
from harness import models as harness_models
from harness.adapter import Adapter
from harness.fsdp1 import Fsdp1
from harness.fsdp2 import Fsdp2
from torch import nn
from torch.distributed.fsdp import (
    MixedPrecision,
    MixedPrecisionPolicy,
)

from .modules import Net
from .program import Program

ADAPTERS: dict[str, Adapter] = {
    "fsdp1": Fsdp1(),
    "fsdp1 flat": Fsdp1(use_orig_params=False),
    "fsdp2": Fsdp2(),
}


class Trained:
    """The models and the optimizers of a program, sharded by stock FSDP or by ours."""

    def __init__(self, program: Program, strategy: Any) -> None:
        self.program, self.strategy = program, strategy
        self.adapter = ADAPTERS[program.adapter]
        self.is_fsdp1 = program.adapter != "fsdp2"
        self.models = [self.make(i, 0) for i in range(len(program.models))]
        self.optimizers = self.make_optimizers()

    def make(self, i: int, seed: int) -> Any:
        """A sharded model of the program, with weights of ``seed``."""
        torch.manual_seed(seed * 10 + i)
        spec = self.program.models[i]
        net = Net(spec).to(harness_models.device())
        arguments = self._arguments()
        for block, unit in enumerate(spec.units):
            if unit.wrapped:
                sharded = self.adapter.apply(net.blocks[block], self.strategy, **arguments)
                net.blocks[block] = sharded
        model = self.adapter.apply(net, self.strategy, **arguments)
        if self.program.zero_unused:
            model.set_reduce_scatter_unused_params(True)
        return model

    def _arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if self.is_fsdp1:
            arguments |= {"use_orig_params": self.adapter.use_orig_params, "device_id": harness_models.device()}
        if self.program.precision is not None:
            names = {"bf16": torch.bfloat16, "fp32": torch.float32, "none": None}
            param, reduce = (names[name] for name in self.program.precision.split())
            if self.is_fsdp1:
                arguments["mixed_precision"] = MixedPrecision(param_dtype=param, reduce_dtype=reduce)
            else:
                arguments["mp_policy"] = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
        return arguments

    def net(self, i: int) -> Net:
        """A model within its wrapper."""
        return next(module for module in self.models[i].modules() if isinstance(module, Net))

    def units(self, i: int) -> list[nn.Module]:
        """Its blocks, sharded or not, and itself at the end."""
        return [*self.net(i).blocks, self.models[i]]

    def parameters(self, i: int, unit: int) -> list[nn.Parameter]:
        """The trainable parameters of a block, or of what is in none."""
        blocks = self.net(i).blocks
        if unit < len(blocks):
            chosen = list(blocks[unit].parameters())
        else:
            others = {p for block in blocks for p in block.parameters()}
            chosen = [p for p in self.models[i].parameters() if p not in others]
        return [p for p in chosen if p.requires_grad]

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        """New optimizers for the units that each has."""
        made: list[torch.optim.Optimizer] = []
        # What is not used gets a gradient if errors are fed back, and would be decayed.
        decays = self.program.strategy.error_feedback is None
        for owned in self.program.optimizers:
            parameters = [p for i, unit in owned for p in self.parameters(i, unit)]
            if self.program.optimizer == "sgd":
                made.append(torch.optim.SGD(parameters, lr=0.2, momentum=0.5, weight_decay=0.1 * decays))
            else:  # a large epsilon, or rounding would decide where a gradient is near zero
                made.append(torch.optim.AdamW(parameters, lr=0.05, eps=0.01, weight_decay=0.3 * decays))
        return made
