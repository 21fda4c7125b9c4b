"""The adapters that tests run over, and parameters of tests that are too many to combine.

Values that can interact meet in pairs (:func:`over_pairs`): each two in some test, though not each three. What goes
wrong when things are combined goes wrong with two of them, hardly ever with three alone, and pairs take as many tests
as the two largest factors have combinations, whatever else there is. Others only occur (:func:`over_each`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import combinations, product as products
from typing import Any

import pytest

from .adapter import Adapter
from .fsdp1 import Fsdp1
from .fsdp2 import Fsdp2

ADAPTERS: list[Adapter] = [Fsdp1(), Fsdp2()]
WITH_FLAT: list[Adapter] = [*ADAPTERS, Fsdp1(use_orig_params=False)]

SCOPES = ("GGG", "IGG", "IIG", "III", "NNG", "NNN")
"""Every scope for every state; adapters/test_training_laws.py has all fourteen combinations."""

over_adapters = pytest.mark.parametrize("adapter", ADAPTERS, ids=str)
over_adapters_and_flat = pytest.mark.parametrize("adapter", WITH_FLAT, ids=str)

Factor = Collection[Any] | Mapping[str, Any]
"""Values of one argument; a mapping gives their names in test ids."""


def over_pairs(rest: bool = True, **factors: Factor) -> pytest.MarkDecorator:
    """Parametrize a test with every pair of values, and with all other combinations where slow tests run.

    Args:
        rest: Whether other combinations are slow tests, or none at all.
        **factors: Values by the name of the argument.
    """
    named = [_named(factor) for factor in factors.values()]
    product = _product(named)
    chosen = covering_array(product)
    return _parametrize(list(factors), named, product if rest else sorted(chosen), chosen)


def over_each(times: int = 1, rest: bool = True, **factors: Factor) -> pytest.MarkDecorator:
    """Parametrize a test with every value ``times`` times or more often, and with every pair where wide tests run.

    Args:
        times: How often each value of the largest factor occurs.
        rest: Whether pairs are wide tests and all other combinations slow ones, or none at all.
        **factors: Values by the name of the argument.
    """
    named = [_named(factor) for factor in factors.values()]
    sizes = [len(factor) for factor in named]
    # In other turns shorter factors are shifted, those of one size by different steps: all of them meet in time.
    same = [sizes[:i].count(size) for i, size in enumerate(sizes)]
    chosen = {
        tuple((k + (size < max(sizes)) * (turn + turn // 2 * n)) % size for size, n in zip(sizes, same, strict=True))
        for turn in range(times)
        for k in range(max(sizes) if all(sizes) else 0)
    }
    product = _product(named)
    return _parametrize(list(factors), named, product if rest else sorted(chosen), chosen, covering_array(product))


def covering_array(product: Sequence[tuple[int, ...]]) -> set[tuple[int, ...]]:
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


def _named(factor: Factor) -> list[tuple[str, Any]]:
    if isinstance(factor, Mapping):
        return list(factor.items())
    return [(getattr(value, "__name__", None) or str(value), value) for value in factor]


def _product(named: list[list[tuple[str, Any]]]) -> list[tuple[int, ...]]:
    return list(products(*(range(len(factor)) for factor in named)))


def _parametrize(
    names: list[str],
    named: list[list[tuple[str, Any]]],
    rows: list[tuple[int, ...]],
    default: set[tuple[int, ...]],
    wide: Collection[tuple[int, ...]] = (),
) -> pytest.MarkDecorator:
    parameters = []
    for row in rows:
        ids = "-".join(factor[i][0] for factor, i in zip(named, row, strict=True))
        marks = [] if row in default else [pytest.mark.wide if row in wide else pytest.mark.slow]
        parameters.append(pytest.param(*_values(named, row), id=ids, marks=marks))
    return pytest.mark.parametrize(names, parameters)


def _values(named: list[list[tuple[str, Any]]], row: tuple[int, ...]) -> list[Any]:
    return [factor[i][1] for factor, i in zip(named, row, strict=True)]
