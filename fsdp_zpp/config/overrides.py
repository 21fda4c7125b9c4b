"""Overrides of a strategy: other strategies for modules of some classes, such as the experts of a mixture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar


class Overridable(Protocol):
    """A strategy, as far as this file knows it."""

    @property
    def overrides(self) -> object:
        """Return its own overrides."""


S = TypeVar("S", bound=Overridable)


def checked_overrides(given: object, kind: type[S]) -> tuple[tuple[str, S], ...]:
    """Return overrides as pairs of a pattern and a strategy, which can be hashed.

    Args:
        given: The overrides, as a mapping or as pairs.
        kind: The class of strategies.

    Raises:
        TypeError: If they are not patterns with strategies.
        ValueError: If one of the strategies has overrides itself.
    """
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    checked: list[tuple[str, S]] = []
    for pair in pairs if isinstance(pairs, (list, tuple)) else [pairs]:
        match pair:
            case (str(pattern), strategy) if isinstance(strategy, kind):
                checked.append((pattern, strategy))
            case _:
                raise TypeError(
                    "overrides must map patterns for names of classes to strategies, as in "
                    f'{{"*Experts": Strategy.zeropp()}}, got {pair!r}'
                )
        if strategy.overrides:
            raise ValueError(f"overrides: the strategy of {pattern!r} has overrides itself; put all in one mapping")
    return tuple(checked)


def pairs_of(overrides: Mapping[str, S] | tuple[tuple[str, S], ...]) -> Iterable[tuple[str, S]]:
    """Return the patterns with their strategies, in their order; a pattern may come twice, and its first one counts."""
    return overrides.items() if isinstance(overrides, Mapping) else overrides


def override_for(module_class: type, overrides: Mapping[str, S] | tuple[tuple[str, S], ...]) -> S | None:
    """Return the strategy of the first pattern that matches the name of a class, case included; None if none does."""
    return next(
        (strategy for pattern, strategy in pairs_of(overrides) if fnmatchcase(module_class.__name__, pattern)), None
    )
