"""Plans with local steps: their times, the laws that they follow, and when one of them is chosen."""

from __future__ import annotations

import dataclasses
from math import inf
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fsdp_zpp import Int4, Int4Delta, Int8, LocalSteps, LoCo, Strategy, plan
from fsdp_zpp.planner.choice import TOLERANCE
from fsdp_zpp.planner.cluster import GIB, Cluster
from fsdp_zpp.planner.memory import Memory, Volume
from fsdp_zpp.planner.step_time import Exchanges, StepTime, with_exchanges

LETTERS = "NNN NNI NII INI III".split()
"""The letters that can have local steps."""
CLUSTER = {"nodes": 4, "gpus_per_node": 8, "inter_gbps": 100, "intra_gbps": 2400, "presets": False}
SLOW = CLUSTER | {"inter_gbps": 0.1}
local_steps = st.builds(
    lambda every, overlap, **options: LocalSteps(every, overlap=min(overlap, every - 1), **options),
    every=st.integers(1, 40),
    overlap=st.integers(0, 40),
    codec=st.sampled_from([None, Int4(128), Int8(256)]),
    spread=st.booleans(),
    offload=st.booleans(),
)


def waited(step: float, fragment: float, fragments: int, config: LocalSteps) -> float:
    """The average wait of a step, played out: an oracle that shares no formula with the planner."""
    now = idle_from = 0.0
    on_way: list[tuple[int, float]] = []
    half = 40 * config.every
    now_at_half = 0.0
    for number in range(1, 2 * half + 1):
        now += step
        for _ in config.due(number, fragments):
            idle_from = max(idle_from, now) + fragment
            on_way.append((number + config.overlap, idle_from))
        now = max([now, *(arrived for due, arrived in on_way if due <= number)])
        on_way = [(due, arrived) for due, arrived in on_way if due > number]
        now_at_half = now if number == half else now_at_half
    return (now - now_at_half) / half - step


def _sent(each: Volume, count: int, moments: Volume | None = None) -> Exchanges:
    return Exchanges(each, moments or Volume(), Memory(), count)


@settings(deadline=None, max_examples=200)
@given(
    step=st.integers(1, 20),
    fragment=st.integers(1, 200),
    counts=st.tuples(st.integers(1, 6), st.integers(1, 6), st.booleans()),
    overlap=st.integers(0, 36),
    spread=st.booleans(),
)
def test_training_waits_as_when_the_steps_are_played_out(
    step: int, fragment: int, counts: tuple[int, int, bool], overlap: int, spread: bool
) -> None:
    # Evenly spread: one fragment every few steps, or several of them in each.
    fragments, spacing, several = counts
    every, count = (fragments, fragments * spacing) if several else (fragments * spacing, fragments)
    config = LocalSteps(every, overlap=min(overlap, every - 1), spread=spread)
    # A fragment takes ``fragment`` milliseconds at 8 Gbit/s.
    sent = Volume(inter=fragment * count * 10**6, intra=0)
    found = with_exchanges(StepTime(0, 0, step * 1e-3), _sent(sent, count), Cluster(2, 1, inter_gbps=8), config)
    assert found.exchange == pytest.approx(fragment * count * 1e-3 / every)
    assert found.wait == pytest.approx(waited(step * 1e-3, fragment * 1e-3, count, config), abs=1e-9)
    assert found.total == found.computation + found.wait


def test_moments_and_what_is_put_together_inside_a_node_are_waited_for_in_spite_of_an_overlap() -> None:
    cluster, config = Cluster(2, 2, inter_gbps=8, intra_gbps=80), LocalSteps(10, overlap=9, moments_every=4)
    step, sent = StepTime(0, 0.1, 0.2), Volume(inter=10**6, intra=10**8)
    found = with_exchanges(step, _sent(sent, 10), cluster, LocalSteps(10, overlap=9))
    assert found.wait == pytest.approx(0.001)  # 10 ms a round of 10 steps, and none for what goes between nodes
    assert found.exchange == pytest.approx(0.001 + 0.0002)  # both GPUs of a node send 1 MB in 10 steps
    assert found.total == pytest.approx(0.201)
    alone, beside = (
        with_exchanges(step, _sent(Volume(inter=10**6), 10, moments), cluster, config)
        for moments in (Volume(), Volume(inter=10**8, intra=10**8))
    )
    # In 40 steps, both GPUs of a node send 100 MB to the other one, and each 100 MB inside.
    assert beside.wait - alone.wait == beside.exchange - alone.exchange == pytest.approx((0.2 + 0.01) / 40)


JOBS = st.fixed_dictionaries(
    {
        "params": st.integers(100, 10**12),
        "nodes": st.integers(1, 64),
        "gpus_per_node": st.integers(1, 16),
        "inter_gbps": st.floats(0.01, 1000),
        "micro_batches": st.integers(1, 8),
        "gpu_memory": st.floats(5, 500) | st.none(),
    }
)
COMPUTED = st.sampled_from([{}, {"tokens": 4096, "tflops": 200}])
CODECS = st.sampled_from([{}, {"weights": Int4Delta(), "gradients": Int4(128), "error_feedback": LoCo()}])


@settings(deadline=None, max_examples=60)
@given(job=JOBS, config=local_steps, computed=COMPUTED, codecs=CODECS)
def test_plans_with_local_steps_follow_their_laws(
    job: dict[str, Any], config: LocalSteps, computed: dict[str, Any], codecs: dict[str, Any]
) -> None:
    asked = job | computed | codecs | {"intra_gbps": 2400, "presets": False}
    plain, made = plan(**asked), plan(**asked, local_steps=config)
    # Strategies that train in step are as they were.
    assert made.estimates[:14] == plain.estimates
    local = made.estimates[14:]
    assert sorted(estimate.levels for estimate in local) == sorted(LETTERS if job["nodes"] > 1 else [])
    if job["nodes"] == 1:
        assert {*made.notes} == {*plain.notes, "Local steps have no effect: there is only one node."}
        assert dataclasses.replace(made, notes=plain.notes) == plain
        return
    fastest, in_step = (min((e.time.total for e in of if e.fits), default=inf) for of in (local, plain.estimates))
    if made.choice in local:
        assert fastest * (1 + TOLERANCE) < in_step > made.choice.time.total
        assert "It changes the mathematics" in made.reason
    else:
        assert fastest * (1 + TOLERANCE) >= in_step or fastest == inf
        assert made.choice == plain.choice
        faster = made.choice is not None and fastest < made.choice.time.total
        assert ("too small a gain to change the mathematics for" in made.reason) == faster
    longer = plan(**asked | {"micro_batches": job["micro_batches"] + 1}, local_steps=config)
    rarer = plan(**asked, local_steps=dataclasses.replace(config, every=2 * config.every, overlap=2 * config.overlap))
    for estimate, later, half in zip(local, longer.estimates[14:], rarer.estimates[14:], strict=True):
        strategy = estimate.strategy
        assert made[estimate.name] is estimate
        assert (strategy.levels, strategy.local_steps, strategy.gradients) == (estimate.levels, config, None)
        # Nothing but exchanges goes between nodes.
        assert 0 < estimate.volume.inter == later.volume.inter
        assert abs(2 * half.volume.inter - estimate.volume.inter) <= 2  # both are rounded up
        assert half.memory == estimate.memory
        assert half.time.exchange == pytest.approx(estimate.time.exchange / 2)
        assert 0 <= estimate.time.wait <= estimate.time.exchange * (1 + 1e-9)
        assert (estimate.memory.outer == 0) == config.offload
        assert job["gpus_per_node"] > 1 or estimate.volume.intra == 0
    if job["gpus_per_node"] == 1:
        assert len({(estimate.volume, estimate.memory, estimate.time) for estimate in local}) == 1


def test_local_steps_are_chosen_on_a_slow_network_or_if_nothing_else_fits() -> None:
    slow = plan(7e9, **SLOW, tokens=8192, tflops=200, gpu_memory=80, local_steps=LocalSteps())
    assert slow.choice.strategy.local_steps == LocalSteps()
    in_step = min((e for e in slow.estimates[:14] if e.fits), key=lambda estimate: estimate.time.total)
    assert f"It changes the mathematics; of those that do not, {in_step.name} is the fastest, at" in slow.reason
    # Without errors of gradients and with outer state on the CPU, they take the least memory.
    asked = {"gradients": Int4(128), "error_feedback": LoCo(), "local_steps": LocalSteps(offload=True)}
    small = {"units": 1000, "storage": torch.bfloat16, "optimizer_bytes": 0}
    cluster = {"nodes": 2, "gpus_per_node": 1, "inter_gbps": 100, "presets": False}
    least = min(estimate.memory.total for estimate in plan(7e9, **cluster, **small, **asked).estimates) / GIB
    made = plan(7e9, **cluster, **small, **asked, gpu_memory=least)
    assert made.choice.strategy.local_steps is not None
    assert "It changes the mathematics; without that, nothing fits." in made.reason


def test_codecs_of_gradients_between_nodes_are_left_out_and_the_notes_say_so() -> None:
    asked = {"weights": Int8(256), "gradients": Int4(128), "error_feedback": LoCo(hops="both")}
    made = plan(7e9, **CLUSTER, **asked, local_steps=LocalSteps())
    strategy = Strategy("III", weights=Int8(256), local_steps=LocalSteps(), gpus_per_node=8)
    assert made["III every 64"].strategy == strategy
    assert made.notes[-1] == (
        "Local steps ignore gradients=int4(128) and error_feedback=beta 0.8, reset every 1024 steps, kept in fp32: "
        "gradients stay inside nodes, unencoded unless intra_gradients names a codec."
    )
    named = plan(7e9, **CLUSTER, **asked, intra_gradients=Int8(64), local_steps=LocalSteps())
    inside = named["III every 64"].strategy
    assert (inside.intra_gradients, inside.error_feedback) == (Int8(64), asked["error_feedback"])
    assert named.notes[-1] == "Local steps ignore gradients=int4(128): gradients stay inside nodes."
    assert "ignore" not in " ".join(plan(7e9, **CLUSTER, weights=Int8(256), local_steps=LocalSteps()).notes)


def test_memory_is_enough_for_synchronous_steps() -> None:
    asked = {"gradients": Int4(128), "error_feedback": LoCo(), "micro_batches": 2}
    plain = plan(7e9, **CLUSTER, **asked)
    alone = plan(7e9, **CLUSTER, local_steps=LocalSteps(32), micro_batches=2)
    for start, stop in ((100, None), (0, 5000)):
        made = plan(7e9, **CLUSTER, **asked, local_steps=LocalSteps(32, start=start, stop=stop))
        for levels in LETTERS:
            found, on_its_own = made[f"{levels} every 32"], alone[f"{levels} every 32"]
            assert (found.volume, found.time) == (on_its_own.volume, on_its_own.time)
            in_step = plain[levels].memory.total + (on_its_own.memory.outer if start else 0)
            # Before the stop, the moments of the largest unit are averaged in fp32, sent and received.
            buffers = 0 if stop is None else 2 * 4 * max(unit.trainable for unit in made.size.units) / 8
            least = max(on_its_own.memory.total, in_step)
            assert least <= found.memory.total <= least + buffers
            assert found.strategy.gradients == Int4(128)
        phases = " and ".join([f"the first {start}"] * (start > 0) + [f"those from {stop} on"] * (stop is not None))
        assert made.notes[-1].startswith(f"Synchronous steps ({phases}) send what the same letters send without local")
