"""Parameters of tests in pairs: each two values of different factors meet in some test, not each three of them.

What goes wrong when things are combined goes wrong with two of them, hardly ever with three alone, and pairs take as
many tests as the two largest factors have combinations, whatever else there is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import combinations, product as products
from typing import Any

import pytest

Factor = Collection[Any] | Mapping[str, Any]
"""Values of one argument; a mapping gives their names in test ids."""


def over_pairs(skip: Any = None, rest: bool = True, **factors: Factor) -> pytest.MarkDecorator:
    """Parametrize a test with every pair of values, and with all other combinations where slow tests run.

    Args:
        skip: Called with the values by name: whether they can't be combined.
        rest: Whether other combinations are slow tests, or none at all.
        **factors: Values by the name of the argument.
    """
    named = [list(f.items()) if isinstance(f, Mapping) else [(_id(v), v) for v in f] for f in factors.values()]
    product = list(products(*(range(len(factor)) for factor in named)))
    if skip is not None:
        product = [row for row in product if not skip(**dict(zip(factors, _values(named, row), strict=True)))]
    chosen = pairwise(product)
    parameters = []
    for row in product:
        if row in chosen or rest:
            marks = [] if row in chosen else [pytest.mark.slow]
            ids = "-".join(factor[i][0] for factor, i in zip(named, row, strict=True))
            parameters.append(pytest.param(*_values(named, row), id=ids, marks=marks))
    return pytest.mark.parametrize(list(factors), parameters)


def pairwise(product: Sequence[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Few rows of ``product`` in which all pairs of values of two columns are that are in any row of it.

    Each is one with as many pairs as any has that no earlier one has.
    """
    bits: dict[Any, int] = {}
    pairs = [sum(bits.setdefault(pair, 1 << len(bits)) for pair in combinations(enumerate(row), 2)) for row in product]
    missing = (1 << len(bits)) - 1
    # What a row adds only ever becomes less, so a row whose count is still right and the largest is the best one.
    heap = [(-of_row.bit_count(), i) for i, of_row in enumerate(pairs)]
    heapify(heap)
    chosen = set()
    while missing:
        counted, i = heap[0]
        adds = (pairs[i] & missing).bit_count()
        if adds < -counted:
            heapreplace(heap, (-adds, i))
        else:
            chosen.add(product[i])
            missing &= ~pairs[i]
            heappop(heap)
    return chosen


def _values(named: list[list[tuple[str, Any]]], row: tuple[int, ...]) -> list[Any]:
    return [factor[i][1] for factor, i in zip(named, row, strict=True)]


def _id(value: Any) -> str:
    return getattr(value, "__name__", None) or str(value)
