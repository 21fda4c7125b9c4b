"""The adapters that tests run over, and parameters of tests that are too many to combine.

Values that can interact meet in pairs (:func:`over_pairs`), which take as many tests as the two largest factors have
combinations: faults of combinations hardly ever need three values. Others only occur (:func:`over_each`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import combinations, product
from typing import Any

import pytest

from .adapter import Adapter, Fsdp1, Fsdp2

ADAPTERS: list[Adapter] = [Fsdp1(), Fsdp2()]
WITH_FLAT: list[Adapter] = [*ADAPTERS, Fsdp1(use_orig_params=False)]
over_adapters = pytest.mark.parametrize("adapter", ADAPTERS, ids=str)
over_adapters_and_flat = pytest.mark.parametrize("adapter", WITH_FLAT, ids=str)

SCOPES = ("GGG", "IGG", "IIG", "III", "NNG", "NNN")  # every scope for every state

Factor = Collection[Any] | Mapping[str, Any]  # values of one argument; a mapping gives their names in test ids
Row = tuple[int, ...]  # the places of values in their factors


def over_pairs(rest: bool = True, **factors: Factor) -> pytest.MarkDecorator:
    """Parametrize a test with every pair of values; with ``rest``, other combinations are slow tests."""
    rows = _product(factors)
    chosen = covering_array(rows)
    return _parametrize(factors, rows if rest else sorted(chosen), chosen)


def over_each(times: int = 1, rest: bool = True, **factors: Factor) -> pytest.MarkDecorator:
    """Parametrize a test with every value, each of the largest factor ``times`` times.

    With ``rest``, pairs of values are wide tests and other combinations slow ones.
    """
    sizes = [len(factor) for factor in factors.values()]
    # In other turns shorter factors are shifted, those of one size by different steps: all of them meet in time.
    same = [sizes[:i].count(size) for i, size in enumerate(sizes)]
    chosen = {
        tuple((k + (size < max(sizes)) * (turn + turn // 2 * n)) % size for size, n in zip(sizes, same, strict=True))
        for turn in range(times)
        for k in range(max(sizes) if all(sizes) else 0)
    }
    rows = _product(factors) if rest else sorted(chosen)
    return _parametrize(factors, rows, chosen, covering_array(rows))


def covering_array(rows: Sequence[Row]) -> set[Row]:
    """Return few of ``rows`` with all pairs of values in them: each has as many as any that no earlier one has."""
    bits: dict[Any, int] = {}
    pairs = [sum(bits.setdefault(pair, 1 << len(bits)) for pair in combinations(enumerate(row), 2)) for row in rows]
    missing = (1 << len(bits)) - 1
    # A row only ever adds less, so one whose count is still right and the largest is the best.
    heap = [(-of_row.bit_count(), i) for i, of_row in enumerate(pairs)]
    heapify(heap)
    chosen = set()
    while missing:
        counted, i = heap[0]
        adds = (pairs[i] & missing).bit_count()
        if adds < -counted:
            heapreplace(heap, (-adds, i))
        else:
            chosen.add(rows[i])
            missing &= ~pairs[i]
            heappop(heap)
    return chosen


def _product(factors: dict[str, Factor]) -> list[Row]:
    return list(product(*(range(len(factor)) for factor in factors.values())))


def _parametrize(
    factors: dict[str, Factor], rows: list[Row], default: set[Row], wide: Collection[Row] = ()
) -> pytest.MarkDecorator:
    named = [
        list(factor.items())
        if isinstance(factor, Mapping)
        else [(getattr(value, "__name__", None) or str(value), value) for value in factor]
        for factor in factors.values()
    ]
    parameters = []
    for row in rows:
        names, values = zip(*(factor[i] for factor, i in zip(named, row, strict=True)), strict=True)
        marks = [] if row in default else [pytest.mark.wide if row in wide else pytest.mark.slow]
        parameters.append(pytest.param(*values, id="-".join(names), marks=marks))
    return pytest.mark.parametrize(list(factors), parameters)
