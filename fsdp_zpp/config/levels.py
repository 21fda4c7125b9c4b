"""The three letters of a strategy: the scopes of parameters, gradients and optimizer state."""

from __future__ import annotations

from itertools import product

from fsdp_zpp.suggestions import did_you_mean

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


_OF_TORCH = {
    "FULL_SHARD": "GGG",
    "SHARD_GRAD_OP": "NGG",
    "HYBRID_SHARD": "III",
    "_HYBRID_SHARD_ZERO2": "NII",
    "NO_SHARD": "NNN",
    "FSDP": "GGG",
    "HSDP": "III",
    "DDP": "NNN",
}
"""The letters of torch's strategies, or those that come closest."""
_GATHERED_ANEW = ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
"""Strategies of torch that gather weights in every micro-batch; parameter scope N keeps them until they change."""


def _meant(levels: str) -> str:
    """Return a hint at the letters that ``levels`` stands for, after a semicolon; "" if it stands for none."""
    upper = levels.strip().rpartition(".")[2].upper()
    name = next((name for name in _OF_TORCH if name.strip("_") == upper.strip("_")), None)
    if name is not None:
        closest = "closest to " if name in _GATHERED_ANEW else ""
        return f"; {closest}torch's {name} is {_OF_TORCH[name]!r}"
    return f"; did you mean {upper!r}?" if upper in LEGAL_LEVELS else ""


def check_levels(levels: object) -> None:
    """Raise unless ``levels`` are three letters that are legal together.

    Raises:
        TypeError: If ``levels`` is not a string.
        ValueError: If they are not legal; it says why, and which are.
    """
    if not isinstance(levels, str):
        meant = _meant(getattr(levels, "name", "")) if type(levels).__name__ == "ShardingStrategy" else ""
        raise TypeError(f"levels must be three letters such as 'GGG', got {levels!r}{meant}")
    if levels in LEGAL_LEVELS:
        return
    reason = "levels are three of the letters N, I, G"
    if asked := did_you_mean(levels, PRESETS, "Strategy.{}()", cutoff=0.75):
        reason += f" ({asked})"
    # Three valid letters can break only the rule about the optimizer.
    if len(levels) == 3 and set(levels) <= set(_SCOPES):
        reason = "the optimizer scope must be at least as fine (N < I < G) as the other two"
    raise ValueError(f"levels {levels!r} is not legal: {reason}; legal are {', '.join(LEGAL_LEVELS)}{_meant(levels)}")
