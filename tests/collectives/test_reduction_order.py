"""Units reduce in one order on all ranks, each once a micro-batch; see [Note: The order of reductions]."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_zpp.collectives.reduction_order import ReductionOrder


@dataclass(eq=False)
class Unit:
    """A unit, which ranks may have gathered for the micro-batch or not."""

    name: str
    takes_part: bool = True

    def __repr__(self) -> str:
        return self.name


def test_units_reduce_in_their_order_whatever_order_autograd_finishes_them_in() -> None:
    a, b, c = units = [Unit(name) for name in "abc"]
    order = ReductionOrder(units)
    assert [order.finished(unit) for unit in (b, c, a)] == [[], [c, b], [a]]
    assert order.remaining() == []


def test_the_next_micro_batch_reduces_in_the_order_of_the_last_synchronized_backward() -> None:
    a, b, c = units = [Unit(name) for name in "abc"]
    order = ReductionOrder(units)
    for unit in (b, a, c, b):
        order.synchronized.append(unit)
    order.restart()
    assert order.remaining() == [b, a, c]


def test_a_unit_without_a_gradient_reduces_at_the_end() -> None:
    a, b, c = units = [Unit(name) for name in "abc"]
    order = ReductionOrder(units)
    assert order.finished(c) == [c]
    assert order.finished(a) == []
    assert order.remaining() == [b, a]


def test_a_unit_that_is_gathered_after_its_turn_reduces_at_the_end() -> None:
    a, b, c = units = [Unit(name) for name in "abc"]
    order = ReductionOrder(units)
    b.takes_part = False
    assert [order.finished(unit) for unit in (c, a)] == [[c], [a]]
    b.takes_part = True
    assert order.finished(b) == []
    assert order.remaining() == [b]
    assert order.remaining() == [c, b, a]
