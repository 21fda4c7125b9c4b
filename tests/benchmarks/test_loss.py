"""The studies of the loss, end to end on four processes as two nodes of two, and what their tables are made of."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from harness.benchmarks import BENCHMARKS, tiny_study
from harness.launch import launch

TINY = "--gpus-per-node 2 --hidden 32 --layers 1 --sequence 64 --batch 4 --lr 1e-2".split()
RESULTS = sorted((BENCHMARKS / "loss" / "results").rglob("*.json"))


def run(study: str, *options: str | Path) -> CompletedProcess[str]:
    """What a study does."""
    return launch(4, "benchmarks/loss/run.py", study, *options, on_cpu=True)


def compare(folder: Path, *options: str) -> tuple[list[dict[str, Any]], str]:
    """The rows of a comparison on a little text, and what it prints."""
    text = folder / "text.txt"
    text.write_text("".join(f"{a} plus {b} makes {a + b}.\n" for a in range(60) for b in range(60)))
    done = run("compare", "--data", text, "--output", folder, *TINY, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((folder / "result.json").read_text())
    assert result["manifest"]["command"].startswith("torchrun --nproc-per-node 4 benchmarks/loss/run.py compare --data")
    return result["rows"], done.stdout


def test_compares_strategies_with_full_shard(tmp_path: Path) -> None:
    rows, printed = compare(tmp_path, "--steps", "4", "--levels", "IGG", "NNG")
    assert [row["label"] for row in rows] == ["full_shard", "zeropp IGG", "zeropp NNG"]
    full_shard, *others = rows
    assert others[0]["losses"] == others[1]["losses"]  # the same arithmetic, if the optimizer's scope is the same
    for row in rows:
        assert len(row["losses"]) == 4
        assert row["losses"][-1] < 0.95 * row["losses"][0]
        assert row["label"] in printed
        assert f"{row['validation'][-1][1]:.4f}" in printed
    for row in others:
        assert row["validation"][-1][1] == pytest.approx(full_shard["validation"][-1][1], rel=0.05)
        assert 0 < row["sent_per_step"]["inter"] < full_shard["sent_per_step"]["inter"] / 2
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("adapter", [[], ["--fsdp2"]], ids=["fsdp1", "fsdp2"])
def test_full_precision_sends_what_full_shard_is_said_to_send(tmp_path: Path, adapter: list[str]) -> None:
    # FULL_SHARD's no_sync keeps gradients whole on each rank, which is the scope N.
    (full_shard, ours), _ = compare(tmp_path, "--steps", "3", "--micro-batches", "2", "--strategy", "GNG", *adapter)
    assert ours["sent_per_step"] == full_shard["sent_per_step"]
    assert ours["losses"] == pytest.approx(full_shard["losses"], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--strategy full_shard", "--strategy full_shard is what others are compared with"),
        ("--strategy zeropp --weights int9", "--weights: 'int9' is not a codec"),
        ("--levels INN", "levels 'INN' is not legal"),
        ("--resume anywhere", "--resume and --stop-at are for one run"),
    ],
)
def test_what_compares_nothing_is_refused(options: str, message: str) -> None:
    refused = launch(1, "benchmarks/loss/run.py", "compare", *options.split(), on_cpu=True)
    assert refused.returncode == 2
    assert message in refused.stderr


def test_convergence_trains_what_is_not_there_yet(tmp_path: Path) -> None:
    for configurations in ("full_shard,int2", "full_shard,int2,w8:int4+loco"):
        done = run("convergence", "--worker", *tiny_study(), "--output", tmp_path, "--configs", configurations)
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("w8:int4+loco, seed 0: ")
    results = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert results.keys() == {"full_shard-seed0.json", "int2-seed0.json", "w8-int4+loco-seed0.json"}
    full_shard, int2 = (results[f"{name}-seed0.json"]["rows"][0] for name in ("full_shard", "int2"))
    assert full_shard["validation"][0] == int2["validation"][0]  # the same weights
    assert full_shard["validation"][-1] != int2["validation"][-1]


def test_results_say_how_they_were_made() -> None:
    for path in RESULTS:
        result = json.loads(path.read_text())
        made = result["manifest"]
        assert made.keys() - {"recovered", "note"} == {"date", "machine", "versions", "commit", "command"}, path
        assert datetime.fromisoformat(made["date"]).tzinfo, path
        assert made["versions"]["torch"], path
        assert made.get("recovered") or not made["commit"].endswith("+dirty"), path
        assert result["arguments"], path
        assert result["rows"], path
