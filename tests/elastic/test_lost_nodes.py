"""Nodes that train together are killed, stopped and started again; the others go on, and who returns is equal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.fsdp1 import Fsdp1
from node_jobs import Event, Jobs, Outcome, outcome
from node_training import PATIENT, Training

from fsdp_zpp import Int4, Int8, LocalSteps, LoCo

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nodes of tests share no GPU")


def check(of: Outcome, nodes: int, fewest: int, returned: int) -> None:
    """What is true of each run that has ended."""
    assert of.disagreements == []
    assert len(of.held_out) == nodes
    assert len(of.weights) == 1
    assert max(of.held_out) < 2.2  # from 4.1, the logarithm of the vocabulary
    assert of.fewest <= fewest
    assert of.returned == returned
    assert of.left == []


def test_a_node_that_is_killed_returns(tmp_path: Path) -> None:
    training = Training(adapter=Fsdp1(), counts_tokens=True)
    nodes = Jobs(training, 1, tmp_path).run(Event("kill", 1, 20, 0.0))
    check(outcome(nodes, {0, 2, 3}), 4, 4, 1)


def test_a_node_that_is_stopped_finds_that_the_others_have_gone_on(tmp_path: Path) -> None:
    training = Training(
        members=3,
        first=3,
        waits=(*PATIENT[1:], ("timeout", 6.0)),
        local_steps=LocalSteps(8, codec=Int8(32), error_feedback=LoCo()),
    )
    nodes = Jobs(training, 1, tmp_path).run(Event("stop", 0, 20, until=40))
    check(outcome(nodes, {1, 2}), 3, 2, 0)


def test_a_rank_that_is_killed_restarts_its_node_alone(tmp_path: Path) -> None:
    training = Training(levels="NNN", members=2, first=2, local_steps=LocalSteps(5, codec=Int4(32), spread=False))
    nodes = Jobs(training, 2, tmp_path).run(Event("kill rank", 1, 20))
    check(outcome(nodes, {0}), 2, 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [Fsdp1(), Training().adapter], ids=str)
@pytest.mark.parametrize("gpus", [1, 2])
def test_nodes_come_and_go(tmp_path: Path, adapter: Fsdp1, gpus: int) -> None:
    training = Training(adapter=adapter, steps=400, pace=0.1, first=3)
    events = [Event("start", 3, 30), Event("kill", 0, 100, 0.5), Event("stop", 1, 200, 8.0), Event("kill rank", 3, 290)]
    check(outcome(Jobs(training, gpus, tmp_path).run(*events), {2}), 4, 2, 2)
