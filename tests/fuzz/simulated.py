"""Local steps by hand: every node trains on its own, unsharded and in fp64, and exchanges changes when they are due."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import program as ops
from .unsharded import Unsharded


class Simulated(Unsharded):
    """One run of a program with local steps on plain modules.

    Nodes exchange what is due before the next forward that trains, as ours do, so that none of them waits in a step.
    """

    def __init__(self, program: Any, strategy: Any) -> None:
        super().__init__(program, strategy)
        assert program.strategy.local_steps is not None
        self.config = program.strategy.local_steps
        self.group, self._groups = dist.new_subgroups(program.strategy.gpus_per_node)
        self.steps, self.has_stepped = 0, False
        self.agreed = {p: p.detach().clone() for model in self.models for p in model.parameters()}
        self.momentum = {p: torch.zeros_like(p) for p in self.agreed}
        self.on_their_way: list[tuple[float, Any, Tensor]] = []

    def averaging_ranks(self) -> dist.ProcessGroup | None:
        return self.group

    def run(self) -> Any:
        trace = super().run()
        for group in self._groups:
            if group is self.group:
                dist.destroy_process_group(group)
        return trace

    def do_microbatch(self, op: ops.MicroBatch) -> None:
        self._exchange_due()
        super().do_microbatch(op)

    def do_step(self, op: ops.Step) -> None:
        super().do_step(op)
        self.has_stepped = True

    def finish(self) -> None:
        self._exchange_due()
        self._arrive(float("inf"))
        everything = [p for fragments in self.fsdp_units() for fragment in fragments for p in fragment]
        self._send(everything, float("inf"))
        self._arrive(float("inf"), mix=1.0)

    def _exchange_due(self) -> None:
        if not self.has_stepped:
            return
        self.has_stepped = False
        self.steps += 1
        self._arrive(self.steps)
        for fragments in self.fsdp_units():
            for at in self.config.due(self.steps, len(fragments)):
                self._send(fragments[at], self.steps + self.config.overlap)
        self._arrive(self.steps)

    @torch.no_grad()
    def _send(self, parameters: list[Any], arrives: float) -> None:
        for p in parameters:
            mean = p.detach().clone()
            dist.all_reduce(mean)
            gradient = self.agreed[p] - mean / dist.get_world_size()
            self.momentum[p] = self.config.outer_momentum * self.momentum[p] + gradient
            ahead = gradient + self.config.outer_momentum * self.momentum[p]
            self.agreed[p] = self.agreed[p] - self.config.outer_lr * (
                ahead if self.config.nesterov else self.momentum[p]
            )
            self.on_their_way.append((arrives, p, self.agreed[p]))

    @torch.no_grad()
    def _arrive(self, step: float, mix: float | None = None) -> None:
        mix = self.config.mix if mix is None else mix
        for arrives, p, agreed in self.on_their_way:
            if arrives <= step:
                p.copy_(mix * agreed + (1 - mix) * p)
        self.on_their_way = [each for each in self.on_their_way if each[0] > step]
