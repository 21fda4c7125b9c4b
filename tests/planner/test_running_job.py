"""The planner on a running job: measured bandwidths, and ``choose_strategy``."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness.covering import over_each
from harness.launch import launch
from harness.links import NONE, Sets, machine
from harness.pool import Pool, WorkerError, device_type
from harness.wiretap import wiretap
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from fsdp_zpp import Int4, Int8, Strategy, choose_strategy, plan
from fsdp_zpp.collectives.links import find_links
from fsdp_zpp.config.levels import LEGAL_LEVELS
from fsdp_zpp.config.topology import Topology
from fsdp_zpp.planner import bandwidth, running_job
from fsdp_zpp.planner.bandwidth import Bandwidth, links_are_slow, measure_bandwidth, world
from fsdp_zpp.planner.config import Precision
from fsdp_zpp.planner.model_size import module_size
from fsdp_zpp.planner.report import Plan
from fsdp_zpp.planner.volume import Volume, step_volume

ENCODED = {"weights": Int8(64), "gradients": Int4(32)}
MEASURE = ["-m", "fsdp_zpp", "plan", "--params", "7e6", "--measure", "0.5", "--gpus-per-node", "2"]


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


# ---- functions that run in the workers


def _measure_by_a_clock_of_our_own(gpus_per_node: int) -> Bandwidth:
    """Each look at the clock finds rank + 1 seconds gone by."""
    clock = itertools.count(step=dist.get_rank() + 1)
    with mock.patch.object(bandwidth, "time", mock.Mock(perf_counter=clock.__next__)):
        return measure_bandwidth(world(), gpus_per_node, mib=0.25, repetitions=3)


def _measure(gpus_per_node: int) -> Bandwidth:
    return measure_bandwidth(world(), gpus_per_node, mib=0.25, repetitions=2)


def _model() -> nn.Module:
    torch.manual_seed(0)
    # Without biases: codecs leave them as they are, which plans don't count.
    layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
    model = nn.ModuleDict({"layers": layers, "head": nn.Linear(64, 2, bias=False)})
    model["layers"].requires_grad_(False)
    return model


def _choose(arguments: dict[str, Any]) -> Strategy:
    return choose_strategy(_model(), **arguments)


def _choose_by_measuring(arguments: dict[str, Any]) -> tuple[Strategy, Bandwidth]:
    measured: list[Bandwidth] = []

    def small(*args: Any) -> Bandwidth:
        measured.append(measure_bandwidth(*args, mib=0.25, repetitions=2))
        return measured[-1]

    with mock.patch.object(running_job, "measure_bandwidth", small):
        strategy = choose_strategy(_model(), **arguments)
    return strategy, *measured


def _sent_and_planned(
    gpus_per_node: int, codecs: dict[str, Any], micro_batches: int
) -> dict[str, tuple[Volume, Volume]]:
    """What the second of two steps sends on 4 ranks, by scopes: counted on the collectives, and planned."""
    device = torch.device("cuda", torch.cuda.current_device()) if device_type() == "cuda" else torch.device("cpu")
    found = {}
    for scopes in LEGAL_LEVELS:
        strategy = Strategy(scopes, gpus_per_node=gpus_per_node, **codecs)
        blocks = _model()
        blocks["layers"][2:].requires_grad_(True)
        size = module_size(blocks)
        model = FullyShardedDataParallel(
            nn.Sequential(*blocks["layers"], blocks["head"]),
            sharding_strategy=strategy,
            device_id=device,
            auto_wrap_policy=_wrap_policy(blocks),
            use_orig_params=False,  # with it, FSDP pads each parameter
        )
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            with wiretap(gpus_per_node) as tap:
                for micro_batch in range(micro_batches):
                    with model.no_sync() if micro_batch < micro_batches - 1 else nullcontext():
                        model(torch.ones(2, 64, device=device, requires_grad=True)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        precision = Precision(compute=torch.float32, reduce=torch.float32)
        found[scopes] = (
            Volume(tap.total("inter"), tap.total("intra")),
            step_volume(size, strategy.resolve(Topology(4, gpus_per_node)), micro_batches, precision),
        )
    return found


def _wrap_policy(blocks: nn.Module) -> Any:
    """Wraps the layers, and leaves the head to the root."""
    layers = set(blocks["layers"])
    return partial(lambda_auto_wrap_policy, lambda_fn=lambda module: module in layers)


# ---- tests


LAYOUTS = {
    "plain": (2, {}),
    "encoded": (2, ENCODED),
    "one node": (4, ENCODED),
    "one node encoded inside": (4, ENCODED | {"intra_gradients": Int8(64)}),
}


@over_each(layout=LAYOUTS, micro_batches=[1, 3])
def test_planned_bytes_are_those_that_are_sent(
    layout: tuple[int, dict[str, Any]], micro_batches: int, pool: Callable[[int], Pool]
) -> None:
    gpus_per_node, codecs = layout
    for found in pool(4).run(_sent_and_planned, gpus_per_node, codecs, micro_batches):
        assert len(found) == 14
        assert {scopes: counted for scopes, (counted, _) in found.items()} == {
            scopes: planned for scopes, (_, planned) in found.items()
        }


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


def test_all_ranks_measure_the_same_bandwidths(pool: Callable[[int], Pool]) -> None:
    results = pool(4).run(_measure, 2)
    assert len(set(results)) == 1
    assert min(results[0].inter_gbps, results[0].intra_gbps) > 0


def test_impossible_layouts_are_refused(pool: Callable[[int], Pool]) -> None:
    with pytest.raises(WorkerError, match="divisible by gpus_per_node"):
        pool(2).run(_measure, 3)


def test_choose_strategy_takes_the_layout_from_the_running_job(pool: Callable[[int], Pool]) -> None:
    given = {"gpus_per_node": 2, "inter_gbps": 1, "intra_gbps": 50, "gpu_memory": 80, "weights": Int8(256)}
    expected = plan(module_size(_model()), nodes=2, **given).choice.strategy
    assert pool(4).run(_choose, given) == [expected] * 4
    # Without gpus_per_node, torchrun's: all four on one node.
    (one_node,) = set(pool(4).run(_choose, {"intra_gbps": 50, "gpu_memory": 80}))
    assert one_node.gpus_per_node == 4


def test_choose_strategy_measures_bandwidths(pool: Callable[[int], Pool]) -> None:
    results = pool(4).run(_choose_by_measuring, {"gpus_per_node": 2, "gpu_memory": 80, "intra_gbps": 50})
    strategies, measured = zip(*results, strict=True)
    assert len(set(strategies)) == len(set(measured)) == 1
    made = plan(
        module_size(_model()), nodes=2, gpus_per_node=2, inter_gbps=measured[0].inter_gbps, intra_gbps=50, gpu_memory=80
    )
    assert strategies[0] == made.choice.strategy


def _choose_on(sets: Sets | None, differs: bool, arguments: dict[str, Any]) -> tuple[bool, bool | str | None]:
    """In a worker: the slow_links that are planned with, if ``plan`` is called, and the calls of ``find_links``."""
    seen: list[bool | None] = []
    asked = mock.Mock(side_effect=find_links)

    def planned(*args: Any, **options: Any) -> Plan:
        seen.append(options["slow_links"])
        return plan(*args, **options)

    if differs and dist.get_rank() == 3:
        arguments = arguments | {"slow_links": True}
    with (
        machine(sets),
        mock.patch.object(running_job, "plan", planned),
        mock.patch.object(bandwidth, "find_links", asked),
    ):
        try:
            choose_strategy(_model(), gpu_memory=80, **arguments)
        except ValueError as error:
            return asked.called, str(error)
    return asked.called, seen[0]


def test_the_machine_says_whether_links_are_slow_also_if_bandwidths_are_given(pool: Callable[[int], Pool]) -> None:
    given = {"intra_gbps": 5000.0}
    assert pool(4).run(_choose_on, NONE, False, given) == [(True, True)] * 4
    assert pool(4).run(_choose_on, [(0, 1, 2, 3)], False, given) == [(True, False)] * 4
    assert pool(4).run(_choose_on, None, False, given) == [(True, None)] * 4
    for named in ({"gpus_per_node": 4, **given}, {"link": "nvlink4"}, {"slow_links": False, **given}):
        assert [asked for asked, _ in pool(4).run(_choose_on, NONE, False, named)] == [False] * 4


def test_ranks_agree_on_whether_links_are_asked(pool: Callable[[int], Pool]) -> None:
    for asked, error in pool(4).run(_choose_on, NONE, True, {"intra_gbps": 5000.0}):
        assert not asked
        assert "links asked of the machine: True on ranks 0-2, False on rank 3" in error


@pytest.mark.parametrize(("sets", "slow"), [(NONE, True), ([(0, 1, 2, 3)], False), (None, True)])
def test_speed_decides_only_where_the_machine_says_nothing(
    pool: Callable[[int], Pool], sets: Sets | None, slow: bool
) -> None:
    assert pool(4).run(_are_slow, sets, Bandwidth(1, 4, None, 60.0)) == [slow] * 4


def _are_slow(sets: Sets | None, measured: Bandwidth) -> bool | None:
    with machine(sets):
        return links_are_slow(world(), measured)


def test_choose_strategy_works_without_a_job_on_a_given_cluster() -> None:
    cluster = {"nodes": 4, "gpus_per_node": 8, "inter_gbps": 100, "intra_gbps": 2400}
    chosen = partial(choose_strategy, _model())
    made = plan(module_size(_model()), **cluster, gpu_memory=80, micro_batches=3)
    assert chosen(**cluster, gpu_memory=80, micro_batches=3) == made.choice.strategy
    with pytest.raises(ValueError, match="got nodes=None and gpus_per_node=8, and no process group is initialized"):
        chosen(gpus_per_node=8, inter_gbps=100, intra_gbps=2400)
    with pytest.raises(ValueError, match="inter_gbps is missing"):
        chosen(nodes=4, gpus_per_node=8, intra_gbps=2400)
    with pytest.raises(ValueError, match=r"Nothing fits in 0\.5 GiB a GPU: the smallest, mixzpp .*, takes"):
        chosen(**cluster, gpu_memory=0.5)
    with pytest.raises(TypeError, match="microbatches"):
        chosen(**cluster, microbatches=3)
    with pytest.raises(TypeError, match=r"must be an nn\.Module"):
        choose_strategy(7e9, **cluster)
    with pytest.raises(ValueError, match="nothing is trainable"):
        choose_strategy(_model().requires_grad_(False), **cluster)


def test_the_memory_of_the_gpu_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: mock.Mock(total_memory=3 * 2**29))
    assert running_job.device_memory() == 1.5
    with pytest.raises(ValueError, match=r"Nothing fits in 1\.5 GiB"):
        choose_strategy(_model(), nodes=2, gpus_per_node=1, inter_gbps=1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert running_job.device_memory() is None
