"""Planned times, the laws that plans follow, and which strategy is chosen."""

from __future__ import annotations

import dataclasses

import pytest
from harness.strategies import CONSTANT_BETWEEN_NODES, FOURTEEN, LLAMA_7B, LLAMA_65B, PARO
from hypothesis import given, settings, strategies as st

from fsdp_zpp import Int4, Int8, plan
from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.planner.choice import TOLERANCE
from fsdp_zpp.planner.config import GIB
from fsdp_zpp.planner.report import Plan


def test_times_are_bytes_over_bandwidth_and_flops_over_flops_per_second() -> None:
    made = plan(8e6, trainable=2e6, **PARO | {"inter_gbps": 50}, tokens=1000, tflops=100)
    for estimate in made.estimates:
        assert estimate.time.inter == pytest.approx(8 * estimate.volume.inter * 8 / 50e9)
        assert estimate.time.intra == pytest.approx(estimate.volume.intra * 8 / 2400e9)
        assert estimate.time.communication == estimate.time.inter + estimate.time.intra
        assert estimate.time.computation == pytest.approx((6 * 2e6 + 4 * 6e6) * 1000 * 10 / 100e12)
        assert estimate.time.total == max(estimate.time.communication, estimate.time.computation)
    assert any(e.time.communication < e.time.computation for e in made.estimates)
    assert any(e.time.communication > e.time.computation for e in made.estimates)


def test_computation_that_hides_all_leaves_the_choice_to_what_crosses_nodes_then_to_memory() -> None:
    made = plan(**LLAMA_7B, **PARO, tokens=10_000, tflops=100)
    assert len({estimate.time.total for estimate in made.estimates}) == 1
    assert made.choice is made["IIG"]
    assert made["GGG"].memory.total < made["IIG"].memory.total
    assert {e.levels for e in made.estimates if e.time.inter == made.choice.time.inter} == {*CONSTANT_BETWEEN_NODES}
    assert "computation hides their communication; of these it sends the least and takes the least" in made.reason
    one_node = plan(**LLAMA_7B, **PARO | {"nodes": 1}, tokens=10_000, tflops=100)
    assert one_node.choice is one_node["GGG"]  # over fast links, nothing but memory is left


@settings(deadline=None, max_examples=50)
@given(
    params=st.integers(100, 10**12),
    share=st.floats(0.01, 1),
    nodes=st.integers(1, 64),
    gpus=st.integers(1, 16),
    micro_batches=st.integers(1, 16),
    inter=st.floats(1, 1000),
    intra=st.floats(1, 5000),
    gpu_memory=st.floats(5, 500),
)
def test_plans_follow_the_laws_of_their_cluster(
    params: int,
    share: float,
    nodes: int,
    gpus: int,
    micro_batches: int,
    inter: float,
    intra: float,
    gpu_memory: float,
) -> None:
    cluster = {"nodes": nodes, "gpus_per_node": gpus, "inter_gbps": inter, "intra_gbps": intra}
    arguments = cluster | {"trainable": max(1, int(share * params)), "gpu_memory": gpu_memory}
    arguments |= {"presets": False}
    made = plan(params, micro_batches=micro_batches, **arguments)
    longer = plan(params, micro_batches=micro_batches + 1, **arguments)
    for before, after in zip(made.estimates, longer.estimates, strict=True):
        assert after.volume.inter >= before.volume.inter
        assert after.volume.intra >= before.volume.intra
        assert after.memory.total >= before.memory.total
        if before.levels in CONSTANT_BETWEEN_NODES:
            assert after.volume.inter == before.volume.inter
        elif nodes > 1:
            assert after.volume.inter > before.volume.inter
        assert nodes > 1 or after.volume.inter == 0
        assert gpus > 1 or after.volume.intra == 0
    assert sorted(estimate.levels for estimate in made.estimates) == sorted(FOURTEEN)
    check_choice(made, gpu_memory)


def check_choice(made: Plan, gpu_memory: float) -> None:
    fitting = [estimate for estimate in made.estimates if estimate.fits]
    assert fitting == [estimate for estimate in made.estimates if estimate.memory.total <= gpu_memory * GIB]
    if made.choice is None:
        assert not fitting
        assert made.reason.startswith("Nothing fits")
        return
    assert made.choice in fitting
    for other in fitting:
        assert made.choice.time.total <= other.time.total * (1 + TOLERANCE)
        if other.time.total <= made.choice.time.total and other.time.inter <= made.choice.time.inter:
            assert made.choice.memory.total <= other.memory.total


def test_if_nothing_fits_the_smallest_is_named() -> None:
    made = plan(**LLAMA_65B, **PARO | {"gpu_memory": 30})
    assert made.choice is None
    smallest = made["GGG"]
    assert smallest.memory.total == min(estimate.memory.total for estimate in made.estimates)
    figures = f"GGG, takes {smallest.memory.total / GIB:.1f} GiB"
    assert made.reason == f"Nothing fits in 30 GiB a GPU: the smallest, {figures}."


def test_the_only_strategy_that_fits_is_chosen() -> None:
    made = plan(**LLAMA_65B, **PARO | {"gpu_memory": 45})
    assert made.choice is made["GGG"]
    assert "only one that fits" in made.reason


def test_among_strategies_that_come_to_the_same_the_usual_one_is_chosen() -> None:
    one_node = plan(1e9, nodes=1, gpus_per_node=8, intra_gbps=2400, presets=False)
    assert one_node["III"].memory == one_node["GGG"].memory
    assert one_node["NNI"].volume == one_node["NNG"].volume
    assert one_node.choice is one_node["NNG"]
    assert plan(1e9, nodes=8, gpus_per_node=1, inter_gbps=100, presets=False).choice.levels in {"NNN", "NNG"}


def test_the_choice_carries_the_codecs_and_the_layout() -> None:
    asked = {"weights": Int8(128), "gradients": Int4(64), "intra_gradients": None, "frozen": Int8(512)}
    made = plan(65e9, trainable=1e6, **PARO, **asked)
    assert made.choice.strategy == Strategy(made.choice.levels, **asked, gpus_per_node=8)


def test_a_billion_nodes_are_planned() -> None:
    made = plan(1e15, **PARO | {"nodes": 10**9})
    assert made["IIG"].inter_node_bytes == pytest.approx(4e15, rel=0.01)


def test_looking_up_illegal_scopes_names_the_legal_ones() -> None:
    with pytest.raises(KeyError, match="'NGN'; there are NNN, NNI"):
        plan(1e9, **PARO)["NGN"]


def test_plans_are_values() -> None:
    made = plan(1e9, **PARO)
    assert made == plan(1e9, **PARO)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.choice = None
