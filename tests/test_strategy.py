"""The strategy object: what it accepts, what it refuses and how it says so."""

from __future__ import annotations

import dataclasses
import pickle
import re
from itertools import product

import pytest

from fsdp_zpp import Codec, Int4, Int8, LoCo, Strategy
from fsdp_zpp.activity import activity
from fsdp_zpp.topology import Topology
from fsdp_zpp.torch_version import check_torch_version

# PaRO's 14 strategies, written out: an oracle that shares no code with the rule.
FOURTEEN = "NNN NNI NII INI III NNG NIG NGG ING IIG IGG GNG GIG GGG".split()


def test_fourteen_levels_are_legal_and_no_others() -> None:
    legal = set()
    for letters in map("".join, product("NIG", repeat=3)):
        try:
            legal.add(Strategy(letters).levels)
        except ValueError as error:
            assert "at least as fine" in str(error)  # noqa: PT017
    assert legal == set(FOURTEEN)


@pytest.mark.parametrize("levels", ["", "GG", "GGGG", "ggg", "XGG", "G G"])
def test_other_words_are_refused(levels: str) -> None:
    with pytest.raises(ValueError, match="three of the letters N, I, G; legal are NNN"):
        Strategy(levels)


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
        ({"gpus_per_node": 0}, ValueError, "at least 1, got 0"),
        ({"gpus_per_node": 2.0}, TypeError, "positive int"),
        ({"gpus_per_node": True}, TypeError, "positive int"),
    ],
)
def test_wrong_arguments(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Strategy(**arguments)


@pytest.mark.parametrize("codec", [Int8, Int4])
@pytest.mark.parametrize("block", [0, 16, 48, 100, 8192, -256])
def test_blocks_are_powers_of_two_from_32_to_4096(codec: type[Codec], block: int) -> None:
    with pytest.raises(ValueError, match=f"{block}.*power of two"):
        codec(block)


@pytest.mark.parametrize("block", [32.0, "256", True, None])
def test_blocks_are_ints(block: object) -> None:
    with pytest.raises(TypeError, match="must be an int"):
        Int8(block)


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
def test_loco_ranges(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoCo(**arguments)


def test_strategies_are_values() -> None:
    strategy = Strategy.zeropp(gpus_per_node=8)
    assert strategy == Strategy("IGG", weights=Int8(256), gradients=Int4(128), gpus_per_node=8)
    assert hash(strategy) == hash(Strategy.zeropp(gpus_per_node=8))
    assert pickle.loads(pickle.dumps(strategy)) == strategy
    assert strategy != Strategy.zeropp()
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.levels = "GGG"


def test_presets() -> None:
    presets = {name: getattr(Strategy, name)() for name in "zeropp mixzpp loco zero1 zero2 zero3 mics".split()}
    levels = {name: preset.levels for name, preset in presets.items()}
    assert levels == dict.fromkeys(("zeropp", "mixzpp", "loco"), "IGG") | {
        "zero1": "NNG",
        "zero2": "NGG",
        "zero3": "GGG",
        "mics": "III",
    }
    assert presets["mixzpp"].frozen == Int8(256)
    assert presets["loco"].error_feedback == LoCo()
    assert Strategy.zeropp(levels="GGG", weights=None) == Strategy("GGG", gradients=Int4(128))
    assert Strategy.mics(gpus_per_node=4).gpus_per_node == 4


def test_the_hop_inside_a_node_is_finer() -> None:
    assert Strategy(gradients=Int4(64)).gradient_codecs == (Int8(64), Int4(64))
    assert Strategy().gradient_codecs == (None, None)
    assert Strategy(gradients=Int4(64), intra_gradients=None).gradient_codecs == (None, Int4(64))
    assert Strategy(intra_gradients=Int8(32)).gradient_codecs == (Int8(32), None)


@pytest.mark.parametrize(("world", "gpus"), [(4, 3), (6, 4), (2, 4), (4, 0)])
def test_topology_must_divide(world: int, gpus: int) -> None:
    with pytest.raises(ValueError, match=f"a world of {world} and gpus_per_node={gpus}; allowed are"):
        Topology(world, gpus)


def test_topology_hops_cover_the_mesh() -> None:
    topology = Topology(6, 2)
    assert topology.intra_partition() == [[0, 1], [2, 3], [4, 5]]
    assert topology.inter_partition() == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0", "3.0.0a0+git1", "1.13.1"])
def test_other_versions_of_torch_are_refused(version: str) -> None:
    with pytest.raises(RuntimeError, match=rf"this is torch {re.escape(version)}\. torch 2\.11 to 2\.15 work"):
        check_torch_version("FullyShardedDataParallel", version)


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1", "2.15.0a0+git"])
def test_supported_versions_of_torch(version: str) -> None:
    check_torch_version("FullyShardedDataParallel", version)


def test_activity_names_what_is_off_and_why() -> None:
    zeropp = Strategy.zeropp()
    two_nodes = activity(zeropp, Topology(4, 2))
    assert len(two_nodes.active) == 4
    assert not two_nodes.inactive
    one_node = str(activity(zeropp, Topology(4, 4)))
    assert "NOT active: weights gathered as int8(256), gradients reduced as int4(128) (one node: no gain" in one_node
    assert one_node.count("one node: no inter-node hop") == 1
    assert "no intra-node hop" in str(activity(zeropp, Topology(4, 1)))
    (alone,) = activity(zeropp, Topology(1, 1)).inactive
    assert alone.endswith("gradients reduced as int4(128) between nodes (one rank: nothing is sent)")
    assert activity(Strategy(), Topology(4, 2)).active == (
        "weights gathered in full precision",
        "gradients reduced in full precision",
    )
