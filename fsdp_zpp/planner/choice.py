"""The best row that fits, and why it is.

The fastest wins (PaRO, section 3.4). Of those that are as fast within :data:`TOLERANCE`, rows without codecs go first
if computation hides their communication and codecs would gain nothing else: neither :data:`TOLERANCE` of a step less
communication over the slow network nor :data:`LESS_MEMORY`. Of the rest the one is chosen that communicates least over
the slow network, since computation hides communication on paper better than in practice; of equals one with a name that
people know, torch's or a preset's, before presets with a coarser base; of those the smallest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.config.resolve import Scopes, resolve_scopes

from .config import GIB, Cluster, MemoryBudget
from .estimate import Estimate
from .table import seconds

TOLERANCE = 0.03
"""Times within this fraction of the shortest step count as equal: predictions are no better."""

LESS_MEMORY = 0.1
"""Fraction of a row's memory that is worth codecs: that of a quantized base, not of what a step's buffers take."""


def choose(estimates: Sequence[Estimate], slow_links: bool) -> Estimate | None:
    """Return the best that fits by the rule above; None if nothing fits.

    Local steps change the mathematics, so they are chosen only if the fastest with them beats the fastest without.

    Args:
        estimates: The rows.
        slow_links: Whether links inside a node are slow.
    """
    fitting = [estimate for estimate in estimates if estimate.fits]
    if not fitting:
        return None
    in_step, local = _by_mathematics(fitting)
    gains = all(estimate.strategy.local_steps is not None for estimate in _fastest(fitting))
    return _best(_fastest(local if gains else in_step), slow_links)


def _best(fast: list[Estimate], slow_links: bool) -> Estimate:
    """Return the best of those that are as fast."""
    best = _plainest(_quietest(fast, slow_links))
    exact = [estimate for estimate in fast if not _is_lossy(estimate)]
    if not exact or not _is_lossy(best):
        return best
    without = _plainest(_quietest(exact, slow_links))
    cost = _slow_hop(fast, slow_links)
    gains_nothing = cost(without) - cost(best) <= TOLERANCE * without.time.total
    gains_nothing &= best.memory.total >= (1 - LESS_MEMORY) * without.memory.total
    # Where the CPU's launches take longest, plans are too rough: LoRA of a 6.7B model on two nodes of one GPU was a
    # tenth slower under HSDP than under codecs, though a twelfth of its planned step was communication.
    return without if gains_nothing and _hider(without) == "computation" else best


def _plainest(estimates: list[Estimate]) -> Estimate:
    # Where letters coincide, the usual name wins: False sorts before True.
    return min(estimates, key=lambda each: (*_fame(each), each.memory.total, _goes_by_another_name(each)))


def _is_lossy(estimate: Estimate) -> bool:
    """Return whether a codec rounds what is sent or kept."""
    strategy = estimate.strategy
    codecs = strategy.weights, strategy.gradients, strategy.intra_gradients, strategy.frozen_codec
    return any(isinstance(codec, Codec) for codec in codecs)


def _by_mathematics(estimates: Sequence[Estimate]) -> tuple[list[Estimate], list[Estimate]]:
    """Return the estimates without local steps, and those with them."""
    in_step = [estimate for estimate in estimates if estimate.strategy.local_steps is None]
    return in_step, [estimate for estimate in estimates if estimate.strategy.local_steps is not None]


def _fame(estimate: Estimate) -> tuple[bool, bool]:
    """Return a key that sorts presets and torch's strategies first, and variations of presets behind them."""
    return estimate.title is None, estimate.candidate is not None and estimate.candidate.coarser


def _goes_by_another_name(estimate: Estimate) -> bool:
    """Return whether other letters mean the same on this topology: on one node, I is G."""
    return "".join(resolve_scopes(Scopes(*estimate.levels), estimate.topology)) != estimate.levels


def _fastest(estimates: list[Estimate]) -> list[Estimate]:
    return _least(estimates, lambda estimate: estimate.time.total)


def _quietest(estimates: list[Estimate], slow_links: bool) -> list[Estimate]:
    """Return those that communicate least over the slow network."""
    return _least(estimates, _slow_hop(estimates, slow_links))


def _slow_hop(estimates: list[Estimate], slow_links: bool) -> Callable[[Estimate], float]:
    """Return the time over the slow network: between nodes, or inside if nothing goes between and links are slow."""
    if any(estimate.time.inter for estimate in estimates):
        return lambda estimate: estimate.time.inter
    return lambda estimate: estimate.time.intra if slow_links else 0.0


def _least(estimates: list[Estimate], cost: Callable[[Estimate], float]) -> list[Estimate]:
    """Return the estimates with the least cost, in seconds, within :data:`TOLERANCE`."""
    bound = min(map(cost, estimates)) + TOLERANCE * min(estimate.time.total for estimate in estimates)
    return [estimate for estimate in estimates if cost(estimate) <= bound]


def reason(estimates: Sequence[Estimate], choice: Estimate | None, budget: MemoryBudget, cluster: Cluster) -> str:
    """Say why ``choice`` is the choice, or why there is none."""
    slow_links = cluster.slow_links
    if choice is None:
        return _nothing_fits(estimates, budget, cluster.gpus_per_node)
    fitting = [estimate for estimate in estimates if estimate.fits]
    in_step, local = _by_mathematics(fitting)
    beside = _beside_full_shard(estimates, choice)
    if len(fitting) == 1:
        takes = f"{choice.gib:.1f} GiB of {budget.gpu_memory:g} GiB a GPU"
        sentences = [f"{choice.name} is the only one that fits, with {takes}{beside}."]
    else:
        alike = in_step if choice in in_step else local
        others = f"the {len(alike)}{' that fit' if len(fitting) < len(estimates) else ''}"
        if in_step and local:
            others += f" {'without' if choice in in_step else 'with'} local steps"
        sentences = [f"{choice.name} takes {seconds(choice.time.total)} a step{beside}."]
        sentences.append(_on_ties(choice, alike, others, slow_links))
    return " ".join([*sentences, *_on_mathematics(choice, in_step, local)])


def _nothing_fits(estimates: Sequence[Estimate], budget: MemoryBudget, gpus_per_node: int) -> str:
    on_gpu = [estimate for estimate in estimates if budget.allows(estimate.memory.total)]
    if on_gpu and budget.offload is not None and budget.offload.memory is not None:
        smallest = min(on_gpu, key=lambda estimate: estimate.memory.host)
        return (
            f"Nothing fits in {budget.offload.memory:g} GiB of a node's host: of what fits on the GPU, the smallest, "
            f"{smallest.name}, takes {gpus_per_node * smallest.memory.host / GIB:.1f} GiB there."
        )
    smallest = min(estimates, key=lambda estimate: estimate.memory.total)
    return (
        f"Nothing fits in {budget.gpu_memory:g} GiB a GPU: the smallest, {smallest.name}, takes {smallest.gib:.1f} GiB."
    )


def _hider(choice: Estimate) -> str:
    """Return what hides the communication of ``choice``; empty if nothing does."""
    time = choice.time
    if time.wait or max(time.computation, time.launch) <= time.communication:
        return ""
    return "computation" if time.computation >= time.launch else "the CPU"


def _on_ties(choice: Estimate, alike: list[Estimate], others: str, slow_links: bool) -> str:
    """Say how many are as fast, and what decided among them."""
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
    quiet = _quietest(rivals, slow_links)
    reasons = ["sends the least"] if len(quiet) < len(rivals) else []
    if any(each.memory.total > choice.memory.total and _fame(each) == _fame(choice) for each in quiet):
        reasons.append("takes the least memory")
    if is_exact and not reasons:
        reasons.append("is the plainest")
    among = "these without codecs" if is_exact else "these"
    return f"{said}; of {among} it {' and '.join(reasons)}." if reasons else f"{said}."


def _on_mathematics(choice: Estimate, in_step: list[Estimate], local: list[Estimate]) -> list[str]:
    """Say how the choice compares with those that fit on the other side of local steps."""
    others = in_step if choice in local else local
    fastest = min(others, key=lambda estimate: estimate.time.total, default=None)
    if choice in local:
        if fastest is None:
            return ["It changes the mathematics; without that, nothing fits."]
        figures = f"{fastest.name} is the fastest, at {seconds(fastest.time.total)}"
        return [f"It changes the mathematics; of those that do not, {figures}."]
    if fastest is None or fastest.time.total >= choice.time.total:
        return []
    return [f"{fastest.name} takes {seconds(fastest.time.total)}, too small a gain to change the mathematics for."]


def _beside_full_shard(estimates: Sequence[Estimate], choice: Estimate) -> str:
    """Compare with FSDP's default, by which readers judge."""
    full_shard = next((each for each in estimates if each.torch == "FULL_SHARD"), None)
    full_shard = full_shard or next(each for each in estimates if each.levels == "GGG")
    if choice.name == full_shard.name:
        return ""
    return f" ({full_shard.name}: {seconds(full_shard.time.total)})"
