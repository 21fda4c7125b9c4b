"""The planner on a running job: measured bandwidths, and ``choose_strategy``."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness.launch import launch
from harness.links import NONE, Sets, machine
from harness.pool import Pool, WorkerError
from torch import nn

from fsdp_zpp import Int8, LocalSteps, Strategy, choose_strategy, plan
from fsdp_zpp.planner import cluster as cluster_module, plan as plan_module
from fsdp_zpp.planner.cluster import Bandwidth, links_are_slow, measure_bandwidth, world
from fsdp_zpp.planner.model_size import module_size
from fsdp_zpp.planner.report import Plan
from fsdp_zpp.runtime._torch_rank_layout import find_links

MEASURE = ["-m", "fsdp_zpp", "plan", "--params", "7e6", "--measure", "0.5", "--gpus-per-node", "2"]
CLUSTER: dict[str, Any] = {"nodes": 4, "gpus_per_node": 8, "inter_gbps": 100, "intra_gbps": 2400}


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4)).requires_grad_(False)
    return nn.ModuleDict({"layers": layers, "head": nn.Linear(64, 2, bias=False)})


# ---- bandwidths


def test_the_command_measures_bandwidths_that_are_not_given() -> None:
    result = launch(4, *MEASURE, "--intra-gbps", "123", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)  # one rank reports
    cluster = report["cluster"]
    assert (cluster["nodes"], cluster["gpus_per_node"], cluster["intra_gbps"]) == (2, 2, 123)
    assert cluster["inter_gbps"] > 0
    assert report["choice"] in report["strategies"]


def test_errors_under_torchrun_are_printed_once() -> None:
    result = launch(2, *MEASURE[:-1], "2", "--nodes", "2")
    assert result.returncode != 0
    assert result.stderr.count("inter_gbps is missing: there are 2 nodes") == 1


def _measure_by_a_clock_of_our_own(gpus_per_node: int) -> Bandwidth:
    """Each look at the clock finds rank + 1 seconds gone by."""
    clock = itertools.count(step=dist.get_rank() + 1)
    with mock.patch.object(cluster_module, "time", mock.Mock(perf_counter=clock.__next__)):
        return measure_bandwidth(world(), gpus_per_node, mib=0.25, repetitions=3)


@pytest.mark.parametrize(("gpus_per_node", "inter", "intra"), [(1, 3, None), (2, 2 * 1, 1), (4, None, 3)])
def test_bandwidths_are_bytes_over_the_slowest_ranks_time(
    pool: Callable[[int], Pool], gpus_per_node: int, inter: float | None, intra: float | None
) -> None:
    results = pool(4).run(_measure_by_a_clock_of_our_own, gpus_per_node)
    # The last rank takes 4 s to gather 2**18 bytes, the payloads of 4 or of 2 ranks; each goes to 3 or to 1 others.
    payload = 2**18 / (2 if gpus_per_node == 2 else 4)
    per_second = payload * 8 / 4 / 1e9
    for found in results:
        assert (found.nodes, found.gpus_per_node) == (4 // gpus_per_node, gpus_per_node)
        assert found.inter_gbps == (None if inter is None else pytest.approx(inter * per_second))
        assert found.intra_gbps == (None if intra is None else pytest.approx(intra * per_second))


def _choose_by_measuring(arguments: dict[str, Any]) -> tuple[Strategy, Bandwidth]:
    """In a worker: what is chosen, and the bandwidths that it was measured with."""
    measured: list[Bandwidth] = []

    def small(*args: Any) -> Bandwidth:
        measured.append(measure_bandwidth(*args, mib=0.25, repetitions=2))
        return measured[-1]

    with mock.patch.object(plan_module, "measure_bandwidth", small):
        strategy = choose_strategy(_model(), **arguments)
    return strategy, *measured


def test_all_ranks_measure_the_same_bandwidths_and_choose_by_them(pool: Callable[[int], Pool]) -> None:
    results = pool(4).run(_choose_by_measuring, {"gpus_per_node": 2, "gpu_memory": 80, "intra_gbps": 50})
    assert len(set(results)) == 1
    strategy, measured = results[0]
    assert min(measured.inter_gbps, measured.intra_gbps) > 0
    layout = {"nodes": 2, "gpus_per_node": 2, "inter_gbps": measured.inter_gbps, "intra_gbps": 50}
    assert strategy == plan(module_size(_model()), **layout, gpu_memory=80).choice.strategy


# ---- layouts and links


def _choose(arguments: dict[str, Any]) -> Strategy:
    return choose_strategy(_model(), **arguments)


def test_choose_strategy_takes_the_layout_from_the_running_job(pool: Callable[[int], Pool]) -> None:
    given = {"gpus_per_node": 2, "inter_gbps": 1, "intra_gbps": 50, "gpu_memory": 80, "weights": Int8(256)}
    expected = plan(module_size(_model()), nodes=2, **given).choice.strategy
    assert pool(4).run(_choose, given) == [expected] * 4
    # Without gpus_per_node, torchrun's: all four on one node.
    (one_node,) = set(pool(4).run(_choose, {"intra_gbps": 50, "gpu_memory": 80}))
    assert one_node.gpus_per_node == 4
    with pytest.raises(WorkerError, match="divisible by gpus_per_node"):
        pool(2).run(_measure_by_a_clock_of_our_own, 3)


def _choose_on(sets: Sets | None, arguments: dict[str, Any]) -> tuple[bool, bool | None]:
    """In a worker: the slow_links that are planned with, if ``plan`` is called, and the calls of ``find_links``."""
    seen: list[bool | None] = []
    asked = mock.Mock(side_effect=find_links)

    def planned(*args: Any, **options: Any) -> Plan:
        seen.append(options["slow_links"])
        return plan(*args, **options)

    with (
        machine(sets),
        mock.patch.object(plan_module, "plan", planned),
        mock.patch.object(cluster_module, "find_links", asked),
    ):
        choose_strategy(_model(), gpu_memory=80, **arguments)
    return asked.called, seen[0]


def test_the_machine_says_whether_links_are_slow_also_if_bandwidths_are_given(pool: Callable[[int], Pool]) -> None:
    given = {"intra_gbps": 5000.0}
    assert pool(4).run(_choose_on, NONE, given) == [(True, True)] * 4
    assert pool(4).run(_choose_on, [(0, 1, 2, 3)], given) == [(True, False)] * 4
    assert pool(4).run(_choose_on, None, given) == [(True, None)] * 4
    for named in ({"gpus_per_node": 4, **given}, {"link": "nvlink4"}, {"slow_links": False, **given}):
        assert [asked for asked, _ in pool(4).run(_choose_on, NONE, named)] == [False] * 4


def _are_slow(sets: Sets | None) -> bool | None:
    with machine(sets):
        return links_are_slow(world(), Bandwidth(1, 4, None, 60.0))


def test_speed_decides_only_where_the_machine_says_nothing(pool: Callable[[int], Pool]) -> None:
    for sets, slow in (([(0, 1, 2, 3)], False), (None, True)):
        assert pool(4).run(_are_slow, sets) == [slow] * 4


# ---- without a job


@pytest.mark.parametrize("options", [{"micro_batches": 3}, {"inter_gbps": 0.1, "local_steps": LocalSteps(8)}], ids=str)
def test_the_strategy_of_a_given_cluster_is_the_choice_of_its_plan(options: dict[str, Any]) -> None:
    asked = CLUSTER | {"gpu_memory": 80} | options
    chosen = choose_strategy(_model(), **asked)
    assert chosen == plan(module_size(_model()), **asked).choice.strategy
    assert chosen.gpus_per_node in (1, 8)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"nodes": None}, ValueError, "got nodes=None and gpus_per_node=8, and no process group is initialized"),
        ({"gpu_memory": 0.5}, ValueError, r"Nothing fits in 0\.5 GiB a GPU: the smallest, mixzpp .*, takes"),
        ({"model": 7e9}, TypeError, r"must be an nn\.Module"),
    ],
    ids=str,
)
def test_what_has_no_choice_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        choose_strategy(**{"model": _model()} | CLUSTER | changes)


def test_the_memory_of_the_gpu_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: mock.Mock(total_memory=3 * 2**29))
    assert plan_module.device_memory() == 1.5
    with pytest.raises(ValueError, match=r"Nothing fits in 1\.5 GiB"):
        choose_strategy(_model(), nodes=2, gpus_per_node=1, inter_gbps=1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert plan_module.device_memory() is None
