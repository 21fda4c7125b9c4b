"""Local steps: what is refused, the fragments that are due after each step, outer momentum, and elastic nodes."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, strategies as st
from top_k_codec import TopK

from fsdp_zpp import NF4, Elastic, Int4, LocalSteps, LoCo, Strategy
from fsdp_zpp.strategy.local_steps import (
    MOST_MOMENTUM,
    TARGET_GAIN,
    aligned_gain,
    correlation_of_changes,
    fitting_momentum,
)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"every": 0}, ValueError, "every must be an int of 1 or more optimizer steps, got 0"),
        ({"every": ((0, 8), (100, 32))}, ValueError, "every must be an int of 1 or more optimizer steps, got "),
        ({"every": 4, "overlap": 4}, ValueError, "below every=4, so that"),
        ({"start": -1}, ValueError, "start must be an int of 0 or more synchronous steps at the beginning, got -1"),
        ({"stop": 900}, TypeError, "LocalSteps has no argument 'stop'"),
        ({"moments_every": 0}, ValueError, "moments_every must be an int of 1 or more exchanges, or None, .* got 0"),
        ({"outer_lr": 0}, ValueError, "outer_lr must be a number above 0, got 0"),
        ({"outer_momentum": "auto", "outer_lr": 1.4}, ValueError, "outer_lr=1.4 leaves no room for momentum"),
        ({"spread": 1}, TypeError, "spread must be True or False, got 1"),
        ({"overlap": -1}, ValueError, "overlap must be an int of 0 or more optimizer steps and below every=64"),
        ({"codec": "int4"}, TypeError, "codec must be a codec such as Int4"),
        ({"codec": TopK()}, ValueError, "leaves out most of a change, which is lost without error feedback: pass"),
        ({"codec": NF4()}, ValueError, "for frozen weights alone"),
        ({"error_feedback": True}, TypeError, "error_feedback must be a LoCo or None, got True"),
        ({"codec": None, "error_feedback": LoCo()}, ValueError, "codec=None has no error"),
        ({"max_nodes": 0}, ValueError, "min_nodes must be 1 or more and max_nodes no fewer, got min_nodes=1 and max"),
        ({"max_nodes": 2, "endpoint": "login1"}, ValueError, "endpoint must be host:port such as 'login1:29400'"),
        ({"max_nodes": 2, "run_id": ""}, TypeError, "run_id must be a text that is not empty, got ''"),
        ({"max_nodes": 2, "last_call": 1}, ValueError, "last_call must be a number of seconds above 1, got 1"),
        ({"max_nodes": 2, "join_timeout": float("inf")}, ValueError, "join_timeout must be .* got inf"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        (Elastic if "max_nodes" in arguments else LocalSteps)(**arguments)


def test_it_is_a_value() -> None:
    assert LocalSteps() == LocalSteps(every=64, codec=Int4(128))
    assert len({LocalSteps(8), LocalSteps(8), LocalSteps(32)}) == 2
    assert str(LocalSteps()) == "every 64 steps as int4(128), outer lr 0.7, Nesterov momentum auto"
    assert str(LocalSteps(8, start=50)).endswith("momentum auto, after 50 synchronous steps")
    assert str(LocalSteps(overlap=2, mix=0.5, moments_every=3)).endswith(
        "momentum auto, arriving 2 steps later, mixed in at 0.5, moments in 1 of 3 exchanges as int8(128)"
    )
    assert str(LocalSteps(elastic=Elastic(4, min_nodes=2))).endswith(", among 2 to 4 nodes that come and go")


# ---- when exchanges are due


@given(every=st.integers(1, 200), fragments=st.integers(1, 200), first=st.integers(1, 10**6), spread=st.booleans())
def test_each_fragment_is_due_once_in_any_steps_in_a_row_and_the_last_with_the_last_step(
    every: int, fragments: int, first: int, spread: bool
) -> None:
    config = LocalSteps(every=every, spread=spread)
    due = [config.due(step, fragments) for step in range(first, first + every)]
    assert sorted(index for indices in due for index in indices) == list(range(fragments))
    most = math.ceil(fragments / every) if spread else fragments
    assert max(map(len, due)) <= most
    assert fragments - 1 in config.due(3 * every, fragments)


# ---- outer momentum, beside sums and searches that share no formula with it

rates = st.floats(0.05, TARGET_GAIN - 0.01)
correlations = st.floats(-1, 1)


def settled_gain(lr: float, momentum: float, correlation: float) -> float:
    """The gain after many exchanges of changes that are k exchanges apart and correlate by correlation^k."""
    along = 0.0  # the momentum kept, along the next change
    for k in range(1000, 0, -1):
        along += momentum ** (k - 1) * correlation**k
    return aligned_gain(lr, momentum, along)


@given(lr=rates, correlation=correlations)
def test_it_is_the_largest_that_keeps_to_the_target(lr: float, correlation: float) -> None:
    momentum = fitting_momentum(lr, correlation)
    assert 0 < momentum <= MOST_MOMENTUM
    gain = settled_gain(lr, momentum, correlation)
    assert gain <= TARGET_GAIN + 1e-9
    if correlation >= 0 and momentum < MOST_MOMENTUM:
        assert gain == pytest.approx(TARGET_GAIN)
    assert momentum == fitting_momentum(lr, -correlation)


@given(
    momentum=st.floats(0, MOST_MOMENTUM),
    correlation=correlations,
    any_momentum=st.floats(0, 0.99),
    alignment=st.floats(-1e30, 1e30),
)
def test_the_correlation_is_that_at_which_the_momentum_has_settled(
    momentum: float, correlation: float, any_momentum: float, alignment: float
) -> None:
    settled = sum(momentum ** (k - 1) * correlation**k for k in range(1, 1000))
    assert correlation_of_changes(momentum, settled) == pytest.approx(correlation, abs=1e-9)
    assert -1 <= correlation_of_changes(any_momentum, alignment) <= 1


def test_the_defaults_of_diloco() -> None:
    alike, unrelated = (settled_gain(0.7, 0.9, correlation) for correlation in (1.0, 0.0))
    assert (alike, unrelated) == (pytest.approx(7), pytest.approx(1.33))
    assert fitting_momentum(0.7, 1.0) == pytest.approx(0.5)
    assert fitting_momentum(0.7, 0.0) == 0.9


# ---- elastic nodes


def test_local_steps_refuse_what_elastic_nodes_cannot_do() -> None:
    with pytest.raises(ValueError, match=r"overlap=2 leaves an exchange under way .*: pass overlap=0"):
        LocalSteps(overlap=2, elastic=Elastic(2))
    for name, value in {"start": 5, "moments_every": 3}.items():
        with pytest.raises(ValueError, match=rf"elastic nodes do not support {name}={value}, .*: leave it out"):
            LocalSteps(elastic=Elastic(2), **{name: value})
    with pytest.raises(TypeError, match=r"elastic must be Elastic\(...\) or None, got 2"):
        LocalSteps(elastic=2)
    with pytest.raises(TypeError, match="every and elastic are arguments of LocalSteps, too"):
        Strategy.diloco(elastic=Elastic(2), local_steps=LocalSteps())


def test_the_endpoint_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FSDP_ZPP_ENDPOINT", raising=False)
    with pytest.raises(ValueError, match=r"pass Elastic.endpoint='host:port'. or set FSDP_ZPP_ENDPOINT"):
        Elastic(2).address()
    monkeypatch.setenv("FSDP_ZPP_ENDPOINT", "login1:29400")
    assert Elastic(2).address() == ("login1", 29400)
    assert Elastic(2, endpoint="[::1]:5").address() == ("::1", 5)
