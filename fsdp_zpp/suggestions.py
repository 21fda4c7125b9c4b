"""Suggestions of what users may have meant, "did you mean ...?", in errors about names and keyword arguments."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])


def did_you_mean(
    given: object, known: Iterable[str], name: str = "{}", *, before: str = "", most: int = 1, cutoff: float = 0.6
) -> str:
    """Return the question whether one of the known names was meant; "" if none is close.

    Args:
        given: The name that was given; case does not count.
        known: The names.
        name: How the question writes a name.
        before: Text before the question, if there is one.
        most: How many names it asks about.
        cutoff: How close they must be, from 0 to 1.
    """
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(str(given).lower(), by_lower, n=most, cutoff=cutoff)
    return f"{before}did you mean {' or '.join(name.format(by_lower[each]) for each in near)}?" if near else ""


def check_keywords(call: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise unless all keyword arguments of a call are known.

    Raises:
        TypeError: It names what was given and what was meant, or is allowed.
    """
    allowed = list(known)
    for name in given:
        if name not in allowed:
            hint = did_you_mean(name, allowed) or f"allowed are {', '.join(allowed)}"
            raise TypeError(f"{call} has no argument {name!r}; {hint}")


def explains_keywords(cls: C) -> C:
    """Make the constructor of a class say which argument was meant by an unknown one."""
    construct: Callable[..., None] = cls.__init__  # type: ignore[misc]
    known = list(inspect.signature(construct).parameters)[1:]

    @functools.wraps(construct)
    def init(self: object, *arguments: Any, **keywords: Any) -> None:
        check_keywords(type(self).__name__, keywords, known)
        construct(self, *arguments, **keywords)

    cls.__init__ = init  # type: ignore[misc]
    return cls


def explains_arguments(function: F) -> F:
    """Make a function say which argument was meant by an unknown one."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        check_keywords(function.__name__, keywords, known)
        return function(*arguments, **keywords)

    return call  # type: ignore[return-value]
