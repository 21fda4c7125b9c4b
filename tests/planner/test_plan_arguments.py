"""Arguments of a plan: what is refused, what is noted, hardware by name, and the lines that make strategies."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness.strategies import PARO

from fsdp_zpp import Int4, Int4Delta, Int8, LocalSteps, LoCo, Strategy, plan
from fsdp_zpp.planner.choice import line_of
from fsdp_zpp.planner.cluster import GPUS, LINKS
from fsdp_zpp.planner.report import plan_to_json

CODECS: dict[str, Any] = {"weights": Int8(64), "gradients": Int4(32), "error_feedback": LoCo(hops="both")}
ONE_NODE: dict[str, Any] = {"nodes": 1, "gpus_per_node": 8, "intra_gbps": 2400, "micro_batches": 2, "presets": False}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"params": 0}, ValueError, "params must be a whole number of at least 1, got 0"),
        ({"params": "7e9"}, TypeError, "params must be a number, got '7e9'"),
        ({"trainable": 2e9}, ValueError, "at most the number of parameters, 1,000,000,000, got 2,000,000,000"),
        ({"nodes": True}, TypeError, "nodes must be a number, got True"),
        ({"gpus_per_node": 2.5}, ValueError, "gpus_per_node must be a whole number"),
        ({"inter_gbps": None}, ValueError, "inter_gbps is missing: there are 4 nodes"),
        ({"tokens": 4096}, ValueError, "got tokens=4096 and tflops=None; give both"),
        ({"weights": 8}, TypeError, "weights must be a codec"),
        ({"compute": torch.int8}, ValueError, "compute must be one of torch.float32, .* got torch.int8"),
        ({"reduce": "bf16"}, TypeError, "reduce must be a torch.dtype, got 'bf16'"),
        ({"gpu": "a1000"}, ValueError, r"'a1000' is not in the catalog; did you mean a100\? allowed are a10, a100,"),
        ({"local_steps": 64}, TypeError, "plan has no argument 'local_steps'"),
    ],
)
def test_bad_values_say_what_was_given_and_what_is_allowed(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan(**{"params": 1e9, **PARO, **arguments})


def test_notes_name_what_has_no_effect_on_one_gpu() -> None:
    asked = {"weights": Int8(256), "frozen": Int8(256)}
    notes = " ".join(plan(1e9, nodes=1, gpus_per_node=1, **asked).notes)
    assert "No effect here: weights=int8(256), frozen=int8(256). Codecs encode" in notes
    assert "No memory limit" in notes
    assert "No effect" not in " ".join(plan(1e9, trainable=1e6, **PARO, **asked).notes)


def test_codecs_change_nothing_on_one_node_and_the_notes_say_so() -> None:
    plain, made = plan(1e9, **ONE_NODE), plan(1e9, **ONE_NODE, **CODECS)
    for ours, expected in zip(made.estimates, plain.estimates, strict=True):
        assert (ours.volume, ours.memory, ours.time) == (expected.volume, expected.memory, expected.time)
    assert not [note for note in plain.notes if "No effect" in note or "slow" in note]
    notes = " ".join(made.notes)
    assert "No effect here: weights=int8(64), gradients=int4(32), error_feedback=beta 0.8" in notes
    assert "link='pcie4' plans each GPU of a machine as a node" in notes
    assert "weights unencoded, gradients unencoded between nodes and unencoded inside\n" in str(made)
    assert set(json.loads(plan_to_json(made))["codecs"].values()) == {None}


# ---- hardware by name


def test_each_gpu_has_a_link() -> None:
    assert {gpu.link for gpu in GPUS.values()} <= LINKS.keys()


def test_names_reach_the_plan_and_numbers_override_them() -> None:
    cluster: dict[str, Any] = {"nodes": 2, "gpus_per_node": 8, "tokens": 4096}
    named = plan(1e9, **cluster, gpu="h100", net="100gbe")
    assert named.cluster.inter_gbps == 100
    assert named.cluster.intra_gbps == LINKS["nvlink4"] / 2
    assert (named.budget.gpu_memory, named.work.tflops) == (80, 0.4 * GPUS["h100"].tflops)
    # Forward and backward take 6 FLOPs a parameter and token; the CPU launches 32 units, in 5 ms each.
    assert named["FULL_SHARD"].time.computation == pytest.approx(6 * 1e9 * 4096 / (0.4 * 989e12))
    assert named["FULL_SHARD"].time.launch == pytest.approx(32 * 0.005)
    assert named["zeropp"].time.launch > named["FULL_SHARD"].time.launch
    numbers: dict[str, Any] = {"inter_gbps": 7, "intra_gbps": 8, "gpu_memory": 9, "tflops": 10}
    given_too, alone = plan(1e9, **cluster, gpu="h100", net="100gbe", **numbers), plan(1e9, **cluster, **numbers)
    assert (given_too.cluster, given_too.budget) == (alone.cluster, alone.budget)
    assert given_too["zeropp"].time == replace(alone["zeropp"].time, launch=given_too["zeropp"].time.launch)


# ---- lines that make strategies


@pytest.mark.parametrize(
    ("strategy", "call"),
    [
        (Strategy(), "Strategy.zero3()"),
        (Strategy.zeropp(levels="IIG"), 'Strategy.zeropp(levels="IIG")'),
        (Strategy.zeropp(weights=Int4Delta()), "Strategy.zeropp(weights=Int4Delta())"),
        (Strategy("IGG", weights=Int8(64)), 'Strategy("IGG", weights=Int8(block=64))'),
        (Strategy.zeropp(error_feedback=LoCo(beta=0.5)), "Strategy.zeropp(error_feedback=LoCo(beta=0.5))"),
        (Strategy("NNI", local_steps=LocalSteps(16)), 'Strategy("NNI", local_steps=LocalSteps(every=16))'),
    ],
)
def test_lines_are_the_shortest_that_make_a_strategy(strategy: Strategy, call: str) -> None:
    line = line_of(strategy)
    assert line.endswith(f"; strategy = {call}")
    assert made_by(line) == strategy


def made_by(line: str) -> Strategy:
    """The value of ``strategy`` after a line."""
    names: dict[str, Any] = {}
    exec(line, names)
    return names["strategy"]


def test_each_row_has_a_line_that_makes_what_it_is_of() -> None:
    made = plan(1e9, nodes=2, gpus_per_node=8, gpu="rtx4090", net="10gbe", micro_batches=2)
    for row in made.rows:
        found = made_by(row.paste)
        assert row.torch in (None, getattr(found, "name", None))
        assert row.torch or found == row.candidate.strategy
