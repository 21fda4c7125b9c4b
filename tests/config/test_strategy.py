"""Strategy objects: what it accepts, what it refuses and how it says so."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import get_type_hints

import pytest
from harness.strategies import FOURTEEN
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from fsdp_zpp import (
    NF4,
    Elastic,
    Int4,
    Int4Delta,
    Int8,
    LocalSteps,
    LoCo,
    QuantizedReduceState,
    Strategy,
    TopK,
    fully_shard,
    plan,
    quantize_frozen_params,
)
from fsdp_zpp.config.mapping import PRESETS
from fsdp_zpp.config.strategy_arguments import StrategyArguments

TORCHS = {
    "FULL_SHARD": "GGG",
    "SHARD_GRAD_OP": "NGG",
    "HYBRID_SHARD": "III",
    "_HYBRID_SHARD_ZERO2": "NII",
    "NO_SHARD": "NNN",
}
"""The letters of torch's strategies, or those that come closest."""


def test_fourteen_combinations_of_scopes_are_legal_and_no_others() -> None:
    legal = set()
    for scopes in map("".join, product("NIG", repeat=3)):
        try:
            legal.add(Strategy(scopes).levels)
        except ValueError as error:
            assert "at least as fine" in str(error)  # noqa: PT017
    assert legal == set(FOURTEEN)


@pytest.mark.parametrize("scopes", ["", "GG", "GGGG", "ggg", "XGG", "G G"])
def test_scopes_are_three_of_the_letters_n_i_g(scopes: str) -> None:
    with pytest.raises(ValueError, match="three of the letters N, I, G; legal are NNN"):
        Strategy(scopes)


@pytest.mark.parametrize("name", ["zeropp", "ZeroPP", "zero-3", "mixzp", "diloco"])
def test_the_name_of_a_preset_is_recognized(name: str) -> None:
    with pytest.raises(ValueError, match=r"three of the letters N, I, G \(did you mean Strategy\.\w+\(\)\?\); legal"):
        Strategy(name)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("iig", "did you mean 'IIG'?"),
        ("ggg", "did you mean 'GGG'?"),
        *((name, f"torch's {name} is {letters!r}") for name, letters in TORCHS.items()),
        ("hybrid_shard", "torch's HYBRID_SHARD is 'III'"),
        ("ShardingStrategy.NO_SHARD", "torch's NO_SHARD is 'NNN'"),
    ],
)
def test_letters_that_were_meant_are_named(given: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"three of the letters N, I, G; legal are .*{re.escape(meant)}$"):
        Strategy(given)


@pytest.mark.parametrize("name", TORCHS)
def test_a_strategy_of_torch_as_levels_is_told_its_letters(name: str) -> None:
    with pytest.raises(TypeError, match=f"torch's {name} is '{TORCHS[name]}'"):
        Strategy(ShardingStrategy[name])  # type: ignore[arg-type]


CALLS: dict[str, tuple[Callable[..., object], str, str]] = {
    "Strategy": (Strategy, "gpu_per_node", "gpus_per_node"),
    **{name: (getattr(Strategy, name), "gpu_per_node", "gpus_per_node") for name in PRESETS},
    "diloco's own": (Strategy.diloco, "evry", "every"),
    "LoCo": (LoCo, "betta", "beta"),
    "LocalSteps": (LocalSteps, "evry", "every"),
    "Elastic": (Elastic, "max_node", "max_nodes"),
    "Int8": (Int8, "blok", "block"),
    "Int4": (Int4, "blok", "block"),
    "Int4Delta": (Int4Delta, "blok", "block"),
    "NF4": (NF4, "blok", "block"),
    "TopK": (TopK, "frac", "fraction"),
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


def test_an_argument_like_no_other_is_told_what_is_allowed() -> None:
    with pytest.raises(TypeError, match="Int8 has no argument 'xyz'; allowed are block"):
        Int8(xyz=2)  # type: ignore[call-arg]


LOCAL = {"levels": "III", "local_steps": LocalSteps()}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"levels": 3}, TypeError, "three letters"),
        ({"weights": 8}, TypeError, "weights must be a codec such as Int8"),
        ({"weights": Int8}, TypeError, r"did you mean Int8\(\)"),
        ({"gradients": "int4"}, TypeError, "gradients must be a codec"),
        ({"intra_gradients": "int8"}, TypeError, "intra_gradients must be a codec"),
        ({"frozen": 1}, TypeError, "frozen must be a codec"),
        ({"error_feedback": True}, TypeError, "error_feedback must be a LoCo"),
        ({"error_feedback": LoCo()}, ValueError, "gradients=None has no error"),
        ({"local_steps": 64}, TypeError, r"local_steps must be LocalSteps\(...\) or None, got 64"),
        ({"local_steps": LocalSteps()}, ValueError, "under levels 'GGG' a node holds only a part of the optimizer"),
        ({"levels": "IIG", "local_steps": LocalSteps()}, ValueError, "choose I or N for the optimizer, such as 'III'"),
        (
            LOCAL | {"gradients": Int4()},
            ValueError,
            "give it a start or a stop; or encode the exchanges with LocalSteps",
        ),
        (LOCAL | {"intra_gradients": Int8(), "error_feedback": LoCo()}, ValueError, "pass LocalSteps.error_feedback"),
        ({"gpus_per_node": 0}, ValueError, "at least 1, got 0"),
        ({"gpus_per_node": 2.0}, TypeError, "positive int"),
        ({"gpus_per_node": True}, TypeError, "positive int"),
    ],
)
def test_wrong_arguments_say_what_is_allowed(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Strategy(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beta": 1.0}, "beta"),
        ({"beta": -0.1}, "beta"),
        ({"reset_every": -1}, "reset_every"),
        ({"reset_every": 1.5}, "reset_every"),
        ({"hops": "intra"}, "hops"),
    ],
)
def test_loco_refuses_values_out_of_range(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoCo(**arguments)


def test_strategies_compare_hash_and_pickle_as_values() -> None:
    strategy = Strategy.zeropp(gpus_per_node=8)
    assert strategy == Strategy("IGG", weights=Int8(256), gradients=Int4(128), gpus_per_node=8)
    assert hash(strategy) == hash(Strategy.zeropp(gpus_per_node=8))
    assert pickle.loads(pickle.dumps(strategy)) == strategy
    assert strategy != Strategy.zeropp()
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.levels = "GGG"


def test_presets_are_shorthand_for_strategies() -> None:
    presets = {name: getattr(Strategy, name)() for name in "zeropp mixzpp loco zero1 zero2 zero3 mics".split()}
    scopes = {name: preset.levels for name, preset in presets.items()}
    assert scopes == dict.fromkeys(("zeropp", "mixzpp", "loco"), "IGG") | {
        "zero1": "NNG",
        "zero2": "NGG",
        "zero3": "GGG",
        "mics": "III",
    }
    assert presets["mixzpp"].frozen == "auto"
    assert presets["loco"].error_feedback == LoCo()
    assert Strategy.zeropp(levels="GGG", weights=None) == Strategy("GGG", gradients=Int4(128))
    assert Strategy.mics(gpus_per_node=4).gpus_per_node == 4
    assert Strategy.diloco(levels="NNN") == Strategy("NNN", local_steps=LocalSteps(64))
    assert Strategy.diloco(8).local_steps == LocalSteps(8)
    assert Strategy.diloco(local_steps=LocalSteps(8, codec=None)).local_steps == LocalSteps(8, codec=None)
    with pytest.raises(TypeError, match="pass one of them"):
        Strategy.diloco(8, local_steps=LocalSteps(8))


def test_presets_take_the_arguments_of_a_strategy() -> None:
    assert get_type_hints(StrategyArguments).keys() == {field.name for field in dataclasses.fields(Strategy)}


def test_gradients_are_finer_on_the_intra_node_hop_by_default() -> None:
    assert Strategy(gradients=Int4(64)).gradient_codecs == (Int8(64), Int4(64))
    assert Strategy().gradient_codecs == (None, None)
    assert Strategy(gradients=Int4(64), intra_gradients=None).gradient_codecs == (None, Int4(64))
    assert Strategy(intra_gradients=Int8(32)).gradient_codecs == (Int8(32), None)


@pytest.mark.parametrize("scopes", ["GGG", "NNG", "III", "NNN"])
def test_differences_need_a_secondary_shard(scopes: str) -> None:
    with pytest.raises(ValueError, match="secondary shard in each node, which"):
        Strategy(scopes, weights=Int4Delta())


@pytest.mark.parametrize("name", ["gradients", "intra_gradients", "frozen"])
def test_only_weights_can_be_sent_as_differences(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} can't be Int4Delta.*for weights alone: a delta needs a base"):
        Strategy("IGG", **{name: Int4Delta()})
