"""The planner on a running job: measured bandwidths."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from harness.launch import launch
from harness.links import Sets, machine
from harness.pool import Pool, WorkerError

from fsdp_zpp.planner import cluster as cluster_module
from fsdp_zpp.planner.cluster import Bandwidth, links_are_slow, measure_bandwidth, world

MEASURE = ["-m", "fsdp_zpp", "plan", "--params", "7e6", "--measure", "0.5", "--gpus-per-node", "2"]
CLUSTER: dict[str, Any] = {"nodes": 4, "gpus_per_node": 8, "inter_gbps": 100, "intra_gbps": 2400}


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
        return measure_bandwidth(world(), gpus_per_node, mib=0.25)


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


# ---- layouts and links


def test_a_node_size_that_does_not_divide_the_ranks_is_refused(pool: Callable[[int], Pool]) -> None:
    with pytest.raises(WorkerError, match="divisible by gpus_per_node"):
        pool(2).run(_measure_by_a_clock_of_our_own, 3)


def _are_slow(sets: Sets | None) -> bool | None:
    with machine(sets):
        return links_are_slow(world(), Bandwidth(1, 4, None, 60.0))


def test_speed_decides_only_where_the_machine_says_nothing(pool: Callable[[int], Pool]) -> None:
    for sets, slow in (([(0, 1, 2, 3)], False), (None, True)):
        assert pool(4).run(_are_slow, sets) == [slow] * 4
