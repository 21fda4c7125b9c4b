"""Training example, end to end on four processes as two nodes of two."""

from __future__ import annotations

import io
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from harness.launch import launch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_leaves

TINY = "--gpus-per-node 2 --hidden 32 --layers 2 --sequence 64 --batch 4 --lr 1e-2 --steps 4 --micro-batches 2".split()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Return a little text, so that a test neither reads nor depends on the standard library."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{a} plus {b} makes {a + b}.\n" for a in range(60) for b in range(60)))
    return path


def run(text: Path, output: Path, *options: str | Path) -> CompletedProcess[str]:
    """Run the example with these options."""
    return launch(4, "examples/train.py", "--data", text, "--output", output, *TINY, *options, on_cpu=True)


def train(text: Path, output: Path, *options: str | Path) -> list[float]:
    """Run the example, and return the losses that it prints, one for each step here."""
    result = run(text, output, *options)
    assert result.returncode == 0, result.stdout + result.stderr
    heading, *lines = result.stdout.splitlines()
    assert heading.split()[:2] == ["step", "loss"]
    return [float(line.split()[1]) for line in lines if line.split()[0].isdecimal()]


def saved(checkpoint: Path) -> list[Any]:
    """Return all that a checkpoint holds: weights, moments, errors of codecs, the step."""
    file = checkpoint.with_suffix(".pt")
    dcp_to_torch_save(checkpoint, file)
    leaves = tree_leaves(torch.load(file, weights_only=False))
    # Codec state is in bytes, and the same values may be written in several ways.
    decoded = (torch.load(io.BytesIO(leaf)) if isinstance(leaf, bytes) else leaf for leaf in leaves)
    return tree_leaves(list(decoded))


@pytest.mark.parametrize("adapter", [[], ["--fsdp2"]], ids=["fsdp1", "fsdp2"])
def test_resumed_run_ends_like_an_uninterrupted_one_bit_for_bit(tmp_path: Path, text: Path, adapter: list[str]) -> None:
    options = ["--strategy", "loco", *adapter]  # whose errors are in the checkpoint, too
    whole = train(text, tmp_path / "whole", *options)
    half = train(text, tmp_path / "half", *options, "--stop-at", "2")
    rest = train(text, tmp_path / "rest", *options, "--resume", tmp_path / "half" / "step-2")
    assert half + rest == whole
    assert whole[-1] < 0.9 * whole[0]
    resumed, oracle = (saved(tmp_path / name / "step-4") for name in ("rest", "whole"))
    assert all(
        one.equal(other) if isinstance(one, Tensor) else one == other
        for one, other in zip(resumed, oracle, strict=True)
    )


@pytest.mark.parametrize("options", [["full_shard"], ["full_shard", "--fsdp2"], ["IIG"]], ids=" ".join)
def test_trains_under_torchs_own_and_under_scopes(tmp_path: Path, text: Path, options: list[str]) -> None:
    losses = train(text, tmp_path, "--strategy", *options)
    assert losses[-1] < 0.9 * losses[0]
    assert (tmp_path / "step-4" / ".metadata").exists()


def test_nothing_is_left_to_train_after_the_last_step(tmp_path: Path, text: Path) -> None:
    train(text, tmp_path, "--stop-at", "1")
    again = run(text, tmp_path, "--stop-at", "1", "--resume", tmp_path / "step-1")
    assert again.returncode == 1
    assert "step-1 is at step 1: nothing is left to train until step 1" in again.stderr


def test_an_unknown_strategy_is_refused(tmp_path: Path, text: Path) -> None:
    result = run(text, tmp_path, "--strategy", "zero4")
    assert result.returncode == 1
    assert "legal are NNN" in result.stderr
