"""What modules show of their parameters, and optimizers that are made of it."""

from __future__ import annotations

from typing import Any

from harness.adapter import original_name
from torch.distributed.tensor import DTensor

from . import program as ops
from .forwards import Forwards


class Showing(Forwards):
    """A training that is looked at, without resharding what it is looked at for."""

    def do_show(self, op: ops.Show) -> None:
        for i, model in enumerate(self.models):
            for name, p in model.named_parameters():
                # Ours wraps what is frozen of a unit in a unit of its own, which names show.
                key = f"op {self.number}: model {i} shows {original_name(name)}"
                self.trace.facts[f"{key}: trainable"] = str(p.requires_grad)
                if self.is_fsdp1:
                    continue
                self.trace.facts[f"{key}: sharded"] = str(isinstance(p, DTensor))
                self.trace.facts[f"{key}: shape"] = str(tuple(p.shape))
                value: Any = p.full_tensor() if isinstance(p, DTensor) else p
                if not self.program.has_codecs:  # of which unsharded parameters show what was decoded
                    self.trace.shown[key] = value.detach().clone().float().cpu()

    def do_optimizersanew(self, op: ops.OptimizersAnew) -> None:
        if not self.is_fsdp1:
            for i in range(len(self.models)):
                for root in self.roots(i):
                    root.reshard()  # which torch, too, leaves unsharded after a forward
        self.optimizers = self.make_optimizers()
