"""The training example, end to end on four processes as two nodes of two, and the notebook, without Jupyter."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from harness.launch import ROOT, launch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_leaves

TINY = "--gpus-per-node 2 --hidden 32 --layers 2 --sequence 64 --batch 4 --lr 1e-2 --steps 4 --micro-batches 2".split()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A little text, so that a test neither reads nor depends on the standard library."""
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


@pytest.mark.parametrize("adapter", [["--fsdp2"], pytest.param([], marks=pytest.mark.wide)], ids=["fsdp2", "fsdp1"])
def test_resumed_run_ends_like_an_uninterrupted_one_bit_for_bit(tmp_path: Path, text: Path, adapter: list[str]) -> None:
    options = ["--strategy", "loco", *adapter]  # whose errors are in the checkpoint, too
    whole = train(text, tmp_path / "whole", *options)
    half = train(text, tmp_path / "half", *options, "--stop-at", "2")
    resume = ("--resume", tmp_path / "half" / "step-2")
    rest = train(text, tmp_path / "rest", *options, *resume)
    assert half + rest == whole
    assert whole[-1] < 0.9 * whole[0]
    resumed, oracle = (saved(tmp_path / name / "step-4") for name in ("rest", "whole"))
    assert all(
        one.equal(other) if isinstance(one, Tensor) else one == other
        for one, other in zip(resumed, oracle, strict=True)
    )
    again = run(text, tmp_path / "half", *options, "--stop-at", "2", *resume)
    assert again.returncode == 1
    assert "step-2 is at step 2: nothing is left to train until step 2" in again.stderr


@pytest.mark.parametrize(
    "options",
    [["full_shard"], *(pytest.param(each, marks=pytest.mark.wide) for each in (["full_shard", "--fsdp2"], ["IIG"]))],
    ids=" ".join,
)
def test_trains_under_torchs_own_and_under_scopes(tmp_path: Path, text: Path, options: list[str]) -> None:
    losses = train(text, tmp_path, "--strategy", *options)
    assert losses[-1] < 0.9 * losses[0]
    assert (tmp_path / "step-4" / ".metadata").exists()


def test_an_unknown_strategy_is_refused(tmp_path: Path, text: Path) -> None:
    result = run(text, tmp_path, "--strategy", "zero4")
    assert result.returncode == 1
    assert "legal are NNN" in result.stderr


# ---- the notebook

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def run_cell(source: str, names: dict[str, Any]) -> None:
    """Run a cell in the current folder."""
    first, _, rest = source.partition("\n")
    if first.startswith("%%writefile "):
        Path(first.split()[1]).write_text(rest)
    elif first.startswith("!"):
        for line in source.splitlines():
            run_command(line)
    else:
        exec(compile(source, str(NOTEBOOK), "exec"), names)


def run_command(line: str) -> None:
    """Run a line of a shell in the current folder."""
    match shlex.split(line.removeprefix("!")):
        case ["OMP_NUM_THREADS=1", "torchrun", "--nproc-per-node", processes, *command]:
            done = launch(int(processes), *command, timeout=200, on_cpu=True, working=Path.cwd())
        case ["python", *command]:
            done = launch(1, *command, timeout=200, on_cpu=True, working=Path.cwd())
        case _:
            pytest.fail(f"no test knows how to run {line}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_cells_run_and_say_what_the_text_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            run_cell("".join(cell["source"]), names)
    results = names["results"]
    inter = {name: sum(hops["inter"] for hops in each["sent"].values()) for name, each in results.items()}
    assert 0 < inter["zeropp"] < inter["full_shard"] / 5
    assert results["zeropp"]["losses"][-1] == pytest.approx(results["full_shard"]["losses"][-1], rel=0.05)
    assert results["zeropp"]["losses"][-1] < 0.5 * results["zeropp"]["losses"][0]
    assert (tmp_path / "own.json").exists()
