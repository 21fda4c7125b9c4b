"""The row that a plan chooses, and the reason; a row is one strategy with its figures.

The fastest row that fits wins (PaRO, section 3.4). Rows within :data:`TOLERANCE` of it are equally fast: of these, the
one with the least time on the slow network wins, since computation hides less of it in practice than in a plan. A row
without codecs wins instead if computation hides its communication and codecs save little: at most :data:`TOLERANCE` of
its step on the slow network, and at most :data:`LESS_MEMORY` of its memory. Ties go to torch's strategies and presets,
then to presets with a coarser base, then to rows named by their letters; within each kind, to the least memory.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeVar

from fsdp_zpp.codecs import NF4, Codec, Delta, FrozenName, Int4, Int4Delta, Int8
from fsdp_zpp.strategy.configuration import PRESETS
from fsdp_zpp.strategy.error_feedback import Topology
from fsdp_zpp.strategy.strategy import LEGAL_LEVELS, Scopes, Strategy, resolve_scopes

from .cluster import GIB
from .memory import Memory, Volume
from .model_size import Case
from .step_time import StepTime

# ---- text


def aligned(rows: Sequence[tuple[str, ...]], names: int) -> list[str]:
    """Return the lines of a table whose first ``names`` columns are aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:names], widths, strict=False)]
        right = [cell.rjust(width) for cell, width in zip(row[names:], widths[names:], strict=True)]
        lines.append("  ".join(left + right).rstrip())
    return lines


def number(value: float) -> str:
    """Format with two decimals, or with two significant digits below 0.1, which models of a few MB need."""
    return f"{value:,.2f}" if value >= 0.1 or value == 0 else f"{value:.2g}"


def count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{plural * (number != 1)}"


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


# ---- candidates
#
# A plan compares torch's common strategies, presets with their codecs, and the 14 combinations of scope letters.


def with_levels(codecs: Strategy, levels: str) -> Strategy:
    """Return ``codecs`` with ``levels``; if these keep no secondary shard, weights are sent whole, not as deltas."""
    weights, keeps_secondary = codecs.weights, Strategy(levels).keeps_secondary
    if isinstance(weights, Delta) and not keeps_secondary:
        weights = weights.whole
    return dataclasses.replace(codecs, levels=levels, weights=weights)


@dataclass(frozen=True)
class Candidate:
    """One row of a plan.

    Args:
        strategy: The strategy; for a strategy of torch's, this package's equivalent. It sends and keeps the same, but
            accumulates gradients in fp32, where torch accumulates them in the reduce dtype.
        title: Name of a preset, or of torch's strategy; None if the letters are the name.
        torch: Name of torch's ``ShardingStrategy``; None for a strategy of this package.
        coarser: True if the frozen base has fewer bits than in the preset, to fit or to send less.
        instead: For a strategy of torch's, replacements to try in order if fp32 accumulation does not fit.
    """

    strategy: Strategy
    title: str | None = None
    torch: str | None = None
    coarser: bool = False
    instead: tuple[Strategy, ...] = ()


def lettered(codecs: Strategy) -> list[Candidate]:
    """Return the 14 combinations of letters, each with the codecs of the strategy ``codecs``."""
    return [Candidate(with_levels(codecs, levels)) for levels in LEGAL_LEVELS]


def of_torch(case: Case) -> Iterator[Candidate]:
    """Yield torch's FULL_SHARD and, on several nodes, HYBRID_SHARD.

    Under ``no_sync``, torch accumulates whole gradients on each rank, and communicates them once a step.
    """
    accumulates = case.work.micro_batches > 1
    full, hybrid = Strategy("GGG"), Strategy("III")
    yield Candidate(Strategy("GNG") if accumulates else full, "FULL_SHARD", "FULL_SHARD", instead=(full,))
    if case.cluster.nodes > 1:
        planned = Strategy("INI") if accumulates else hybrid
        yield Candidate(planned, "HYBRID_SHARD", "HYBRID_SHARD", instead=(hybrid, full))


def presets(case: Case, frozen: Codec | FrozenName | None) -> Iterator[Candidate]:
    """Yield presets with their codecs: those of ZeRO++, and those of MixZ++ if parts of the model are frozen.

    ZeRO++ is left out on a single node with fast links, where its codecs are inactive. If links inside nodes are slow,
    presets have variants that count each GPU as a node, but not ZeRO++ on a single node, where it follows the links. If
    ``frozen`` is None, MixZ++ comes with several codecs of the base, and ZeRO++ leaves the base unquantized.
    """
    cluster, accumulates = case.cluster, case.work.micro_batches > 1
    found: list[Candidate] = []
    if case.size.frozen:
        # NF4 is as small as Int4 and more accurate, but needs bitsandbytes.
        small = Int4(128) if find_spec("bitsandbytes") is None else NF4(64)
        # In a plan, "auto" means Int8(256): it would leave quantized weights as they are, but a plan knows of none.
        found += _with_quantized_base(accumulates, ["auto", small] if frozen is None else [frozen])
    if (frozen is None or not case.size.frozen) and (cluster.nodes > 1 or cluster.slow_links):
        found += with_codecs(accumulates, several_nodes=cluster.nodes > 1)
    splits = cluster.slow_links and cluster.gpus_per_node > 1
    for candidate in found:
        yield candidate
        if splits and (cluster.nodes > 1 or candidate.strategy.frozen is not None):
            finer = dataclasses.replace(candidate.strategy, gpus_per_node=1)
            yield Candidate(finer, f"{candidate.title}, nodes of 1")


def with_codecs(accumulates: bool, several_nodes: bool) -> Iterator[Candidate]:
    """Yield ZeRO++'s presets, the simplest first. ``plan`` predicts them, and ``bench`` measures them."""
    yield Candidate(Strategy.zeropp(), "zeropp")
    yield Candidate(Strategy.zeropp(weights=Int4Delta()), "zeropp Int4Delta")
    if accumulates:
        yield Candidate(Strategy.zeropp(levels="IIG"), "zeropp IIG")
        yield Candidate(Strategy.zeropp(levels="IIG", weights=Int4Delta()), "zeropp IIG Int4Delta")
    yield Candidate(Strategy.loco(), "loco")
    for levels in ("GGG", "NNG", *(["III"] if several_nodes else [])):
        yield Candidate(Strategy.zeropp(levels=levels), f"zeropp {levels}")


def _with_quantized_base(accumulates: bool, codecs: Iterable[Codec | FrozenName]) -> Iterator[Candidate]:
    for index, codec in enumerate(codecs):
        name = "mixzpp" if codec in ("auto", Int8(256)) else f"mixzpp {codec}"
        yield Candidate(Strategy.mixzpp(frozen=codec), name, coarser=index > 0)
        if accumulates:
            yield Candidate(Strategy.mixzpp(frozen=codec, levels="IIG"), f"{name} IIG", coarser=index > 0)


# ---- paste
#
# The shortest line of Python that makes a strategy, from a preset if that takes fewer arguments.


def line_of(strategy: Strategy, gpus_per_node: int | None = None) -> str:
    """Return a line that makes ``strategy``, with its imports.

    ``gpus_per_node`` replaces the strategy's own; None leaves it to the launcher or the machine.
    """
    call, names = _call(dataclasses.replace(strategy, gpus_per_node=gpus_per_node))
    return f"from fsdp_zpp import {', '.join(sorted({'Strategy', *names}))}; strategy = {call}"


def _call(strategy: Strategy) -> tuple[str, set[str]]:
    # min() takes the first of equally short calls, so MixZ++ comes first for a quantized base.
    names = sorted(PRESETS, key=lambda name: name != "mixzpp" or strategy.frozen is None)
    calls = [(f"Strategy.{name}", _differences(strategy, getattr(Strategy, name)())) for name in names]
    calls.append(("Strategy", {"levels": strategy.levels} | _differences(strategy, Strategy())))
    maker, arguments = min(calls, key=lambda call: len(call[1]) - (call[0] == "Strategy"))
    classes: set[str] = set()
    texts = [f"{name}={_value(value, classes)}" for name, value in arguments.items()]
    if maker == "Strategy":
        texts[0] = texts[0].removeprefix("levels=")
    return f"{maker}({', '.join(texts)})", classes


def _differences(given: Any, base: Any) -> dict[str, Any]:
    """Return the fields of the dataclass ``given`` that differ from those of ``base``."""
    values = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    return {name: value for name, value in values.items() if value != getattr(base, name)}


def _value(value: Any, names: set[str]) -> str:
    """Return ``value`` as Python code without default arguments; add the names of the classes in it to ``names``."""
    if isinstance(value, str):
        return json.dumps(value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return repr(value)
    names.add(type(value).__name__)
    # Every dataclass in a strategy has defaults for all fields.
    texts = [f"{name}={_value(each, names)}" for name, each in _differences(value, type(value)()).items()]
    return f"{type(value).__name__}({', '.join(texts)})"


# ---- estimate


@dataclass(frozen=True)
class Estimate:
    """Figures of one row: a strategy of this package, or one of torch's.

    Args:
        strategy: The strategy; for a strategy of torch's, this package's equivalent. If fp32 accumulation does not
            fit, it is an equivalent that reduces in each micro-batch.
        topology: The layout of the ranks under the strategy.
        volume: Bytes that one GPU sends in an optimizer step.
        inter_node_bytes: Bytes that all GPUs of a node together send to other nodes in an optimizer step.
        memory: Bytes on one GPU.
        time: Seconds of an optimizer step.
        fits: True if the memory suffices.
        candidate: The candidate that these figures describe.
    """

    strategy: Strategy
    topology: Topology
    volume: Volume
    inter_node_bytes: int
    memory: Memory
    time: StepTime
    fits: bool
    candidate: Candidate

    @property
    def levels(self) -> str:
        """Return the three scopes as letters."""
        return self.strategy.levels

    @property
    def name(self) -> str:
        """Return the row's name: a preset's, that of a strategy of torch's, or the letters."""
        return self.candidate.title or self.levels

    @property
    def torch(self) -> str | None:
        """Return the name of torch's ``ShardingStrategy``; None for a strategy of this package."""
        return self.candidate.torch

    @property
    def paste(self) -> str:
        """Return a line of Python that makes the strategy, with its imports."""
        if self.torch is not None:
            made = f"from torch.distributed.fsdp import ShardingStrategy; strategy = ShardingStrategy.{self.torch}"
            return f"{made}  # or torch's own fully_shard, which takes none"
        return line_of(self.strategy, gpus_per_node=self.candidate.strategy.gpus_per_node)

    @property
    def gib(self) -> float:
        """Return the GiB on one GPU."""
        return self.memory.total / GIB


# ---- choice

Row = TypeVar("Row")

TOLERANCE = 0.03
"""Times within this fraction of the shortest count as equal: predictions err, and machines drift, by as much."""

LESS_MEMORY = 0.1
"""Codecs that save more than this fraction of memory win for that. A quantized base does, smaller buffers don't."""


def choose(estimates: Sequence[Estimate], slow_links: bool) -> Estimate | None:
    """Return the best row that fits, by the rule at the top of this module; None if nothing fits."""
    fitting = [estimate for estimate in estimates if estimate.fits]
    if not fitting:
        return None
    fast = _fastest(fitting)
    best = _plainest(_least_on_slow_hop(fast, slow_links))
    exact = [estimate for estimate in fast if not _is_lossy(estimate)]
    if not exact or not _is_lossy(best):
        return best
    without = _plainest(_least_on_slow_hop(exact, slow_links))
    cost = _slow_hop(fast, slow_links)
    gains_nothing = cost(without) - cost(best) <= TOLERANCE * without.time.total
    gains_nothing &= best.memory.total >= (1 - LESS_MEMORY) * without.memory.total
    # If kernel launches on the CPU hide communication, rather than computation, plans are too rough to drop codecs.
    # LoRA of a 6.7B model on two nodes of one GPU was a tenth slower under HSDP than with codecs, though by the plan
    # communication was only a twelfth of HSDP's step.
    return without if gains_nothing and _hider(without) == "computation" else best


def _plainest(estimates: list[Estimate]) -> Estimate:
    def rank(each: Estimate) -> tuple[bool, bool, int, bool]:
        # On one node, I and G are the same. A row whose letters are the effective scopes wins: False sorts first.
        usual = "".join(resolve_scopes(Scopes(*each.levels), each.topology))
        return *_preset_order(each), each.memory.total, usual != each.levels

    return min(estimates, key=rank)


def _is_lossy(estimate: Estimate) -> bool:
    """Return whether a codec rounds what is sent or kept."""
    strategy = estimate.strategy
    codecs = strategy.weights, strategy.gradients, strategy.intra_gradients, strategy.frozen_codec
    return any(isinstance(codec, Codec) for codec in codecs)


def _preset_order(estimate: Estimate) -> tuple[bool, bool]:
    """Return a sort key: presets and torch's strategies first, presets with a coarser base next, letters last."""
    return estimate.candidate.title is None, estimate.candidate.coarser


def ties(rows: Sequence[Row], time: Callable[[Row], float]) -> list[Row]:
    """Return the rows that are within :data:`TOLERANCE` of the fastest, in the order of ``rows``."""
    shortest = min(map(time, rows))
    return [row for row in rows if time(row) <= shortest + TOLERANCE * shortest]


def _fastest(estimates: list[Estimate]) -> list[Estimate]:
    return ties(estimates, lambda estimate: estimate.time.total)


def _least_on_slow_hop(estimates: list[Estimate], slow_links: bool) -> list[Estimate]:
    cost = _slow_hop(estimates, slow_links)
    bound = min(map(cost, estimates)) + TOLERANCE * min(estimate.time.total for estimate in estimates)
    return [estimate for estimate in estimates if cost(estimate) <= bound]


def _slow_hop(estimates: list[Estimate], slow_links: bool) -> Callable[[Estimate], float]:
    """Return a function for a row's time on the slow network: between nodes or, if unused, on slow links inside."""
    if any(estimate.time.inter for estimate in estimates):
        return lambda estimate: estimate.time.inter
    return lambda estimate: estimate.time.intra if slow_links else 0.0


def reason(estimates: Sequence[Estimate], choice: Estimate | None, case: Case) -> str:
    slow_links = case.cluster.slow_links
    if choice is None:
        least = min(estimates, key=lambda estimate: estimate.memory.total)
        takes = f"the smallest, {least.name}, takes {least.gib:.1f} GiB"
        return f"Nothing fits in {case.budget.gpu_memory:g} GiB a GPU: {takes}."
    fitting = [estimate for estimate in estimates if estimate.fits]
    beside = _beside_full_shard(estimates, choice)
    if len(fitting) == 1:
        takes = f"{choice.gib:.1f} GiB of {case.budget.gpu_memory:g} GiB a GPU"
        return f"{choice.name} is the only one that fits, with {takes}{beside}."
    others = f"the {len(fitting)}{' that fit' if len(fitting) < len(estimates) else ''}"
    on_ties = _on_ties(choice, fitting, others, slow_links)
    return f"{choice.name} takes {seconds(choice.time.total)} a step{beside}. {on_ties}"


def _hider(choice: Estimate) -> str:
    """Return the work that hides the communication of ``choice``, as text; empty if nothing hides it."""
    time = choice.time
    if max(time.computation, time.launch) <= time.communication:
        return ""
    return "computation" if time.computation >= time.launch else "the CPU"


def _on_ties(choice: Estimate, alike: list[Estimate], others: str, slow_links: bool) -> str:
    fast = _fastest(alike)
    hider = _hider(choice)
    if len(fast) == 1:
        return f"It is the fastest of {others}{f', and {hider} hides its communication' if hider else ''}."
    count = f"All{others.removeprefix('the')}" if len(fast) == len(alike) else f"{len(fast)} of {others}"
    said = f"{count} are as fast within {TOLERANCE * 100:g} %"
    said += f", because {hider} hides their communication" if hider else ""
    exact = [each for each in fast if not _is_lossy(each)]
    is_exact = not _is_lossy(choice) and len(exact) < len(fast)
    rivals = exact if is_exact else fast
    least = _least_on_slow_hop(rivals, slow_links)
    reasons = ["sends the least"] if len(least) < len(rivals) else []
    if any(each.memory.total > choice.memory.total and _preset_order(each) == _preset_order(choice) for each in least):
        reasons.append("takes the least memory")
    if is_exact and not reasons:
        reasons.append("is the plainest")
    among = "these without codecs" if is_exact else "these"
    said += f"; of {among} it {' and '.join(reasons)}." if reasons else "."
    if choice.torch is None and any(each.torch == "FULL_SHARD" for each in fast):
        said += " By this plan FULL_SHARD is as fast; the choice gains where less is hidden in practice."
    return said


def _beside_full_shard(estimates: Sequence[Estimate], choice: Estimate) -> str:
    """Return the time of FULL_SHARD, FSDP's default, as a remark; empty if it is the choice."""
    full_shard = next((each for each in estimates if each.torch == "FULL_SHARD"), None)
    full_shard = full_shard or next(each for each in estimates if each.levels == "GGG")
    if choice.name == full_shard.name:
        return ""
    return f" ({full_shard.name}: {seconds(full_shard.time.total)})"
