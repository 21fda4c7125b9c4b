"""The size of outer steps, and the momentum that fits them, beside sums and searches that share no formula with it."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, strategies as st

from fsdp_zpp.config.outer_momentum import (
    MOST_MOMENTUM,
    TARGET_GAIN,
    aligned_gain,
    correlation_of_changes,
    fitting_momentum,
)

rates = st.floats(0.05, TARGET_GAIN - 0.01)
correlations = st.floats(-1, 1)


def settled_gain(lr: float, momentum: float, correlation: float, nesterov: bool) -> float:
    """The gain after many exchanges of changes that are k exchanges apart and correlate by correlation^k."""
    along = 0.0  # the momentum kept, along the next change
    for k in range(1000, 0, -1):
        along += momentum ** (k - 1) * correlation**k
    return aligned_gain(lr, momentum, along, nesterov=nesterov)


@given(lr=rates, correlation=correlations, nesterov=st.booleans())
def test_it_is_the_largest_that_keeps_to_the_target(lr: float, correlation: float, nesterov: bool) -> None:
    momentum = fitting_momentum(lr, correlation, nesterov=nesterov)
    assert 0 < momentum <= MOST_MOMENTUM
    gain = settled_gain(lr, momentum, correlation, nesterov)
    assert gain <= TARGET_GAIN + 1e-9
    if correlation >= 0 and momentum < MOST_MOMENTUM:
        assert gain == pytest.approx(TARGET_GAIN)
    assert momentum == fitting_momentum(lr, -correlation, nesterov=nesterov)


@given(momentum=st.floats(0, MOST_MOMENTUM), correlation=correlations)
def test_the_correlation_is_that_at_which_the_momentum_has_settled(momentum: float, correlation: float) -> None:
    alignment = sum(momentum ** (k - 1) * correlation**k for k in range(1, 1000))
    assert correlation_of_changes(momentum, alignment) == pytest.approx(correlation, abs=1e-9)


@given(momentum=st.floats(0, 0.99), alignment=st.floats(-1e30, 1e30))
def test_a_correlation_is_between_minus_one_and_one(momentum: float, alignment: float) -> None:
    assert -1 <= correlation_of_changes(momentum, alignment) <= 1


@given(lr=rates, momentum=st.floats(0, 0.99), alignment=st.floats(-10, 10), nesterov=st.booleans())
def test_the_gain_is_that_of_a_step_along_the_change(
    lr: float, momentum: float, alignment: float, nesterov: bool
) -> None:
    # Along the change, in units of it: the momentum kept is ``alignment``, the change 1.
    assume(abs(alignment) > 1e-3)
    buffer = momentum * alignment + 1
    step = lr * (1 + momentum * buffer if nesterov else buffer)
    assert aligned_gain(lr, momentum, alignment, nesterov=nesterov) == pytest.approx(step, abs=1e-9)


def test_the_defaults_of_diloco() -> None:
    alike, unrelated = (settled_gain(0.7, 0.9, correlation, nesterov=True) for correlation in (1.0, 0.0))
    assert (alike, unrelated) == (pytest.approx(7), pytest.approx(1.33))
    assert fitting_momentum(0.7, 1.0, nesterov=True) == pytest.approx(0.5)
    assert fitting_momentum(0.7, 0.0, nesterov=True) == 0.9
