"""Plans with CPU offload: what moves to the host, what its copies and the optimizer's step take, and what then fits."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import models
from harness.adapter import Case
from harness.fsdp2 import Fsdp2
from harness.offload import offloading
from harness.pool import Pool
from harness.strategies import FOURTEEN
from harness.training import train
from torch import nn

from fsdp_zpp import NF4, LocalSteps, LoCo, Strategy, choose_strategy, plan
from fsdp_zpp.__main__ import main
from fsdp_zpp.planner.catalog import GPUS, LINKS
from fsdp_zpp.planner.config import GIB
from fsdp_zpp.planner.hardware import OF_HOST_LINK, OPTIMIZER_GBS
from fsdp_zpp.planner.model_size import ModelSize, Unit, module_size

TWO: dict[str, Any] = {"nodes": 2, "gpus_per_node": 2, "inter_gbps": 1, "intra_gbps": 1}
HOST: dict[str, Any] = {"cpu_offload": True, "host_gbps": 8}
SIZE = ModelSize((Unit(4000, 8000, reshard_after_forward=False), Unit(12000, 400, count=3)))


@pytest.mark.parametrize("levels", FOURTEEN)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_shards_their_gradients_and_optimizer_state_move_to_the_host(levels: str, micro_batches: int) -> None:
    asked: dict[str, Any] = TWO | {"micro_batches": micro_batches, "presets": False}
    kept, moved = (plan(SIZE, **asked, **each)[levels].memory for each in ({}, HOST))
    trained = 40000 // {"N": 1, "I": 2, "G": 4}[levels[2]]
    assert kept.host == moved.shard == moved.optimizer == 0
    assert moved.host == kept.shard + kept.optimizer + 4 * trained
    assert (moved.parameters, moved.errors) == (kept.parameters, kept.errors)
    # What micro-batches accumulate stays; the shard's own gradient goes.
    assert moved.gradients == (0 if micro_batches == 1 else kept.gradients)
    # The two largest units' shards are copied to the GPU at a time.
    assert moved.working - kept.working == 2 * 4 * 12400 * trained // 40000


COPIES = {  # of trained and frozen shards: three layers that are gathered again in the backward, a root that is not
    "GGG": (2, 2),
    "III": (2, 2),
    "NNN": (2, 2),
    "IGG": (1, 0),
    "NIG": (1, 0),
    "NII": (1, 0),
}


@pytest.mark.parametrize(("levels", "copies"), COPIES.items())
def test_a_shard_is_copied_whenever_it_is_gathered_from_and_its_gradient_once(
    levels: str, copies: tuple[int, int]
) -> None:
    time = plan(SIZE, **TWO, **HOST, micro_batches=2, presets=False)[levels].time
    ranks = {"N": 1, "I": 2, "G": 4}[levels[2]]
    of_root = [2 * max(each - 1, 0) or each for each in copies]  # in each of two micro-batches, but once a step
    of_layer = [4 if each == 2 else each for each in copies]
    down = of_layer[0] * 36000 + of_layer[1] * 1200 + of_root[0] * 4000 + of_root[1] * 8000
    assert time.host == pytest.approx(4 * (down + 40000) / ranks / 1e9)
    assert time.optimizer == pytest.approx(2 * 28 * 40000 / ranks / (OPTIMIZER_GBS * 1e9))
    assert time.communication == time.host + time.inter + time.intra


def test_the_optimizer_comes_after_what_is_hidden() -> None:
    asked: dict[str, Any] = TWO | HOST | {"tokens": 1000, "tflops": 1e-3, "optimizer_gbs": 0.5}
    time = plan(SIZE, **asked)["IGG"].time
    assert time.computation > time.communication
    assert time.total == time.computation + time.optimizer > time.computation
    assert time.optimizer == pytest.approx(2 * 28 * 10000 / 0.5e9)


def test_a_quantized_base_stays_on_the_gpu() -> None:
    kept, moved = (plan(SIZE, **TWO, **each, frozen=NF4())["IGG"].memory for each in ({}, HOST))
    assert moved.parameters == kept.parameters
    assert moved.host == 4 * (1 + 2 + 1) * 10000


def test_exchanges_of_offloaded_parameters_are_planned_as_others() -> None:
    local_steps = LocalSteps(4, error_feedback=LoCo())
    kept, moved = (plan(SIZE, **TWO, **each, local_steps=local_steps)["III every 4"] for each in ({}, HOST))
    assert (moved.memory.outer, moved.memory.errors) == (kept.memory.outer, kept.memory.errors)
    assert moved.volume == kept.volume
    assert moved.time.exchange == kept.time.exchange


def test_the_hosts_memory_is_a_limit_of_a_node() -> None:
    host = plan(SIZE, **TWO, **HOST)["III"].memory.host
    exactly = 2 * host / GIB
    fits = [
        {row.name for row in plan(SIZE, **TWO, **HOST, host_memory=limit).rows if row.fits}
        for limit in (exactly, exactly - 1 / GIB)
    ]
    assert "III" in fits[0] - fits[1]
    assert "GGG" in fits[1]
    made = plan(SIZE, **TWO, **HOST, host_memory=1 / GIB)
    assert made.choice is None
    assert "of a node's host: of what fits on the GPU, the smallest, " in made.reason
    assert "does not fit in 9.31323e-10 GiB of a node's host:" in str(made)


def test_where_nothing_fits_offload_is_proposed_if_that_would() -> None:
    asked: dict[str, Any] = {"nodes": 1, "gpus_per_node": 4, "gpu": "a100-40gb", "micro_batches": 4, "tokens": 4096}
    made = plan(13e9, **asked)
    assert made.choice is None
    (hint,) = [note for note in made.notes if note.startswith("With CPU offload")]
    offloaded = plan(13e9, **asked, cpu_offload=True)
    fitting = [row for row in offloaded.rows if row.fits]
    assert f"{len(fitting)} of {len(offloaded.rows)} would fit: " in hint
    smallest = min(fitting, key=lambda row: row.memory.total)
    assert f" {smallest.name} takes {smallest.gib:.1f} GiB a GPU, and {smallest.memory.host / GIB:.1f} GiB" in hint
    assert offloaded.choice in fitting
    assert not any(note.startswith("With CPU offload") for note in plan(1e9, **asked).notes)
    assert not any(note.startswith("With CPU offload") for note in plan(200e9, **asked).notes)


def test_each_gpu_has_a_link_to_its_host() -> None:
    for name, gpu in GPUS.items():
        assert LINKS[gpu.host].gbps < 600
        offload = plan(1e9, nodes=1, gpus_per_node=1, gpu=name, cpu_offload=True).budget.offload
        assert offload is not None
        assert offload.gbps == OF_HOST_LINK * LINKS[gpu.host].gbps
        assert gpu.link == gpu.host or LINKS[gpu.link].fast


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cpu_offload": 1}, TypeError, "cpu_offload must be True or False, got 1"),
        ({"cpu_offload": True}, ValueError, "host_gbps is missing"),
        ({"host_gbps": 100}, ValueError, "host_gbps=100 is about CPU offload"),
        ({"host_memory": 100, "optimizer_gbs": 2}, ValueError, "host_memory=100, optimizer_gbs=2 is about CPU offload"),
        (HOST | {"host_gbps": 0}, ValueError, "host_gbps must be above 0, got 0"),
        (HOST | {"host_memory": -1}, ValueError, "host_memory must be above 0, got -1"),
        (HOST | {"optimizer_gbs": "2"}, TypeError, "optimizer_gbs must be a number"),
    ],
)
def test_figures_of_the_host_are_checked(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan(SIZE, **TWO, **options)


def test_options_of_the_command_line_reach_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    job = "plan --params 7e9 --nodes 1 --gpus-per-node 8 --gpu h100 --cpu-offload --host-memory 2000".split()
    main([*job, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["offload"] == {
        "gbps": OF_HOST_LINK * LINKS["pcie5"].gbps,
        "optimizer_gbs": OPTIMIZER_GBS,
        "memory": 2000,
        "assumed": ["host_gbps", "optimizer_gbs"],
    }
    figures = report["strategies"]["GGG"]
    assert figures["memory_bytes"]["host"] == 16 * 7 * 10**9 // 8
    assert figures["seconds"]["optimizer"] > 0 < figures["seconds"]["host"]
    main([*job, "--host-gbps", "100", "--optimizer-gbs", "50", "--json"])
    offload = json.loads(capsys.readouterr().out)["offload"]
    assert (offload["gbps"], offload["optimizer_gbs"]) == (100, 50)
    main(job)
    text = capsys.readouterr().out
    assert " on host  " in text
    assert " shards " not in text.split("\n---")[0]
    main(["plan", "--params", "7e9", "--nodes", "1", "--gpus-per-node", "8", "--gpu", "h100", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert "offload" not in report
    assert not {"host", "optimizer"} & set(report["strategies"]["GGG"]["seconds"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "That is assumed, not measured: pass host_gbps (--host-gbps) and optimizer_gbs (--optimizer-gbs) as "),
        ({"host_gbps": 100}, "Of these, one is assumed, not measured: pass optimizer_gbs (--optimizer-gbs) as "),
        ({"optimizer_gbs": 100}, "Of these, one is assumed, not measured: pass host_gbps (--host-gbps) as "),
        ({"host_gbps": 100, "optimizer_gbs": 100}, None),
    ],
)
def test_what_is_assumed_of_a_host_is_said(given: dict[str, float], said: str | None) -> None:
    made = plan(1e9, nodes=1, gpus_per_node=4, gpu="h100", cpu_offload=True, **given)
    notes = [note for note in made.notes if "assumed, not measured" in note]
    assert len(notes) == (said is not None)
    assert said is None or notes[0].startswith(said)
    assert said is None or notes[0] in str(made)


def test_choose_strategy_plans_offload_too() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    on: dict[str, Any] = {"nodes": 2, "gpus_per_node": 2, "inter_gbps": 1, "intra_gbps": 1, "cpu_offload": True}
    choice = plan(module_size(model), **TWO, **HOST).choice
    assert choice is not None
    assert choose_strategy(model, **on, host_gbps=8) == choice.strategy
    if not torch.cuda.is_available():  # which could be measured
        with pytest.raises(ValueError, match="host_gbps is missing"):
            choose_strategy(model, **on)


def held_by_the_host(levels: str) -> tuple[int, int]:
    """In a worker: the bytes of parameters, gradients and Adam's moments on the CPU, and those that are planned."""
    adapter, sizes = offloading(Fsdp2()), (("width", 16), ("hidden", 32), ("vocabulary", 64))
    case = Case(clip=None, steps=1, model=sizes)
    planned = plan(module_size(models.make_net(**dict(case.model))), **TWO, **HOST)[levels].memory.host
    model: Any = adapter.make(case, Strategy(levels, gpus_per_node=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    held = 0

    def count(step: int, optimizer: torch.optim.Optimizer) -> None:
        nonlocal held
        for p in model.parameters():
            moments = (optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"])
            tensors = [adapter.local(each) for each in (p, p.grad, *moments)]
            assert all(each.device.type == "cpu" for each in tensors)
            held += sum(each.nbytes for each in tensors)

    train(adapter, model, case, after_step=count, optimizer=optimizer)
    return held, planned


@pytest.mark.parametrize("levels", ["IGG", "III", "NNN"])
def test_planned_bytes_on_the_host_are_those_that_are_held(pool: Callable[[int], Pool], levels: str) -> None:
    for held, planned in pool(4).run(held_by_the_host, levels):
        assert held == planned
