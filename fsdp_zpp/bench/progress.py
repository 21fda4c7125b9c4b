"""How far a run is: a bar where somebody watches, lines elsewhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
_log = logging.getLogger(__name__)


def with_progress(named: Sequence[tuple[str, T]], shown: bool) -> Iterator[T]:
    """Yield each item, and say before what it is.

    Args:
        named: The items, each after its name.
        shown: Whether this rank says so.
    """
    if shown and sys.stderr.isatty() and (bar := _bar(len(named))) is not None:
        with bar:
            for name, item in named:
                bar.set_description(name)
                yield item
                bar.update()
        return
    for number, (name, item) in enumerate(named, 1):
        if shown:
            _log.info("measuring %s (%d of %d)", name, number, len(named))
        yield item


def _bar(total: int):  # type: ignore[no-untyped-def]  # tqdm has no types
    try:
        from tqdm import tqdm  # transformers depends on it
    except ModuleNotFoundError:
        return None
    return tqdm(total=total, unit="strategy", leave=False)
