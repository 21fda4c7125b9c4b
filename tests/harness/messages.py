"""Messages to users: errors, which every rank is to raise before anything is sent, and log lines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .wiretap import wiretap

Refusal = tuple[Callable[[], Any], type[Exception], str]
"""A call, the error that it must raise, and a part of its message."""
Reply = tuple[str, str, int]
"""The error's type and message, and the bytes sent before it."""


def attempt(refusal: Refusal) -> Reply:
    """In a worker: call what must be refused."""
    with wiretap(2) as tap:
        try:
            refusal[0]()
        except Exception as error:
            return type(error).__name__, str(error), sum(tap.sent.values())
    return "no error", "", 0


def assert_refused(replies: list[Reply], refusal: Refusal) -> None:
    """Every rank has raised as it should, before anything was sent."""
    for kind, text, sent in replies:
        assert kind == refusal[1].__name__, text
        assert refusal[2] in text
        assert sent == 0


@contextmanager
def collected() -> Iterator[list[tuple[str, str]]]:
    """Levels and messages logged while in the context."""
    records: list[tuple[str, str]] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append((record.levelname, record.getMessage()))

    logger = logging.getLogger("fsdp_zpp")
    handler, level = Collect(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(level)
