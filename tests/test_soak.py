"""Thousands of steps, with all that may happen between them, leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fuzz.pool import ImpatientPool
from harness.adapter import Adapter
from harness.adapters import over_adapters
from harness.pool import Pool
from harness.soak import STRATEGY, rounds, soak

MEMORY = "resident bytes"


def check(found: list[list[dict[str, int]]], growth: int) -> None:
    """Fail if a process had more at the end than at the beginning; of memory, ``growth`` bytes more."""
    for first, *_, last in found:
        assert {name: last[name] for name in last if name != MEMORY and last[name] > first[name]} == {}
        assert last[MEMORY] <= first[MEMORY] + growth


@over_adapters
def test_three_times_each_event(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    found = pool(2).run(rounds, adapter, STRATEGY, 3)
    check([after[1:] for after in found], growth=16 << 20)  # what is made once is there after the first round


@pytest.mark.slow
@over_adapters
def test_ten_thousand_steps(adapter: Adapter) -> None:
    pool = ImpatientPool(2, patience=60)
    try:
        found = pool.run(soak, adapter, STRATEGY, 10_000, 1000)
    finally:
        pool.stop(kill=True)
    check(found, growth=8 << 20)
