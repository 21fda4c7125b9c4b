"""Compares a program under ours with the same under stock FSDP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from harness.adapter import STOCK
from torch.distributed.fsdp import ShardingStrategy

from . import program as ops
from .program import Program
from .references import Rounded, Simulated, Unsharded, gradient_errors, is_as_exact
from .run import Run, Trace, has_gradient_law
from .trained import start_another_job

_stock: dict[str, Trace] = {}


class Replicated(Run):
    """A run with FSDP1's NO_SHARD."""

    stock_sharding = ShardingStrategy.NO_SHARD


def run_stock(program: Program) -> str | None:
    """In a worker: run it with torch's own full sharding; the exception that it ends with, if any."""
    _stock.clear()
    _run_earlier_job(program, STOCK)
    trace = Run(program, STOCK).run()
    if program.strategy.local_steps is not None and trace.error is None:
        trace = Simulated(program, STOCK).run()  # stock has shown that the program is legal
    _stock[repr(program)] = trace
    return trace.error


def _run_earlier_job(program: Program, strategy: Any) -> None:
    """Run the program up to its first step in an earlier job, if it has one, and ignore the trace."""
    if program.second_job:
        first = next((at for at, op in enumerate(program.ops) if isinstance(op, ops.Step)), len(program.ops) - 1)
        Run(replace(program, ops=program.ops[: first + 1]), strategy).run()
        start_another_job()


def run_ours(program: Program) -> str | None:
    """In a worker: run it with its strategy; how that differs from stock, if it does."""
    _run_earlier_job(program, program.strategy)
    ours, stock, strategy = Run(program, program.strategy).run(), _stock[repr(program)], program.strategy
    if has_gradient_law(program) and ours.error is None:
        ours.wrong += gradient_errors(program, ours, stock)
    found = difference(program, ours, stock)
    if program.adapter != "fsdp2" and ours.error is not None:
        has_no_shards = strategy.levels[2] == "N" or (strategy.levels[2] == "I" and strategy.gpus_per_node == 1)
        if has_no_shards and Replicated(program, STOCK).run().says == ours.says:
            return None  # FSDP1 itself can't do this without shards
    if ours.error is not None or ours.replicas_differ or ours.wrong or _differing_fact(ours, stock):
        return found
    if strategy.local_steps is not None and program.precision is None:
        return found
    if _on_any_rank(found) and program.adapter != "fsdp2" and strategy.levels == "NNN" and program.inner is None:
        replicated = Replicated(program, STOCK).run()  # which NNN is, with all that is its own
        found = found if replicated.error is not None else difference(program, ours, replicated)
    if not _on_any_rank(found):
        return found
    if strategy.local_steps is not None:
        exact = Simulated(replace(program, precision=None), STOCK).run()
        return None if is_as_exact(ours, [stock], exact) else found
    exact = Unsharded(program, STOCK).run()
    if program.has_codecs:
        return found if exact.error is not None else _rounding_error(ours, exact)
    return None if is_as_exact(ours, [stock, Rounded(program, STOCK).run()], exact) else found


def _on_any_rank(found: str | None) -> bool:
    differs = torch.tensor(float(found is not None))
    dist.all_reduce(differs)
    return bool(differs)


def difference(program: Program, ours: Trace, stock: Trace) -> str | None:
    """In words, or None if there is none beyond rounding."""
    if ours.error is not None:
        return f"ours {ours.error}"
    if ours.replicas_differ:
        return "ranks have different weights"
    if found := "\n".join(ours.wrong) or _differing_fact(ours, stock):
        return found
    if program.has_codecs:
        return _rounding_error(ours, stock)
    bound = 3e-2 if program.has_half else 2e-4 if program.strategy.local_steps else 2e-5
    for name, theirs in stock.shown.items():
        if name not in ours.shown and program.strategy.local_steps:
            continue  # the second name of a tied weight, which only the simulation shows
        if name not in ours.shown or ours.shown[name].shape != theirs.shape:
            return f"{name} is {ours.shown.get(name)}, stock's {theirs}"
        distance = (ours.shown[name] - theirs).norm() / theirs.norm().clamp(min=1e-6)
        if not distance <= bound and not (theirs.isnan().any() and ours.shown[name].isnan().any()):
            return f"{name} differs by {distance:.3g}:\nours  {ours.shown[name]}\nstock {theirs}"
    return None


def _differing_fact(ours: Trace, stock: Trace) -> str | None:
    for name, theirs in stock.facts.items():
        own = ours.facts.get(name)
        # Ours may show parameters sharded already, and codecs round small gradients to zeros.
        may_differ = (name.endswith(": sharded") and own == "True") or (theirs, own) == ("values", "zeros")
        if own != theirs and not may_differ:
            return f"{name}: {own}, with stock {theirs}"
    return None


def _rounding_error(ours: Trace, stock: Trace) -> str | None:
    """Codecs may change at most a part of the way that the training has gone."""
    ends = [name for name in ours.shown if name.startswith("end")]
    # Values that have overflowed in both say nothing of rounding.
    ends = [name for name in ends if not (ours.shown[name].isnan().any() and stock.shown[name].isnan().any())]
    if not ends:
        return None
    start, end, end_of_ours = (
        torch.cat([trace.shown[when + name.removeprefix("end")].float().flatten() for name in ends])
        for trace, when in ((stock, "start"), (stock, "end"), (ours, "end"))
    )
    error, distance = (end_of_ours - end).norm(), (end - start).norm()
    if error <= 0.5 * distance + 1e-5 * end.norm():
        return None
    return f"the weights are {error:.3g} from stock's, which have gone {distance:.3g}"


def main(program: Program) -> None:
    """Run a program under torchrun and print how ours differs from stock."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    print(f"[rank {dist.get_rank()}] stock: {run_stock(program) or 'runs'}")
    print(f"[rank {dist.get_rank()}] ours: {run_ours(program) or 'equal to stock'}")
    dist.destroy_process_group()
