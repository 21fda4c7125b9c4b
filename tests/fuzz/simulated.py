"""Local steps by hand: every node trains with stock FSDP on its own, and exchanges changes when they are due."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from harness.pool import device_type
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import program as ops, stock
from .run import Run
from .trained import OF_A_JOB


class Weight:
    """A parameter that nodes train on their own.

    Args:
        held: What this rank holds of it.

    Attributes:
        agreed: What nodes have agreed on for that.
        momentum: Of the outer steps.
        is_due: Whether it was trained since its last exchange.
        was_trained: Whether it ever was.
    """

    def __init__(self, held: stock.HeldParameter) -> None:
        self.held = held
        self.agreed = held.values.clone()
        self.momentum = torch.zeros_like(self.agreed)
        self.is_due = self.was_trained = False

    def note_trained(self) -> None:
        """Note what a step changes."""
        self.is_due |= self.held.is_trained
        self.was_trained |= self.is_due


class Simulated(Run):
    """One run of a program with local steps, by stock FSDP within each node.

    Nodes exchange what is due before the next forward that trains, as ours do, so that none of them waits in a step.
    """

    def __init__(self, program: Any, strategy: Any) -> None:
        assert program.strategy.local_steps is not None
        self.config, gpus = program.strategy.local_steps, program.strategy.gpus_per_node
        self.node, self.peers = _groups(program.world, gpus)
        super().__init__(program, strategy)
        self.weights = [[list(map(Weight, unit)) for unit in stock.held(model)] for model in self.models]
        self.steps, self.has_stepped = 0, False
        self.on_their_way: list[tuple[float, Weight, Tensor]] = []

    def arguments(self) -> dict[str, Any]:
        arguments = super().arguments()
        if not self.is_fsdp1:
            return arguments | {"mesh": DeviceMesh.from_group(self.node, device_type())}
        # It changes no value, but hides gradients where nothing is sharded.
        return arguments | {"process_group": self.node, "forward_prefetch": False}

    def do_microbatch(self, op: ops.MicroBatch) -> None:
        self._exchange_due()
        super().do_microbatch(op)
        if op.sync:
            if self.config.is_synchronous(self.steps):
                self._average_gradients()
            self._note_trained()

    def do_step(self, op: ops.Step) -> None:
        self._note_trained()
        super().do_step(op)
        self.has_stepped = True
        self._reshard()  # what reentrant checkpointing leaves unsharded would stay as it was before the step

    def _reshard(self) -> None:
        for model in self.models:
            stock.reshard(model, self.strategy)

    def _note_trained(self) -> None:
        for weight in self._all():
            weight.note_trained()

    def _all(self) -> list[Weight]:
        return [weight for units in self.weights for unit in units for weight in unit]

    @torch.no_grad()
    def _average_gradients(self) -> None:
        """Reduce over nodes; gradients of an earlier backward of the step are the same on all of them already."""
        for weight in self._all():
            parameter = weight.held.parameter
            used = torch.tensor(float(parameter.grad is not None))
            dist.all_reduce(used, group=self.peers)
            if not used:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._average(parameter.grad)

    def _average(self, values: Any) -> None:
        values = values.to_local() if isinstance(values, DTensor) else values
        mean = values.float()
        dist.all_reduce(mean, group=self.peers)
        values.copy_(mean / dist.get_world_size(self.peers))

    @torch.no_grad()
    def _average_states(self) -> None:
        """What optimizers keep, of parameters of which any node keeps something."""
        for optimizer in self.optimizers:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                state = optimizer.state.get(parameter, {})
                names: list[Any] = [None] * dist.get_world_size(self.peers)
                moments = [name for name, value in state.items() if isinstance(value, Tensor) and value.ndim]
                dist.all_gather_object(names, (moments, float(state.get("step", 0))), group=self.peers)
                for name in dict.fromkeys(name for each, _ in names for name in each):
                    if state.get(name) is None:
                        optimizer.state[parameter][name] = torch.zeros_like(parameter)
                    self._average(optimizer.state[parameter][name])
                if (steps := max(each for _, each in names)) and "step" in state:
                    state["step"] = torch.tensor(steps) if isinstance(state["step"], Tensor) else steps

    def finish(self) -> None:
        self._exchange_due()
        if self.config.is_synchronous(self.steps):
            return
        self._arrive(float("inf"))
        self._note_trained()
        self._send(self._all(), float("inf"))
        self._arrive(float("inf"), mix=1.0)

    def _exchange_due(self) -> None:
        if not self.has_stepped:
            return
        self.has_stepped = False
        self.steps += 1
        if self.config.has_stopped(self.steps):
            if self.steps == self.config.stop:
                self._arrive(float("inf"), self.config.mix)
                self._send(self._all(), float("inf"))
                self._arrive(float("inf"), mix=1.0)
                self._average_states()
            return
        self._arrive(self.steps)
        for units in self.weights:
            trained = [unit for unit in units if any(weight.was_trained for weight in unit)]
            for at in self.config.due(self.steps, len(trained)):
                if self.steps <= self.config.start:
                    self._warm_up(trained[at])
                    continue
                self._arrive(self.steps, of=trained[at])  # before it is sent once more
                self._send(trained[at], self.steps + self.config.overlap)
        self._arrive(self.steps)
        if self.steps == self.config.start:
            for weight in self._all():
                weight.agreed, weight.is_due = weight.held.values.clone(), False

    def _warm_up(self, weights: list[Weight]) -> None:
        for weight in weights:
            if weight.is_due:
                held = weight.held.values.clone()
                weight.momentum = self.config.outer_momentum * weight.momentum + weight.agreed - held
                weight.agreed, weight.is_due = held, False

    @torch.no_grad()
    def _send(self, weights: list[Weight], arrives: float) -> None:
        """Exchange what is due: nothing else differs between nodes, or is to be set back when it arrives."""
        for weight in weights:
            due = torch.tensor(float(weight.is_due))
            dist.all_reduce(due, group=self.peers)
            if not due:
                continue
            mean = weight.held.values.clone()
            dist.all_reduce(mean, group=self.peers)
            change = weight.agreed - mean / dist.get_world_size(self.peers)
            weight.momentum = self.config.outer_momentum * weight.momentum + change
            ahead = change + self.config.outer_momentum * weight.momentum
            step = ahead if self.config.nesterov else weight.momentum
            weight.agreed = weight.agreed - self.config.outer_lr * step
            weight.is_due = False
            self.on_their_way.append((arrives, weight, weight.agreed))

    @torch.no_grad()
    def _arrive(self, step: float, mix: float | None = None, of: list[Weight] | None = None) -> None:
        early = list(map(id, of or ()))
        arriving = [each for each in self.on_their_way if each[0] <= step or id(each[1]) in early]
        self.on_their_way = [each for each in self.on_their_way if each[0] > step and id(each[1]) not in early]
        if arriving:
            self._reshard()
        for _, weight, agreed in arriving:
            # What nobody trains any more would be left to differ.
            share = mix if mix is not None else self.config.mix if weight.held.is_trained else 1.0
            weight.held.values.lerp_(agreed, share)
            weight.is_due |= share != 1


@functools.cache  # DTensors remember meshes of these ranks, so that their groups must stay
def _groups(world: int, gpus: int) -> tuple[Any, Any]:
    """This rank's node, and those with its local index. Collective."""
    node, _ = dist.new_subgroups(gpus)
    peers, _ = dist.new_subgroups_by_enumeration([list(range(index, world, gpus)) for index in range(gpus)])
    return node, peers


OF_A_JOB.append(_groups)
