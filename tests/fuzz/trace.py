"""What a run of a program shows."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Trace:
    """What a run showed: losses and weights by the number of the op, and the exception that ended it.

    ``facts`` are what modules showed of their parameters, ``wrong`` what is so without any comparison.
    """

    shown: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    error: str | None = None
    replicas_differ: bool = False
