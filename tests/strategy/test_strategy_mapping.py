"""Strategies as mappings: every strategy comes back, through JSON and YAML, and errors name the key."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from harness.strategies import FOURTEEN
from hypothesis import given, strategies as st

from fsdp_zpp import NF4, Elastic, Int2Delta, Int3, Int4, Int4Delta, Int8, LocalSteps, LoCo, Strategy

BLOCKS = st.sampled_from([64, 128, 256, 4096])
INT8 = st.builds(Int8, BLOCKS)
HOP_CODECS = st.none() | INT8 | st.builds(Int4, BLOCKS)
LOCO = st.builds(
    LoCo,
    beta=st.floats(0, 0.99),
    reset_every=st.integers(0, 5000),
    hops=st.sampled_from(["inter", "both"]),
    dtype=st.none() | INT8,
    decay=st.floats(0.01, 1),
)
SENT = st.fixed_dictionaries({"codec": st.builds(Int4, BLOCKS), "error_feedback": st.none() | LOCO})
LOCAL_STEPS = st.builds(
    lambda sent, **options: LocalSteps(**sent, **options),
    sent=SENT,
    every=st.integers(10, 500),
    outer_lr=st.floats(0.01, 1.3),
    outer_momentum=st.just("auto") | st.floats(0.1, 0.99),
    spread=st.booleans(),
    overlap=st.integers(0, 9),
    mix=st.floats(0, 1),
    offload=st.booleans(),
    start=st.integers(0, 50),
    moments_every=st.none() | st.integers(1, 9),
) | st.builds(
    LocalSteps,
    elastic=st.builds(
        Elastic, st.integers(4, 9), min_nodes=st.integers(1, 4), endpoint=st.none() | st.just("login1:5")
    ),
)


@st.composite
def legal_strategies(draw: st.DrawFn) -> Strategy:
    levels = draw(st.sampled_from(FOURTEEN))
    keeps_secondary = levels[0] + levels[2] == "IG"
    local_steps = draw(st.none() | LOCAL_STEPS) if levels[2] == "I" else None
    reduces = local_steps is None or local_steps.start > 0
    gradients = draw(HOP_CODECS | st.builds(Int3, st.sampled_from([64, 1024]))) if reduces else None
    return Strategy(
        levels,
        weights=draw(
            HOP_CODECS | st.builds(Int4Delta, BLOCKS, INT8) | st.builds(Int2Delta, BLOCKS, INT8)
            if keeps_secondary
            else HOP_CODECS
        ),
        gradients=gradients,
        intra_gradients=draw(st.just("auto") | HOP_CODECS),
        error_feedback=draw(st.none() | LOCO) if isinstance(gradients, Int4 | Int8) else None,
        local_steps=local_steps,
        frozen=draw(HOP_CODECS | st.builds(NF4, BLOCKS)),
        gpus_per_node=draw(st.none() | st.integers(1, 16)),
    )


@given(legal_strategies())
def test_every_strategy_comes_back_from_files(strategy: Strategy) -> None:
    mapping = strategy.to_dict()
    assert Strategy.from_dict(json.loads(json.dumps(mapping))) == strategy
    assert Strategy.from_dict(yaml.safe_load(yaml.safe_dump(mapping))) == strategy
    assert len({strategy, Strategy.from_dict(mapping)}) == 1


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("zeropp", Strategy.zeropp()),
        ("{preset: zeropp, weights: int4delta, frozen: nf4}", Strategy.zeropp(weights=Int4Delta(), frozen=NF4())),
        ("{levels: GGG, weights: 'int8:128', gradients: none}", Strategy("GGG", weights=Int8(128))),
        (
            "{levels: IGG, weights: {codec: int4delta, block: 64, whole: 'int8:32'}}",
            Strategy("IGG", weights=Int4Delta(64, Int8(32))),
        ),
        ("{preset: zeropp, error_feedback: true}", Strategy.loco()),
        ("{preset: loco, error_feedback: false}", Strategy.zeropp()),
        ("{preset: diloco, local_steps: {codec: none}}", Strategy.diloco(local_steps=LocalSteps(codec=None))),
        ("{levels: INI, local_steps: true}", Strategy("INI", local_steps=LocalSteps())),
        (
            "{levels: III, local_steps: {codec: 'int8:64', error_feedback: {beta: 0}}}",
            Strategy("III", local_steps=LocalSteps(codec=Int8(64), error_feedback=LoCo(beta=0))),
        ),
        ("{preset: diloco, local_steps: {every: 8, elastic: {max_nodes: 4}}}", Strategy.diloco(8, Elastic(4))),
    ],
)
def test_mappings_are_read_as_they_are_written_in_yaml(text: str, strategy: Strategy) -> None:
    assert Strategy.from_dict(yaml.safe_load(text)) == strategy


@pytest.mark.parametrize(
    ("mapping", "error", "message"),
    [
        (3, TypeError, "name of a preset .zeropp, .* or a mapping, got 3"),
        ("zerop", ValueError, "^preset: 'zerop' is not known; allowed are zeropp, mixzpp"),
        ({"preset": None, "level": "IGG"}, TypeError, "^a strategy has no argument 'level'; did you mean levels"),
        ({"weights": "int7"}, ValueError, "^weights: 'int7' is not a codec; allowed are none, int8"),
        (
            {"local_steps": {"codec": "topk"}},
            ValueError,
            "^local_steps.codec: 'topk' is .*examples/top_k_codec.py",
        ),
        ({"weights": 8}, TypeError, "^weights: a codec is a name such as 'int8:256'"),
        ({"weights": {"block": 64}}, ValueError, "^weights: .* does not say which codec it is"),
        ({"weights": {"codec": "int8", "blocks": 64}}, TypeError, "^weights: Int8 has no argument 'blocks'"),
        ({"error_feedback": {"beta": 2}}, ValueError, r"^error_feedback: beta must be in \[0, 1\)"),
        ({"error_feedback": {"betas": 0.5}}, TypeError, "^error_feedback: LoCo has no .* 'betas'; did you mean beta"),
        ({"error_feedback": "inter"}, TypeError, "^error_feedback: must be true, false or a mapping"),
        ({"local_steps": {"every": 0}}, ValueError, "^local_steps: every must be"),
        ({"preset": "diloco", "local_steps": None}, ValueError, "leave it out for the defaults, or choose mics"),
        ({"local_steps": {"elastic": {"max_node": 4}}}, TypeError, "^local_steps.elastic: .*did you mean max_nodes?"),
        ({"local_steps": {"elastic": True}}, TypeError, "must be false or a mapping with max_node"),
    ],
)
def test_errors_name_the_key(mapping: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Strategy.from_dict(mapping)


@dataclass(frozen=True)
class Own(Int8):
    """A user's codec."""


def test_a_users_codec_has_no_name() -> None:
    with pytest.raises(TypeError, match=r"^weights: Own\(block=256\) has no name; those with names are int8, int4"):
        Strategy(weights=Own()).to_dict()
