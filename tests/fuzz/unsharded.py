"""Runs a program without FSDP, in fp64: the judge where ours and stock differ by more than usual rounding.

Some programs magnify rounding (a layer norm of three nearly equal values, 16 bits over many steps), and now and then
stock is the one that is wrong. What counts is that ours is about as near to this run as stock is, or as a run with
rounding alone is, or nearer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import program as ops
from .modules import Net
from .run import Run, halved
from .trace import Trace

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

    def roots(self, i: int) -> list[Any]:
        net, spec = self.models[i], self.program.models[i]
        return list(net.blocks) if spec.rootless else [net]

    def call_block(self, i: int, unit: int, x: torch.Tensor, use: tuple[int, ...]) -> torch.Tensor:
        return super().call_block(i, unit, x.double(), use)

    @contextmanager
    def _micro_batch(self, sync: bool, op: ops.MicroBatch | None = None) -> Iterator[None]:
        yield

    def _restore(self, op: ops.MicroBatch) -> None:
        """Nothing is set."""

    def _last_of_pipeline(self, op: ops.MicroBatch, last: bool) -> None:
        """Nothing is synchronized."""

    def _recover(self) -> None:
        for model in self.models:
            model.zero_grad()

    def show_shards(self) -> None:
        """There are none."""

    def do_optimizersanew(self, op: ops.OptimizersAnew) -> None:
        self.optimizers = self.make_optimizers()

    def do_show(self, op: ops.Show) -> None:
        for i, model in enumerate(self.models):
            for name, p in model.named_parameters():
                self.trace.shown[f"op {self.number}: model {i} shows {name}"] = p.detach().clone()

    def do_tune(self, op: ops.Tune) -> None:
        if op.what == "divide factor":
            net, spec = self.models[op.model], self.program.models[op.model]
            if op.unit < len(spec.units) and (not spec.units[op.unit].wrapped or (spec.listed and op.unit < 2)):
                return
            chosen: set[Any] = set(self.units(op.model)[op.unit].parameters())
            if op.unit == len(spec.units):
                wrapped = zip(net.blocks, spec.units, strict=True)
                chosen -= {p for block, unit in wrapped if unit.wrapped for p in block.parameters()}
            elif spec.units[op.unit].nested:
                chosen -= set(net.blocks[op.unit].branches[0].parameters())
            self.factors |= dict.fromkeys(chosen, float(op.value))

    def _clip(self, model: nn.Module, norm: float) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), norm)

    def _forget_accumulated(self, units: Any, i: int) -> None:
        """Nothing but ``.grad`` holds gradients."""

    def show_weights(self, when: str) -> None:
        for i, model in enumerate(self.models):
            for name, value in model.state_dict().items():
                self.trace.shown[f"{when}: weight of model {i}: {name}"] = value.clone()

    def averaging_ranks(self) -> dist.ProcessGroup | None:
        """The ranks that average their gradients."""
        return dist.group.WORLD

    def after_backward(self) -> None:
        self._average()

    def _average(self) -> dict[nn.Parameter, Any]:
        """Average gradients over ranks; returns what they were on this rank."""
        group = self.averaging_ranks()
        own = {p: p.grad for model in self.models for p in model.parameters()}
        for p, gradient in own.items():
            used = torch.tensor(float(gradient is not None))
            total = torch.zeros_like(p) if gradient is None else gradient.clone()
            dist.all_reduce(used, group=group)
            dist.all_reduce(total, group=group)
            p.grad = total / self.factors.get(p, dist.get_world_size(group)) if used else None
        if self.is_fsdp1:
            self._fill_up()
        return own

    def _fill_up(self) -> None:
        """Give zeros to what a unit has not used of itself, as FSDP1's flat gradient does."""
        for unit in (unit for units in self.fsdp_units() for unit in units):
            if any(p.grad is not None for p in unit):
                for p in unit:
                    if p.grad is None and p.requires_grad:
                        p.grad = torch.zeros_like(p)

    def fsdp_units(self) -> list[list[list[nn.Parameter]]]:
        """For each model the parameters that are gathered together: the rest first, then each unit."""
        found = []
        for i, spec in enumerate(self.program.models):
            net = self.net(i)
            modules: list[nn.Module] = []
            for unit, block in zip(spec.units, net.blocks, strict=True):
                modules += [block.branches[0]] * unit.nested + [block] * unit.wrapped
            units, taken = [], set()
            for module in modules:
                units.append([p for p in module.parameters() if p not in taken])
                taken.update(units[-1])
            found.append([[p for p in net.parameters() if p not in taken], *units])
        return found

    def do_step(self, op: ops.Step) -> None:
        own = self._average()
        averaged = {p: p.grad.norm() for p in own if p.grad is not None}
        super().do_step(op)
        for p, gradient in own.items():
            # What is not cleared stays clipped, and no longer scaled.
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

    def do_loadinplace(self, op: ops.LoadInPlace) -> None:
        self.do_load(ops.Load("sharded"))

    def do_move(self, op: ops.Move) -> None:
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
    """Whether ours is about as near to the judge as the farthest other: all losses, and all weights of a moment.

    Of all ranks: one rank's losses may be near by chance. So may all of one other's be. Collective.
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
