"""Hardware by name, and the lines that make strategies."""

from __future__ import annotations

from typing import Any

import pytest
from harness.strategies import FOURTEEN
from hypothesis import given, settings, strategies as st

from fsdp_zpp import NF4, Int4, Int4Delta, Int8, LocalSteps, LoCo, Strategy, plan
from fsdp_zpp.__main__ import main
from fsdp_zpp.planner.catalog import GPUS, LINKS, NETWORKS, gpu_named, link_named, network_named
from fsdp_zpp.planner.paste import line_of
from fsdp_zpp.planner.report import Plan

CLUSTER: dict[str, Any] = {"nodes": 2, "gpus_per_node": 8}


def test_each_figure_has_a_source_and_each_gpu_a_link() -> None:
    for entry in (*GPUS.values(), *LINKS.values(), *NETWORKS.values()):
        assert len(entry.source) > 10
    assert {gpu.link for gpu in GPUS.values()} <= LINKS.keys()
    assert {name for name, link in LINKS.items() if link.fast} == {name for name in LINKS if name.startswith("nvlink")}
    assert all(link.gbps > 400 for link in LINKS.values() if link.fast)


def test_bandwidths_of_buses_are_lanes_times_rates() -> None:
    # 16 lanes of 8, 16 and 32 GT/s, of which 128 of 130 bits are data.
    for name, rate in (("pcie3", 8), ("pcie4", 16), ("pcie5", 32)):
        assert LINKS[name].gbps == pytest.approx(16 * rate * 128 / 130, rel=1e-3)
    for name, network in NETWORKS.items():
        assert name.startswith("ib-") or network.gbps == float(name.removesuffix("gbe"))


def test_several_cards_carry_several_times_as_much() -> None:
    assert network_named("8xib-ndr").gbps == 8 * network_named("ib-ndr").gbps == 3200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu": "a1000"}, r"gpu 'a1000' is not in the catalog; did you mean a100\? allowed are a10, a100,"),
        ({"link": "usb"}, "link 'usb' is not in the catalog; allowed are nvlink3,"),
        ({"net": "10gb"}, r"net '10gb' is not in the catalog; did you mean 10gbe\?"),
        ({"net": "0x10gbe"}, "net '0x10gbe' is not in the catalog"),
        ({"gpu": "a100", "utilization": 1.5}, "utilization is a share of the GPU's peak, above 0 and up to 1, got 1.5"),
        ({"utilization": 0.5}, "utilization=0.5 is a share of a GPU's peak; name the gpu, or give tflops"),
        ({"launch_ms": -1, "gpu": "a100", "net": "10gbe"}, "launch_ms must be at least 0, got -1"),
        ({"gpu": "a100"}, "inter_gbps is missing"),
    ],
)
def test_unknown_names_say_which_are_known(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(1e9, **CLUSTER, **arguments)


def test_names_reach_the_plan_and_numbers_override_them(capsys: pytest.CaptureFixture[str]) -> None:
    named = plan(1e9, **CLUSTER, gpu="h100", net="100gbe", tokens=4096)
    assert named.cluster.inter_gbps == 100
    assert named.cluster.intra_gbps == link_named("nvlink4").gbps / 2
    assert (named.budget.gpu_memory, named.work.tflops) == (80, 0.4 * gpu_named("h100").tflops)
    # Forward and backward take 6 FLOPs a parameter and token; the CPU launches 32 units, in 5 ms each.
    assert named["FULL_SHARD"].time.computation == pytest.approx(6 * 1e9 * 4096 / (0.4 * 989e12))
    assert named["FULL_SHARD"].time.launch == pytest.approx(32 * 0.005)
    assert named["zeropp"].time.launch > named["FULL_SHARD"].time.launch
    numbers: dict[str, Any] = {"inter_gbps": 7, "intra_gbps": 8, "gpu_memory": 9, "tflops": 10, "launch_ms": 0}
    given_too = plan(1e9, **CLUSTER, gpu="h100", net="100gbe", tokens=4096, **numbers)
    assert given_too == plan(1e9, **CLUSTER, tokens=4096, **numbers)
    options = "--params 1e9 --nodes 2 --gpus-per-node 8 --gpu h100 --net 100gbe --tokens 4096"
    assert main(["plan", *options.split()]) == 0
    assert capsys.readouterr().out == f"{named}\n"


@pytest.mark.parametrize(
    ("strategy", "call"),
    [
        (Strategy(), "Strategy.zero3()"),
        (Strategy("IGG"), 'Strategy("IGG")'),
        (Strategy.zeropp(), "Strategy.zeropp()"),
        (Strategy.zeropp(levels="IIG"), 'Strategy.zeropp(levels="IIG")'),
        (Strategy.zeropp(weights=Int4Delta()), "Strategy.zeropp(weights=Int4Delta())"),
        (Strategy.mixzpp(frozen=NF4(64)), "Strategy.mixzpp(frozen=NF4())"),
        (Strategy.loco(gradients=Int4(2048)), "Strategy.loco(gradients=Int4(block=2048))"),
        (Strategy("IGG", weights=Int8(64)), 'Strategy("IGG", weights=Int8(block=64))'),
        (Strategy.diloco(8), "Strategy.diloco(local_steps=LocalSteps(every=8))"),
    ],
)
def test_lines_are_the_shortest_that_make_a_strategy(strategy: Strategy, call: str) -> None:
    line = line_of(strategy)
    assert line.endswith(f"; strategy = {call}")
    assert made_by(line) == strategy


def made_by(line: str) -> Strategy:
    """What ``strategy`` is after a line."""
    names: dict[str, Any] = {}
    exec(line, names)
    return names["strategy"]


codecs = st.sampled_from([None, Int8(256), Int8(64), Int4(128), Int4(32)])


@given(
    levels=st.sampled_from(FOURTEEN),
    weights=codecs,
    gradients=codecs,
    frozen=codecs,
    feedback=st.sampled_from([None, LoCo(), LoCo(beta=0.5, dtype=Int8(32))]),
)
def test_lines_make_any_strategy(levels: str, weights: Any, gradients: Any, frozen: Any, feedback: Any) -> None:
    feedback = None if gradients is None else feedback
    strategy = Strategy(levels, weights=weights, gradients=gradients, frozen=frozen, error_feedback=feedback)
    assert made_by(line_of(strategy)) == strategy
    assert made_by(line_of(strategy, gpus_per_node=1)) != strategy


def test_lines_make_local_steps() -> None:
    strategy = Strategy("NNI", local_steps=LocalSteps(16, codec=None, overlap=2))
    assert made_by(line_of(strategy)) == strategy


def test_each_row_has_a_line_that_makes_what_it_is_of() -> None:
    made = plan(1e9, **CLUSTER, gpu="rtx4090", net="10gbe", micro_batches=2)
    for row in made.rows:
        found = made_by(row.paste)
        if row.torch is not None:
            assert found.name == row.torch
        else:
            assert row.candidate is not None
            assert found == row.candidate.strategy


def _bytes_between_nodes(made: Plan) -> int:
    assert made.choice is not None
    return made.choice.inter_node_bytes


@settings(deadline=None, max_examples=25)
@given(
    params=st.integers(10**6, 10**11),
    nodes=st.integers(2, 16),
    gpus=st.integers(1, 8),
    micro_batches=st.integers(1, 8),
    inter=st.floats(0.1, 1000),
    slower=st.floats(2, 100),
    share=st.sampled_from([1, 0.01]),
)
def test_a_slower_network_makes_no_plan_win_that_sends_more_over_it(
    params: int, nodes: int, gpus: int, micro_batches: int, inter: float, slower: float, share: float
) -> None:
    common: dict[str, Any] = {"nodes": nodes, "gpus_per_node": gpus, "intra_gbps": 2400, "micro_batches": micro_batches}
    common |= {"trainable": max(1, int(share * params)), "gpu_memory": 1000}
    fast, slow = (plan(params, **common, inter_gbps=gbps) for gbps in (inter, inter / slower))
    # What ties within the tolerance may send that much more.
    assert _bytes_between_nodes(slow) <= 1.07 * _bytes_between_nodes(fast) + 1000
    assert fast.choice is not None
    assert slow.choice is not None
    assert slow.choice.time.total >= fast.choice.time.total / 1.03
    # People's own strategies are never better than the choice by more than the tolerance.
    for row in slow.rows:
        assert not row.fits or slow.choice.time.total <= 1.0301 * row.time.total
