"""Bad input: what every rank is to raise, and that nothing was sent before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .wiretap import wiretap

Refusal = tuple[Callable[[], Any], type[Exception], str]
"""A call, the error that it must raise, and a part of its message."""

Reply = tuple[str, str, int]


def attempt(refusal: Refusal) -> Reply:
    """In a worker: the error's type and message, and the bytes sent before it."""
    with wiretap(2) as tap:
        try:
            refusal[0]()
        except Exception as error:
            return type(error).__name__, str(error), sum(tap.sent.values())
    return "no error", "", 0


def assert_refused(replies: list[Reply], refusal: Refusal) -> None:
    """Every rank has raised as it should, before anything was sent."""
    _, error, message = refusal
    for kind, text, sent in replies:
        assert kind == error.__name__, text
        assert message in text
        assert sent == 0
