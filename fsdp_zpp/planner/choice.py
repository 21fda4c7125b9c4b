"""What each strategy would take, and which is the best that fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ..strategy import Strategy
from ..strategy_unit import levels_on
from ..topology import Topology
from .conditions import GIB, Budget
from .memory import Memory
from .step_time import StepTime
from .volume import Volume

TOLERANCE = 0.01
"""Times closer than this count as equal: no prediction is better, and it would be a pity to pay for it with memory."""


@dataclass(frozen=True)
class Estimate:
    """One strategy's figures.

    Attributes:
        strategy: The strategy.
        topology: The ranks.
        volume: Bytes that one GPU sends in an optimizer step.
        inter_node_bytes: Bytes that a node sends to others in an optimizer step, all its GPUs together.
        memory: Bytes on one GPU.
        time: Seconds of an optimizer step.
        fits: Whether the memory does.
    """

    strategy: Strategy
    topology: Topology
    volume: Volume
    inter_node_bytes: int
    memory: Memory
    time: StepTime
    fits: bool

    @property
    def levels(self) -> str:
        """The strategy's letters."""
        return self.strategy.levels


def choose(estimates: Sequence[Estimate]) -> Estimate | None:
    """The fastest that fits; of equally fast ones that with the least memory (PaRO, section 3.4).

    Returns:
        It, or None if nothing fits.
    """
    fitting = [estimate for estimate in estimates if estimate.fits]
    if not fitting:
        return None
    return min(_least(fitting), key=lambda estimate: (estimate.memory.total, _goes_by_another_name(estimate)))


def _goes_by_another_name(estimate: Estimate) -> bool:
    """Whether a letter means the same as another here: on one node, I is G."""
    return (
        "".join(levels_on(dataclasses.replace(estimate.strategy, error_feedback=None), estimate.topology))
        != estimate.levels
    )


def _least(estimates: list[Estimate]) -> list[Estimate]:
    """Those with the least step time."""
    bound = min(estimate.time.total for estimate in estimates) * (1 + TOLERANCE)
    return [estimate for estimate in estimates if estimate.time.total <= bound]


def reason(estimates: Sequence[Estimate], choice: Estimate | None, budget: Budget) -> str:
    """One sentence: why ``choice``, or what is missing."""
    if choice is None:
        smallest = min(estimates, key=lambda estimate: estimate.memory.total)
        return (
            f"Nothing fits in {budget.gpu_memory:g} GiB a GPU: the smallest, {smallest.levels}, takes {_gib(smallest)}."
        )
    fitting = [estimate for estimate in estimates if estimate.fits]
    larger = [e.levels for e in _least(fitting) if e.memory.total > choice.memory.total]
    among = "all 14" if len(fitting) == len(estimates) else f"the {len(fitting)} that fit"
    if len(fitting) == 1:
        return f"{choice.levels} is the only one that fits, with {_gib(choice)} of {budget.gpu_memory:g} GiB a GPU."
    sentence = f"{choice.levels} is the fastest of {among}, at {seconds(choice.time.total)} a step"
    if choice.time.computation > choice.time.communication:
        sentence += ", where computation hides its communication"
    if larger:
        sentence += f", and takes less memory than {_listed(larger)}, as fast within {TOLERANCE:.0%}"
    if choice.levels != "GGG":
        full_shard = next(estimate for estimate in estimates if estimate.levels == "GGG")
        sentence += f" (GGG: {seconds(full_shard.time.total)})"
    return sentence + "."


def seconds(value: float) -> str:
    """A time, in a unit that suits it."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _gib(estimate: Estimate) -> str:
    return f"{estimate.memory.total / GIB:.1f} GiB"


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
