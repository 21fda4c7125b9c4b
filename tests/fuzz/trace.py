"""What a run of a program shows."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Trace:
    """What a run showed.

    Args:
        shown: Losses and weights, by the number of the op.
        gradients: Those of the first step.
        facts: What modules showed of their parameters.
        wrong: What is wrong without any comparison.
        error: The exception that ended it.
        replicas_differ: Whether ranks have different weights in the end.
    """

    shown: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    error: str | None = None
    replicas_differ: bool = False

    @property
    def says(self) -> str | None:
        """The exception alone, without where it was raised."""
        return None if self.error is None else self.error.partition("\n")[0]
