"""References for runs that may differ from stock: unsharded in fp64, or with local steps by hand."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from harness.pool import device_type
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_zpp import Int4, Int8

from . import program as ops
from .modules import Net
from .program import Program
from .run import MARGIN, Run, Trace, halved
from .trained import OF_A_JOB, HeldParameter, held_parameters, reshard

NOT_FARTHER = 4.0
"""How many times as far from the judge as others ours may be."""


class Unsharded(Run):
    """One run of a program on plain modules, whose gradients ranks average before each step."""

    def make(self, i: int, seed: int) -> Any:
        torch.manual_seed(seed * 10 + i)
        net = Net(self.program.models[i]).double()
        net.register_forward_pre_hook(lambda module, args: (args[0].double(), *args[1:]))
        self.factors: dict[nn.Parameter, float] = {}
        return net

    def roots_of(self, model: Any) -> list[Any]:
        return list(model.blocks) if model.rootless else [model]

    def call_block(self, i: int, unit: int, x: torch.Tensor, use: tuple[int, ...]) -> torch.Tensor:
        return super().call_block(i, unit, x.double(), use)

    def micro_batch(self, op: ops.MicroBatch) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize_in_pipeline(self, op: ops.MicroBatch, last: bool) -> None:
        """Nothing is synchronized."""

    def _recover(self) -> None:
        for model in self.models:
            model.zero_grad()

    def show_shards(self) -> None:
        """There are none."""

    def do_remake_optimizers(self, op: ops.Event) -> None:
        self.optimizers = self.make_optimizers()

    def do_show(self, op: ops.Event) -> None:
        for i, model in enumerate(self.models):
            for name, p in model.named_parameters():
                self.trace.shown[f"op {self.number}: model {i} shows {name}"] = p.detach().clone()

    def do_tune(self, op: ops.Tune) -> None:
        net, spec = self.models[op.model], self.program.models[op.model]
        is_root = op.unit == len(spec.units)
        no_unit = not is_root and (not spec.units[op.unit].wrapped or (spec.listed and op.unit < 2))
        if op.what != "divide factor" or no_unit:
            return
        if is_root:
            inner = [block for block, unit in zip(net.blocks, spec.units, strict=True) if unit.wrapped]
        else:
            inner = [net.blocks[op.unit].branches[0]] if spec.units[op.unit].nested else []
        others = {p for module in inner for p in module.parameters()}
        own = [p for p in self.units(op.model)[op.unit].parameters() if p not in others]
        self.factors |= dict.fromkeys(own, float(op.value))

    def clip(self, model: nn.Module, norm: float) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), norm)

    def _forget_accumulated(self, units: Any, i: int) -> None:
        """Nothing but ``.grad`` holds gradients."""

    def show_weights(self, when: str) -> None:
        for i, model in enumerate(self.models):
            for name, value in model.state_dict().items():
                self.trace.shown[f"{when}: weight of model {i}: {name}"] = value.clone()

    def after_backward(self) -> None:
        self._average()

    def _average(self) -> dict[nn.Parameter, Any]:
        """Average gradients over ranks; return those of this rank."""
        own = {p: p.grad for model in self.models for p in model.parameters()}
        for p, gradient in own.items():
            used = torch.tensor(float(gradient is not None))
            total = torch.zeros_like(p) if gradient is None else gradient.clone()
            dist.all_reduce(used)
            dist.all_reduce(total)
            p.grad = total / self.factors.get(p, dist.get_world_size()) if used else None
        for unit in (unit for units in self.fsdp_units() for unit in units) if self.is_fsdp1 else ():
            if any(p.grad is not None for p in unit):
                for p in unit:  # FSDP1's flat gradient has zeros where a unit has not used a parameter
                    if p.grad is None and p.requires_grad:
                        p.grad = torch.zeros_like(p)
        return own

    def fsdp_units(self) -> list[list[list[nn.Parameter]]]:
        """Return for each model the parameters that are gathered together: the rest first, then each unit."""
        found = []
        for i, spec in enumerate(self.program.models):
            net, modules, units, taken = self.net(i), [], [], set[nn.Parameter]()
            for unit, block in zip(spec.units, net.blocks, strict=True):
                modules += [block.branches[0]] * unit.nested + [block] * unit.wrapped
            for module in (*modules, net):
                units.append([p for p in module.parameters() if p not in taken])
                taken.update(units[-1])
            found.append([units[-1], *units[:-1]])
        return found

    def do_step(self, op: ops.Step) -> None:
        own = self._average()
        averaged = {p: p.grad.norm() for p in own if p.grad is not None}
        super().do_step(op)
        for p, gradient in own.items():
            # A gradient that is not cleared stays clipped, and no longer scaled.
            if gradient is not None and p.grad is not None and averaged[p] > 0 and averaged[p].isfinite():
                gradient = gradient * (p.grad.norm() / averaged[p])
            p.grad = gradient

    @torch.no_grad()
    def do_write(self, op: ops.Write) -> None:
        for model in self.models:
            for p in model.parameters():
                p.mul_(0.75)

    def do_load(self, op: ops.Load) -> None:
        for model in self.models:
            model.load_state_dict(halved(model.state_dict()))
        if op.assign:
            self.optimizers = self.make_optimizers()

    def do_load_in_place(self, op: ops.Event) -> None:
        self.do_load(ops.Load("sharded"))

    def do_move(self, op: ops.Event) -> None:
        """Changes no value."""


class Rounded(Unsharded):
    """One whose reduced gradients are off by as much as rounding may be: how far that alone leads from the judge."""

    def _average(self) -> dict[nn.Parameter, Any]:
        own = super()._average()
        # The same on all ranks.
        generator = torch.Generator().manual_seed(self.number)
        for p in own:
            if p.grad is not None:
                noise = torch.rand(p.shape, generator=generator, dtype=p.dtype)
                p.grad = p.grad * (1 + self.program.rounding * (2 * noise - 1))
        return own


def is_as_exact(ours: Trace, others: Sequence[Trace], exact: Trace) -> bool:
    """Return whether ours is about as near to the judge as the farthest other: all losses, and weights of a moment.

    All ranks are taken together, since one rank's losses may be near by chance, as may all of one other's. Collective.
    """
    if exact.error is not None:
        return False
    far: dict[str, list[float]] = defaultdict(lambda: [0.0] * (len(others) + 2))
    for name in others[0].shown:  # stock, which names tied weights once
        truth = exact.shown[name]
        moment = name.partition(" weight")[0] if " weight" in name else "losses"
        distances = [truth, *(trace.shown[name].double() - truth for trace in (ours, *others))]
        far[moment] = [before + each.square().sum().item() for before, each in zip(far[moment], distances, strict=True)]
    total = torch.tensor(list(far.values()), dtype=torch.float64)
    dist.all_reduce(total)
    return all(own <= NOT_FARTHER * max(rest) + 1e-6 * size for size, own, *rest in total.sqrt().tolist())


ERROR = {Int8: 1 / 254, Int4: 1 / 14}
"""A codec's error, as a share of the largest value of a block."""


class Measured(Unsharded):
    """Runs a program up to the first step that finds gradients, and measures the largest ones on any rank."""

    def __init__(self, program: Program, strategy: Any) -> None:
        super().__init__(program, strategy)
        self.largest = {p: torch.zeros(()) for model in self.models for p in model.parameters()}

    def measure(self) -> dict[str, float]:
        """Return, by names of gradients, the largest value in a parameter's blocks, summed over micro-batches.

        It is 0 for exact parameters.
        """
        for number, op in enumerate(self.program.ops):
            if isinstance(op, ops.Step):
                # No rank has a gradient after a micro-batch that has failed.
                found = torch.tensor(float(any(p.grad is not None for p in self.largest)))
                dist.all_reduce(found, op=dist.ReduceOp.MAX)
                if found:
                    break
                continue
            before = {p: 0 if p.grad is None else p.grad.clone() for p in self.largest}
            self.do(number, op)
            if op == ops.Event("resume"):
                self.largest = {p: torch.zeros(()) for model in self.models for p in model.parameters()}
            elif isinstance(op, ops.MicroBatch):
                for p in self.largest:
                    largest = torch.zeros(()) if p.grad is None else (p.grad - before[p]).abs().max().float()
                    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
                    self.largest[p] += largest
        shared = {}
        for spec, (rest, *units) in zip(self.program.models, self.fsdp_units(), strict=True):
            if spec.listed:
                units = [units[0] + units[1], *units[2:]]
            for unit in (rest, *units):
                largest = max((float(self.largest[p]) for p in unit if p.ndim > 1), default=0.0)
                shared |= {p: largest * (p.ndim > 1) for p in unit}
        return {
            f"gradient of model {i}: {name}": shared[p]
            for i, model in enumerate(self.models)
            for name, p in model.named_parameters(remove_duplicate=False)
        }


def gradient_errors(program: Program, ours: Trace, stock: Trace) -> list[str]:
    """Return the gradients of the first step that are farther from stock's than codecs explain. Collective."""
    shared = Measured(program, None).measure()
    hops = [ERROR.get(type(codec), 0.0) for codec in program.strategy.gradient_codecs]
    # Replicas of the optimizer state gather the mean, which is encoded again.
    share = sum(hops) * (1 if program.strategy.optimizer == "G" else 2) * MARGIN
    wrong = []
    for name, theirs in stock.gradients.items():
        error = float((ours.gradients[name] - theirs).abs().max()) if name in ours.gradients else float("inf")
        if not error <= share * shared[name] + 1e-5 * (1 + float(theirs.abs().max())) and theirs.isfinite().all():
            wrong.append(f"{name} is {error:.3g} from stock's, with blocks of values up to {shared[name]:.3g}")
    return wrong


class Weight:
    """A parameter that nodes train on their own."""

    def __init__(self, held: HeldParameter) -> None:
        self.held = held
        self.agreed = held.values.clone()  # between nodes, for what this rank holds
        self.momentum = torch.zeros_like(self.agreed)  # of the outer steps
        self.is_due = False  # trained since its last exchange
        self.was_trained = False  # ever


class Simulated(Run):
    """One run of a program with local steps, by stock FSDP within each node.

    Nodes exchange what is due before the next forward that trains, as ours do, so that none of them waits in a step.
    """

    def __init__(self, program: Any, strategy: Any) -> None:
        assert program.strategy.local_steps is not None
        self.config, gpus = program.strategy.local_steps, program.strategy.gpus_per_node
        self.node, self.peers = _groups(program.world, gpus)
        super().__init__(program, strategy)
        self.weights = [[list(map(Weight, unit)) for unit in held_parameters(model)] for model in self.models]
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
            if self.steps < self.config.start:
                self._average_gradients()
            self._note_trained()

    def do_step(self, op: ops.Step) -> None:
        self._note_trained()
        super().do_step(op)
        self.has_stepped = True
        self._reshard()  # what reentrant checkpointing leaves unsharded would stay as it was before the step

    def _reshard(self) -> None:
        for model in self.models:
            reshard(model, self.strategy)

    def _note_trained(self) -> None:
        for weight in self._all():
            weight.is_due |= weight.held.is_trained
            weight.was_trained |= weight.is_due

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

    def finish(self) -> None:
        self._exchange_due()
        if self.steps < self.config.start:
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
            weight.agreed = weight.agreed - self.config.outer_lr * ahead
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
            # Weights that nobody trains any more would be left to differ.
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
