"""The training example, end to end on four processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness.launch import launch

TINY = "--device cpu --hidden 32 --layers 2 --heads 2 --sequence 64 --lr 1e-2".split()


def train(output: Path, *arguments: str) -> str:
    """What the example prints, on four processes as two nodes of two."""
    result = launch(4, "examples/train.py", "--gpus-per-node", "2", "--output", output, *TINY, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def report(output: Path) -> dict[str, Any]:
    """What the example wrote to result.json."""
    return json.loads((output / "result.json").read_text())


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A little text, so that a test neither reads nor depends on the standard library."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{a} plus {b} makes {a + b}.\n" for a in range(60) for b in range(60)))
    return path


def test_compares_with_full_shard(tmp_path: Path, text: Path) -> None:
    output = train(tmp_path, "--data", str(text), "--steps", "40", "--compare")
    result = report(tmp_path)
    full_shard, zeropp = result["runs"]
    assert (full_shard["label"], zeropp["label"]) == ("full_shard", "zeropp")
    for run in (full_shard, zeropp):
        assert run["train_loss"] < 0.6 * run["losses"][0]
        assert run["label"] in output
    assert abs(result["validation_difference_percent"]) < 1
    for kind in ("gather", "reduce"):
        assert 0 < zeropp["traffic"][kind]["inter"] < full_shard["traffic"][kind]["inter"] / 2
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("adapter", [[], ["--fsdp2"]], ids=["fsdp1", "fsdp2"])
def test_resumed_run_ends_like_an_uninterrupted_one(tmp_path: Path, text: Path, adapter: list[str]) -> None:
    common = ["--data", str(text), "--steps", "4", "--log-every", "2", "--micro-batches", "2", *adapter]
    train(tmp_path / "whole", *common)
    train(tmp_path / "half", *common, "--stop-at", "2")
    train(tmp_path / "rest", *common, "--resume", str(tmp_path / "half" / "checkpoint"))
    (whole,), (rest,) = report(tmp_path / "whole")["runs"], report(tmp_path / "rest")["runs"]
    assert len(whole["losses"]) == 4
    assert rest["losses"] == pytest.approx(whole["losses"], abs=1e-6)
    assert rest["validation_loss"] == pytest.approx(whole["validation_loss"], abs=1e-6)


def test_full_precision_sends_what_full_shard_is_said_to_send(tmp_path: Path, text: Path) -> None:
    # FULL_SHARD's no_sync keeps gradients whole on each rank, which is the letter N.
    train(tmp_path, "--data", str(text), "--steps", "3", "--micro-batches", "2", "--levels", "GNG")
    (run,) = report(tmp_path)["runs"]
    assert run["traffic"] == run["full_shard_traffic"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--strategy full_shard --weights int8", "full_shard is torch's own and takes no --weights"),
        ("--compare --resume anywhere", "drop --resume"),
    ],
)
def test_contradictory_arguments_are_refused(arguments: str, message: str) -> None:
    result = launch(1, "examples/train.py", *arguments.split())
    assert result.returncode == 2
    assert message in result.stderr
