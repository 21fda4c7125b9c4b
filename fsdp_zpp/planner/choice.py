"""The best row that fits, and why it is.

The fastest wins (PaRO, section 3.4). Of those that are as fast within :data:`TOLERANCE` the one is chosen that
communicates least over a slow network, since computation hides communication on paper better than in practice; of
equals one with a name that people know, torch's or a preset's, before presets with a coarser base; of those the
smallest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fsdp_zpp.config.resolve import Scopes, resolve_scopes

from .config import MemoryBudget
from .estimate import Estimate
from .table import listed, seconds

TOLERANCE = 0.03
"""Times within this fraction of the shortest step count as equal: predictions are no better."""


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
    quiet = _quietest(_fastest(local if gains else in_step), slow_links)
    # Where letters coincide, the usual name wins: False sorts before True.
    return min(quiet, key=lambda each: (*_fame(each), each.memory.total, _goes_by_another_name(each)))


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
    """Return those that communicate least between nodes, or inside if nothing goes between and links are slow."""
    if any(estimate.time.inter for estimate in estimates):
        return _least(estimates, lambda estimate: estimate.time.inter)
    return _least(estimates, lambda estimate: estimate.time.intra) if slow_links else estimates


def _least(estimates: list[Estimate], cost: Callable[[Estimate], float]) -> list[Estimate]:
    """Return the estimates with the least cost, in seconds, within :data:`TOLERANCE`."""
    bound = min(map(cost, estimates)) + TOLERANCE * min(estimate.time.total for estimate in estimates)
    return [estimate for estimate in estimates if cost(estimate) <= bound]


def reason(estimates: Sequence[Estimate], choice: Estimate | None, budget: MemoryBudget, slow_links: bool) -> str:
    """Say in one sentence why ``choice`` is the choice, or why there is none."""
    if choice is None:
        smallest = min(estimates, key=lambda estimate: estimate.memory.total)
        return (
            f"Nothing fits in {budget.gpu_memory:g} GiB a GPU: the smallest, {smallest.name}, takes "
            f"{smallest.gib:.1f} GiB."
        )
    fitting = [estimate for estimate in estimates if estimate.fits]
    in_step, local = _by_mathematics(fitting)
    if len(fitting) == 1:
        takes = f"with {choice.gib:.1f} GiB of {budget.gpu_memory:g} GiB a GPU"
        return f"{choice.name} is the only one that fits, {takes}{_on_mathematics(choice, in_step, local)}."
    among = f"all {len(estimates)}" if len(fitting) == len(estimates) else f"the {len(fitting)} that fit"
    place = f"the fastest of {among}" if choice in _fastest(fitting) else f"the choice of {among}"
    sentence = f"{choice.name} is {place}, at {seconds(choice.time.total)} a step{_on_hiding(choice)}"
    sentence += _on_ties(choice, in_step if choice.strategy.local_steps is None else local, slow_links)
    sentence += _on_mathematics(choice, in_step, local)
    return f"{sentence}{_beside_full_shard(estimates, choice)}."


def _on_hiding(choice: Estimate) -> str:
    time = choice.time
    if time.wait or max(time.computation, time.launch) <= time.communication:
        return ""
    return f", where {'computation' if time.computation >= time.launch else 'the CPU'} hides its communication"


def _on_ties(choice: Estimate, alike: list[Estimate], slow_links: bool) -> str:
    """Say what decided among those that are as fast."""
    fast = _fastest(alike)
    quiet = _quietest(fast, slow_links)
    louder = [each.name for each in fast if each not in quiet]
    larger = [each.name for each in quiet if each.memory.total > choice.memory.total and _fame(each) == _fame(choice)]
    said = ""
    if louder:
        said += f"; it communicates less than {listed(louder)}"
    if larger:
        said += f"{' and' if louder else ';'} takes less memory than {listed(larger)}"
    return f"{said}, which are as fast within {TOLERANCE:.0%}" if said else ""


def _on_mathematics(choice: Estimate, in_step: list[Estimate], local: list[Estimate]) -> str:
    """Say how the choice compares with those that fit on the other side of local steps."""
    others = in_step if choice in local else local
    fastest = min(others, key=lambda estimate: estimate.time.total, default=None)
    if choice in local:
        if fastest is None:
            return "; it changes the mathematics, and without that nothing fits"
        figures = f"{fastest.name} is the fastest, at {seconds(fastest.time.total)}"
        return f"; it changes the mathematics, and of those that do not, {figures}"
    if fastest is None or fastest.time.total >= choice.time.total:
        return ""
    return f"; {fastest.name} takes {seconds(fastest.time.total)}, too small a gain to change the mathematics for"


def _beside_full_shard(estimates: Sequence[Estimate], choice: Estimate) -> str:
    """Compare with FSDP's default, by which readers judge."""
    full_shard = next((each for each in estimates if each.torch == "FULL_SHARD"), None)
    full_shard = full_shard or next(each for each in estimates if each.levels == "GGG")
    if choice.name == full_shard.name:
        return ""
    return f" ({full_shard.name}: {seconds(full_shard.time.total)})"
