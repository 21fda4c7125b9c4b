"""Local steps: what is refused, and which fragments are due after which step."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from fsdp_zpp import NF4, Int4, Int4Delta, LoCo, TopK
from fsdp_zpp.config.local_steps import LocalSteps


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"every": 0}, ValueError, "every must be an int of 1 or more optimizer steps, or a tuple of pairs .*; got 0"),
        ({"every": [[0, 8]]}, ValueError, r"or a tuple of pairs .*; got \[\[0, 8\]\]"),
        ({"every": ()}, ValueError, r"ints of 0 or more and of 1 or more; got \(\)"),
        ({"every": (0, 8)}, ValueError, r"got \(0, 8\)"),
        ({"every": ((0, 8, 1),)}, ValueError, r"got \(\(0, 8, 1\),\)"),
        ({"every": ((0, True),)}, ValueError, "got .*True"),
        ({"every": ((0, 8), (10, 0))}, ValueError, "ints of 0 or more and of 1 or more"),
        ({"every": ((1, 8),)}, ValueError, "every must begin with from_step 0"),
        ({"every": ((0, 8), (10, 4), (10, 2))}, ValueError, "each from_step be above the one before; got .*10, 2"),
        ({"every": ((0, 8), (10, 4)), "overlap": 4}, ValueError, "below every=4, so that"),
        ({"every": ((0, 8), (10, 4)), "stop": 10}, ValueError, "begins at stop=10 or after it"),
        ({"start": -1}, ValueError, "start must be an int of 0 or more synchronous steps at the beginning, got -1"),
        ({"start": True}, ValueError, "got True"),
        ({"stop": 0}, ValueError, "stop must be None or an int above start=0, .*; got 0"),
        ({"start": 8, "stop": 8}, ValueError, "above start=8, .*; got 8"),
        ({"stop": 8.0}, ValueError, "got 8.0"),
        ({"every": 1.5}, ValueError, "got 1.5"),
        ({"every": True}, ValueError, "got True"),
        ({"outer_lr": 0}, ValueError, "outer_lr must be a number above 0, got 0"),
        ({"outer_lr": float("nan")}, ValueError, "got nan"),
        ({"outer_lr": float("inf")}, ValueError, "got inf"),
        ({"outer_momentum": 1}, ValueError, r"outer_momentum must be 'auto' or in \[0, 1\), got 1"),
        ({"outer_momentum": "0.9"}, ValueError, "got '0.9'"),
        ({"outer_momentum": True}, ValueError, "got True"),
        ({"outer_momentum": "auto", "outer_lr": 1.4}, ValueError, "outer_lr=1.4 leaves no room for momentum"),
        ({"outer_momentum": 0}, ValueError, "pass nesterov=False"),
        ({"nesterov": 1}, TypeError, "nesterov must be True or False, got 1"),
        ({"spread": None}, TypeError, "spread must be True or False, got None"),
        ({"overlap": -1}, ValueError, "overlap must be an int of 0 or more optimizer steps and below every=64"),
        ({"overlap": 8, "every": 8}, ValueError, "below every=8, so that an exchange arrives before the next; got 8"),
        ({"overlap": True}, ValueError, "got True"),
        ({"mix": -0.1}, ValueError, r"mix must be in \[0, 1\], got -0.1"),
        ({"mix": 1.5}, ValueError, "got 1.5"),
        ({"offload": 1}, TypeError, "offload must be True or False, got 1"),
        ({"moments_every": 0}, ValueError, "moments_every must be an int of 1 or more exchanges, or None, .* got 0"),
        ({"moments_every": True}, ValueError, "got True"),
        ({"codec": "int4"}, TypeError, "codec must be a codec such as Int4"),
        ({"codec": Int4Delta()}, ValueError, "for weights alone: a delta needs a base"),
        ({"codec": TopK()}, ValueError, "leaves out most of a change, which is lost without error feedback: pass"),
        ({"codec": NF4()}, ValueError, "for frozen weights alone"),
        ({"error_feedback": True}, TypeError, "error_feedback must be a LoCo or None, got True"),
        ({"codec": None, "error_feedback": LoCo()}, ValueError, "codec=None has no error"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LocalSteps(**arguments)


def test_it_is_a_value() -> None:
    assert LocalSteps() == LocalSteps(every=64, codec=Int4(128))
    assert len({LocalSteps(), LocalSteps(every=8), LocalSteps()}) == 2
    assert str(LocalSteps()) == "every 64 steps as int4(128), outer lr 0.7, Nesterov momentum auto"
    assert str(LocalSteps(overlap=2, mix=0.5)).endswith("momentum auto, arriving 2 steps later, mixed in at 0.5")
    assert str(LocalSteps(outer_momentum=0.9)).endswith("outer lr 0.7, Nesterov momentum 0.9")
    assert str(LocalSteps(mix=0)).endswith("mixed in at 0")
    assert len({LocalSteps(((0, 8), (100, 32))), LocalSteps(((0, 8), (100, 32))), LocalSteps(((0, 8),))}) == 2
    assert str(LocalSteps(((0, 8), (100, 32)), start=50, stop=900, nesterov=False)) == (
        "every 8 steps, from step 100 on every 32 as int4(128), outer lr 0.7, momentum auto, after 50 synchronous "
        "steps, synchronous again from step 900 on"
    )
    assert str(LocalSteps(moments_every=3)).endswith("momentum auto, moments in 1 of 3 exchanges as int8(128)")
    assert str(LocalSteps(moments_every=1)).endswith("momentum auto, moments in each exchange as int8(128)")


@given(every=st.integers(1, 200), fragments=st.integers(1, 200), first=st.integers(1, 10**6), spread=st.booleans())
def test_each_fragment_is_due_once_in_any_steps_in_a_row(every: int, fragments: int, first: int, spread: bool) -> None:
    config = LocalSteps(every=every, spread=spread)
    due = [config.due(step, fragments) for step in range(first, first + every)]
    assert sorted(index for indices in due for index in indices) == list(range(fragments))
    most = math.ceil(fragments / every) if spread else fragments
    assert max(map(len, due)) <= most


@st.composite
def schedules(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    """Segments of any lengths, whole numbers of exchanges or not."""
    begins = sorted({0, *draw(st.lists(st.integers(1, 500), max_size=4))})
    return tuple((begin, draw(st.integers(1, 60))) for begin in begins)


@given(schedule=schedules(), fragments=st.integers(1, 50), spread=st.booleans(), data=st.data())
def test_each_fragment_is_due_once_in_any_steps_in_a_row_of_a_segment(
    schedule: tuple[tuple[int, int], ...], fragments: int, spread: bool, data: st.DataObject
) -> None:
    config, ends = LocalSteps(schedule, spread=spread), [begin for begin, _ in schedule[1:]] + [10**6]
    at = data.draw(st.integers(0, len(schedule) - 1))
    (begin, every), end = schedule[at], ends[at]
    alone = LocalSteps(every, spread=spread)
    for step in range(begin + 1, min(end, begin + 2 * every) + 1):
        assert config.due(step, fragments) == alone.due(step - begin, fragments)
    if end - begin >= every:
        first = data.draw(st.integers(begin + 1, end - every + 1))
        due = [config.due(step, fragments) for step in range(first, first + every)]
        assert sorted(index for indices in due for index in indices) == list(range(fragments))


@given(start=st.integers(0, 50), length=st.integers(1, 50), made=st.integers(0, 200), stops=st.booleans())
def test_steps_are_synchronous_before_the_start_and_after_the_stop(
    start: int, length: int, made: int, stops: bool
) -> None:
    config = LocalSteps(start=start, stop=start + length if stops else None)
    assert config.is_synchronous(made) == (made < start or (stops and made >= start + length))
    assert config.has_synchronous_steps == any(map(config.is_synchronous, range(200)))


@given(every=st.integers(1, 200), fragments=st.integers(1, 200), spread=st.booleans())
def test_the_last_fragment_comes_with_the_last_step(every: int, fragments: int, spread: bool) -> None:
    assert fragments - 1 in LocalSteps(every=every, spread=spread).due(3 * every, fragments)
