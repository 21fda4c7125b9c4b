"""Strategies: the letters that are legal, what is refused and how, presets, and what is active on a layout."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, get_type_hints

import pytest
from harness.strategies import FOURTEEN, INSIDE, INSIDE_WITH_FEEDBACK, PRESETS
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from fsdp_zpp import (
    NF4,
    Elastic,
    Int2Delta,
    Int3,
    Int4,
    Int4Delta,
    Int8,
    LocalSteps,
    LoCo,
    QuantizedReduceState,
    Strategy,
    fully_shard,
    plan,
    quantize_frozen_params,
)
from fsdp_zpp.strategy.configuration import PRESETS as NAMES, StrategyArguments
from fsdp_zpp.strategy.error_feedback import Topology

# ---- what is refused


def test_fourteen_combinations_of_scopes_are_legal_and_no_others() -> None:
    legal = set()
    for scopes in map("".join, product("NIG", repeat=3)):
        try:
            legal.add(Strategy(scopes).levels)
        except ValueError as error:
            assert "at least as fine" in str(error)  # noqa: PT017
    assert legal == set(FOURTEEN)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        *((wrong, "") for wrong in ("GG", "XGG")),
        *((name, r"\(did you mean Strategy\.\w+\(\)\?\)") for name in ("ZeroPP", "zero-3", "mixzp")),
    ],
)
def test_letters_that_were_meant_are_named(given: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"three of the letters N, I, G.*{meant}") as raised:
        Strategy(given)
    assert "legal are NNN" in str(raised.value)


def test_a_strategy_of_torch_is_no_letters() -> None:
    with pytest.raises(TypeError, match="three letters such as 'GGG', torch's FULL_SHARD"):
        Strategy(ShardingStrategy.HYBRID_SHARD)


CALLS: dict[str, tuple[Callable[..., object], str, str]] = {
    "Strategy": (Strategy, "gpu_per_node", "gpus_per_node"),
    **{name: (getattr(Strategy, name), "gpu_per_node", "gpus_per_node") for name in NAMES},
    "diloco's own": (Strategy.diloco, "evry", "every"),
    "LocalSteps": (LocalSteps, "evry", "every"),
    "Elastic": (Elastic, "max_node", "max_nodes"),
    **{codec.__name__: (codec, "blok", "block") for codec in (Int8, Int4, Int3, Int4Delta, Int2Delta, NF4)},
    "QuantizedReduceState": (QuantizedReduceState, "gpu_per_node", "gpus_per_node"),
    "fully_shard": (partial(fully_shard, nn.Linear(2, 2), strategy=Strategy()), "mp_polcy", "mp_policy"),
    "plan": (partial(plan, 1e9), "gpu_per_node", "gpus_per_node"),
    "quantize_frozen_params": (quantize_frozen_params, "gpu_per_node", "gpus_per_node"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_misspelt_argument_is_told_what_was_meant(name: str) -> None:
    call, given, meant = CALLS[name]
    with pytest.raises(TypeError, match=rf"has no argument '{given}'; did you mean {meant}\?"):
        call(**{given: 2})


LOCAL = {"levels": "III", "local_steps": LocalSteps()}
INNER_FEEDBACK = {"intra_gradients": Int8(), "error_feedback": LoCo()}


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "message"),
    [
        (Int8, {"xyz": 2}, TypeError, "Int8 has no argument 'xyz'; allowed are block"),
        (Strategy, {"levels": 3}, TypeError, "three letters"),
        (Strategy, {"weights": 8}, TypeError, "weights must be a codec such as Int8"),
        (Strategy, {"weights": Int8}, TypeError, r"did you mean Int8\(\)"),
        (Strategy, {"error_feedback": True}, TypeError, "error_feedback must be a LoCo"),
        (Strategy, {"error_feedback": LoCo()}, ValueError, "gradients=None has no error"),
        (Strategy, {"local_steps": 64}, TypeError, r"local_steps must be LocalSteps\(...\) or None, got 64"),
        (Strategy, LOCAL | {"levels": "GGG"}, ValueError, "levels 'GGG' place it elsewhere; choose I for"),
        (Strategy, LOCAL | {"levels": "NNN"}, ValueError, "or 'NNI' in place of 'NNN'"),
        (Strategy, LOCAL | {"gradients": Int4()}, ValueError, "a start; or encode the exchanges with LocalSteps"),
        (Strategy, LOCAL | INNER_FEEDBACK, ValueError, "pass LocalSteps.error_feedback"),
        (Strategy, {"gpus_per_node": 0}, ValueError, "at least 1, got 0"),
        (Strategy, {"levels": "GGG", "weights": Int4Delta()}, ValueError, "secondary shard in each node, which"),
        (Strategy, {"levels": "III", "weights": Int4Delta()}, ValueError, "secondary shard in each node, which"),
        (Strategy, {"levels": "III", "weights": Int2Delta()}, ValueError, "secondary shard in each node, which"),
        (Strategy, {"gradients": Int2Delta()}, ValueError, "gradients can't be Int2Delta.*: a delta needs a base"),
        (Strategy.loco, {"gradients": Int3()}, ValueError, "error_feedback can't correct Int3.*: it mixes values"),
        (Strategy, {"weights": Int3()}, ValueError, "weights can't be Int3.*for gradients alone: nothing else"),
        (Strategy, {"gradients": Int4Delta()}, ValueError, "gradients can't be Int4Delta.*: a delta needs a base"),
        (Strategy, {"frozen": Int4Delta()}, ValueError, "frozen can't be Int4Delta.*: a delta needs a base"),
        (Strategy.diloco, {"every": 8, "local_steps": LocalSteps(8)}, TypeError, "pass them to it alone"),
        (Strategy.diloco, {"local_steps": None}, ValueError, "leave it out for the defaults, or choose mics"),
        (LoCo, {"beta": 1.0}, ValueError, "beta"),
        (LoCo, {"hops": "intra"}, ValueError, "hops"),
        (Topology, {"world": 6, "gpus_per_node": 4}, ValueError, "a world of .* and gpus_per_node=.*; allowed"),
    ],
)
def test_wrong_arguments_say_what_is_allowed(
    kind: Callable[..., object], arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kind(**arguments)


# ---- values


def test_strategies_compare_hash_and_pickle_as_values() -> None:
    strategy = Strategy.zeropp(gpus_per_node=8)
    assert strategy == Strategy("IGG", weights=Int8(256), gradients=Int4(128), gpus_per_node=8)
    assert hash(strategy) == hash(Strategy.zeropp(gpus_per_node=8))
    assert pickle.loads(pickle.dumps(strategy)) == strategy
    assert strategy != Strategy.zeropp()
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.levels = "GGG"


def test_presets_are_shorthand_for_strategies() -> None:
    presets = {name: getattr(Strategy, name)() for name in NAMES}
    letters = {"zero1": "NNG", "zero2": "NGG", "zero3": "GGG", "mics": "III", "diloco": "III"}
    letters |= {"zeropp": "IGG", "mixzpp": "IGG", "loco": "IGG"}
    assert {name: preset.levels for name, preset in presets.items()} == letters
    assert presets["mixzpp"].frozen == "auto"
    assert presets["loco"].error_feedback == LoCo()
    assert Strategy.zeropp(levels="GGG", weights=None) == Strategy("GGG", gradients=Int4(128))
    assert Strategy.mics(gpus_per_node=4).gpus_per_node == 4
    assert Strategy.diloco(levels="NNI") == Strategy("NNI", local_steps=LocalSteps(64))
    assert Strategy.diloco(8).local_steps == LocalSteps(8)
    assert Strategy.diloco(local_steps=LocalSteps(8, codec=None)).local_steps == LocalSteps(8, codec=None)
    assert get_type_hints(StrategyArguments).keys() == {field.name for field in dataclasses.fields(Strategy)}


def test_gradients_are_finer_on_the_intra_node_hop_by_default() -> None:
    assert Strategy(gradients=Int4(64)).gradient_codecs == (Int8(64), Int4(64))
    assert Strategy().gradient_codecs == (None, None)
    assert Strategy(gradients=Int4(64), intra_gradients=None).gradient_codecs == (None, Int4(64))
    assert Strategy(intra_gradients=Int8(32)).gradient_codecs == (Int8(32), None)


# ---- on a layout


def test_hops_join_the_ranks_of_a_node_and_those_of_one_local_index() -> None:
    topology = Topology(6, 2)
    assert topology.intra_partition() == [[0, 1], [2, 3], [4, 5]]
    assert topology.inter_partition() == [[0, 2, 4], [1, 3, 5]]


ONE = Topology(4, 4)


def test_on_one_node_only_codecs_named_for_it_are_active() -> None:
    for strategy in PRESETS.values():
        resolved = strategy.resolve(ONE)
        assert (resolved.weights, resolved.gradient_codecs, resolved.error_feedback) == (None, (None, None), None)
        assert "".join(resolved.scopes) == "GGG"
        for topology in (Topology(4, 2), Topology(4, 1)):
            resolved = strategy.resolve(topology)
            assert resolved.weights == strategy.weights
            assert resolved.gradient_codecs == strategy.gradient_codecs
            assert resolved.error_feedback == strategy.error_feedback
    assert Strategy.mixzpp().resolve(ONE).frozen == Int8(256)
    for feedback in (INSIDE_WITH_FEEDBACK.error_feedback, None):
        resolved = replace(INSIDE_WITH_FEEDBACK, error_feedback=feedback).resolve(ONE)
        assert resolved.gradient_codecs == (INSIDE_WITH_FEEDBACK.gradient_codecs[0], None)
        assert resolved.error_feedback == feedback
    assert replace(INSIDE, error_feedback=LoCo()).resolve(ONE).error_feedback is None


def test_gradients_accumulate_before_the_first_hop_that_has_error_feedback() -> None:
    two, ones = Topology(4, 2), Topology(4, 1)
    assert [Strategy(levels).resolve(ones).scopes for levels in ("III", "IIG")] == [("N", "N", "N"), ("I", "N", "G")]
    for strategy, topology, scope in (
        (Strategy.zeropp(), two, "G"),
        (Strategy.loco(), two, "I"),
        (Strategy.loco(), ones, "N"),
        (Strategy.loco(error_feedback=LoCo(hops="both")), two, "N"),
    ):
        assert strategy.resolve(topology).scopes.gradients == scope


@pytest.mark.parametrize("gpus", [1, 2])
def test_on_its_own_a_node_has_neither_codecs_nor_errors_of_the_other_hop(gpus: int) -> None:
    for levels, feedback in product(("III", "INI", "NNI"), (None, LoCo(), LoCo(hops="both"))):
        alone = Strategy(levels, local_steps=LocalSteps()).resolve(Topology(4, gpus)).within_node()
        strategy = Strategy(levels, gradients=Int4(), error_feedback=feedback, local_steps=LocalSteps(start=8))
        assert replace(strategy.resolve(Topology(4, gpus)).within_node()) == alone
        named = replace(strategy, intra_gradients=Int8(32)).resolve(Topology(4, gpus)).within_node()
        assert named.gradient_codecs == (Int8(32), None)
        assert named.error_feedback == (feedback if feedback is not None and feedback.hops == "both" else None)
