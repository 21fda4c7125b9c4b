"""The study of DiLoCo's recipe: its fits, its table, and a tiny run of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness.benchmarks import load, tiny_study
from harness.launch import launch

diloco_table = load("loss", "diloco_table")
Result = dict[str, Any]


def test_gaps_are_above_the_best_synchronous_run_with_the_same_seed_and_data() -> None:
    def result(nodes: int, name: str, lr: float, loss: float, seed: int = 0, tokens: int = 700_000_000) -> Result:
        arguments = {"nodes": nodes, "lr": lr, "batch": 48 // nodes, "tokens": tokens}
        return {"arguments": arguments, "rows": [{"name": name, "seed": seed, "validation": [[0, 5.0], [9, loss]]}]}

    results = [
        result(1, "synchronous", 0.005, 0.4),
        result(1, "synchronous", 0.005, 0.6, seed=1),
        result(1, "synchronous", 0.01, 0.5),
        result(2, "local30:none", 0.005, 0.404),
        result(2, "local30:none", 0.005, 0.618, seed=1),
        result(2, "local30:none", 0.005, 0.411, seed=2),
        result(1, "synchronous", 0.005, 0.5, tokens=350_000_000),
        result(2, "local30:none", 0.005, 0.52, tokens=350_000_000),
        result(2, "local30:int8", 0.005, 0.52, seed=1, tokens=350_000_000),
    ]
    assert diloco_table.table(results).splitlines()[2:] == [
        "| 1 | synchronous | 700 M | 0.0050, 48 | 2 | 0.5000 ± 0.1414 |  |  |",
        "| 1 | synchronous | 700 M | 0.0100, 48 | 1 | 0.5000 |  |  |",
        "| 2 | local30:none | 700 M | 0.0050, 48 | 3 | 0.4777 ± 0.1216 | +2.00 ± 1.41 | +0.7 |",
        "| 1 | synchronous | 350 M | 0.0050, 48 | 1 | 0.5000 |  |  |",
        "| 2 | local30:int8 | 350 M | 0.0050, 48 | 1 | 0.5200 |  |  |",
        "| 2 | local30:none | 350 M | 0.0050, 48 | 1 | 0.5200 | +4.00 |  |",
    ]


@pytest.mark.parametrize(("nodes", "name"), [(1, "synchronous"), (2, "local3:int4+loco:outer0.6")])
def test_trains_by_the_recipe(tmp_path: Path, nodes: int, name: str) -> None:
    options = [*tiny_study(), "--output", str(tmp_path), "--nodes", str(nodes), "--configs", name, "--no-compiled"]
    done = launch(nodes, "benchmarks/loss/run.py", "diloco-scaling", "--worker", *options, on_cpu=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    # The paper's fits: more replicas take a higher learning rate.
    assert result["arguments"]["lr"] == pytest.approx(0.0050 if nodes == 1 else 0.0061, rel=0.01)
    losses = [loss for _, loss in result["rows"][0]["validation"]]
    assert losses[-1] < losses[0]


def test_local_steps_need_several_nodes() -> None:
    refused = launch(1, "benchmarks/loss/run.py", "diloco-scaling", "--nodes", "1", "--configs", "local30:none")
    assert refused.returncode == 2
    assert "local steps are for several; got 'local30:none'" in refused.stderr
