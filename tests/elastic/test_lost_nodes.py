"""Nodes that train together are killed, stopped and started again; the others go on, and who returns is equal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from harness.fsdp1 import Fsdp1
from node_jobs import LONGEST, Event, Jobs, Outcome, outcome
from node_training import PATIENT, Training

from fsdp_zpp import Int4, Int8, LocalSteps, LoCo

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nodes of tests share no GPU")


def check(of: Outcome, nodes: int, fewest: int, returned: int) -> None:
    """What is true of each run that has ended."""
    assert of.disagreements == []
    assert len(of.held_out) == nodes
    assert len(of.weights) == 1
    assert max(of.held_out) < 3.2  # from 4.1, the logarithm of the vocabulary
    assert of.fewest <= fewest
    assert of.returned == returned
    assert of.left == []
    (correlations,) = of.correlations
    assert any(each < 1 for each in correlations)  # all are 1 until one is known


@pytest.mark.slow
def test_a_node_that_is_killed_returns(tmp_path: Path) -> None:
    training = Training(adapter=Fsdp1(), counts_tokens=True, fewest=3)
    of = outcome(Jobs(training, 1, tmp_path).run(Event("kill", 1, 20, 0.0)), {0, 2, 3})
    check(of, 4, 4, 1)
    assert of.forks == []  # any three of four nodes have one in common with any other three that was not killed


@pytest.mark.slow
def test_a_node_that_is_stopped_finds_that_the_others_have_gone_on(tmp_path: Path) -> None:
    training = Training(
        steps=40,
        members=3,
        fewest=2,
        first=3,
        waits=(*PATIENT[1:], ("timeout", 6.0)),
        local_steps=LocalSteps(8, codec=Int8(32), error_feedback=LoCo()),
    )
    of = outcome(Jobs(training, 1, tmp_path).run(Event("stop", 0, 12, until=30)), {1, 2})
    check(of, 3, 2, 0)
    assert of.forks == []


def test_a_rank_that_is_killed_restarts_its_node_alone(tmp_path: Path) -> None:
    local_steps = LocalSteps(5, codec=Int4(32), spread=False)
    training = Training(levels="NNN", steps=40, members=2, first=2, local_steps=local_steps)
    nodes = Jobs(training, 2, tmp_path).run(Event("kill rank", 1, 12))
    check(outcome(nodes, {0}), 2, 2, 1)


@pytest.mark.slow
def test_trainer_takes_over_the_step_and_its_learning_rate(tmp_path: Path) -> None:
    training = Training(steps=80, pace=0.3, members=2, first=1, trainer=str(tmp_path))
    first, second = Jobs(training, 2, tmp_path).run(Event("start", 1, 10))  # accelerate needs two processes
    (there,), (here,) = ([line for line in node.read() if "weights" in line] for node in (first, second))
    assert there["weights"] == here["weights"]
    assert there["made"] == here["made"] == 80
    rates, own = ({line["step"]: line["rate"] for line in node.read() if "rate" in line} for node in (first, second))
    assert max(own) == max(rates) == 80
    joined = [line["step"] for line in second.read() if line.get("nodes") == 2]
    assert 10 < min(joined) < 80
    assert {step: own[step] for step in joined} == {step: rates[step] for step in joined}


@pytest.mark.slow
def test_torchrun_starts_a_node_again(tmp_path: Path) -> None:
    jobs = Jobs(Training(members=2), 2, tmp_path)
    script = str(Path(__file__).with_name("node_training.py"))
    # Otherwise ranks that start again find the addresses of those that were killed, in the store that torchrun keeps.
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def command(number: int) -> list[str]:
        how = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
        return [sys.executable, "-m", "torch.distributed.run", *how, script, str(number), jobs.endpoint, str(tmp_path)]

    running = [subprocess.Popen(command(number), env=environment) for number in range(2)]
    try:
        lost = tmp_path / "node1.life0.rank1"
        deadline = time.monotonic() + LONGEST
        while not (lost.exists() and '"step": 20,' in lost.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(json.loads(lost.read_text().splitlines()[0])["pid"], signal.SIGKILL)
        assert [each.wait(LONGEST) for each in running] == [0, 0]
    finally:
        for each in running:
            each.kill()
            each.wait()
    for number, node in enumerate(jobs.nodes):
        node.lives = [
            [tmp_path / f"node{number}.life{life}.rank{rank}" for rank in range(2)] for life in range(1 + number)
        ]
    check(outcome(jobs.nodes, {0}), 2, 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [Fsdp1(), Training().adapter], ids=str)
@pytest.mark.parametrize("gpus", [1, 2])
def test_nodes_come_and_go(tmp_path: Path, adapter: Fsdp1, gpus: int) -> None:
    training = Training(adapter=adapter, steps=400, pace=0.1, first=3)
    events = [Event("start", 3, 30), Event("kill", 0, 100, 0.5), Event("stop", 1, 200, 8.0), Event("kill rank", 3, 290)]
    check(outcome(Jobs(training, gpus, tmp_path).run(*events), {2}), 4, 2, 2)
