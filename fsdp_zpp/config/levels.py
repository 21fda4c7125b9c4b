"""The three letters of a strategy: the scopes of parameters, gradients and optimizer state."""

from __future__ import annotations

import difflib
from itertools import product

from .mapping import PRESETS

_SCOPES = "NIG"


def _legal_levels() -> tuple[str, ...]:
    """Return all (parameter, gradient, optimizer) scopes of which the optimizer's is at least as fine as the others.

    A coarser optimizer state costs memory and saves no communication (PaRO, arXiv 2310.06003, section 3).
    """
    fineness = _SCOPES.index
    return tuple(
        p + g + o for o, g, p in product(_SCOPES, repeat=3) if fineness(o) >= fineness(g) and fineness(o) >= fineness(p)
    )


LEGAL_LEVELS: tuple[str, ...] = _legal_levels()
"""The 14 legal combinations of letters."""


def check_levels(levels: object) -> None:
    """Raise unless ``levels`` are three letters that are legal together.

    Raises:
        TypeError: If ``levels`` is not a string.
        ValueError: If they are not legal; it says why, and which are.
    """
    if not isinstance(levels, str):
        raise TypeError(f"levels must be three letters such as 'GGG', got {levels!r}")
    if levels in LEGAL_LEVELS:
        return
    reason = "levels are three of the letters N, I, G"
    if near := difflib.get_close_matches(levels.lower(), PRESETS, n=1, cutoff=0.75):
        reason += f" (did you mean Strategy.{near[0]}()?)"
    # Three valid letters can break only the rule about the optimizer.
    if len(levels) == 3 and set(levels) <= set(_SCOPES):
        reason = "the optimizer scope must be at least as fine (N < I < G) as the other two"
    raise ValueError(f"levels {levels!r} is not legal: {reason}; legal are {', '.join(LEGAL_LEVELS)}")
