"""Training and fine-tuning examples on four processes as two nodes of two, the notebook, and the scripts for Slurm."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from harness import llama
from harness.launch import ROOT, launch
from harness.pool import free_port
from peft import PeftModel
from transformers import AutoModelForCausalLM

from fsdp_zpp import load_frozen_params

TINY = "--gpus-per-node 2 --hidden 32 --layers 2 --sequence 64 --batch 4 --lr 1e-2 --steps 4 --micro-batches 2".split()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A little text, so that a test neither reads nor depends on the standard library."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{a} plus {b} makes {a + b}.\n" for a in range(60) for b in range(60)))
    return path


def run(text: Path, output: Path, *options: str | Path) -> CompletedProcess[str]:
    return launch(4, "examples/train.py", "--data", text, "--output", output, *TINY, *options, on_cpu=True)


def train(text: Path, output: Path, *options: str | Path) -> list[float]:
    """Run the example, and return the losses that it prints, one for each step here."""
    result = run(text, output, *options)
    assert result.returncode == 0, result.stdout + result.stderr
    heading, *lines = result.stdout.splitlines()
    assert heading.split()[:2] == ["step", "loss"]
    return [float(line.split()[1]) for line in lines if line.split()[0].isdecimal()]


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, text: Path) -> None:
    options = ["--strategy", "loco", "--fsdp2"]  # errors of LoCo are in the checkpoint, too
    whole = train(text, tmp_path / "whole", *options)
    half = train(text, tmp_path / "half", *options, "--stop-at", "2")
    resume = ("--resume", tmp_path / "half" / "step-2")
    assert half + train(text, tmp_path / "rest", *options, *resume) == whole
    assert whole[-1] < 0.9 * whole[0]
    again = run(text, tmp_path / "half", *options, "--stop-at", "2", *resume)
    assert again.returncode == 1
    assert "step-2 is at step 2: nothing is left to train until step 2" in again.stderr


@pytest.mark.parametrize("strategy", ["full_shard", "IIG"])
def test_trains_under_torchs_own_and_under_scopes(tmp_path: Path, text: Path, strategy: str) -> None:
    losses = train(text, tmp_path, "--strategy", strategy)
    assert losses[-1] < 0.9 * losses[0]
    assert (tmp_path / "step-4" / ".metadata").exists()


# ---- the notebook

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def run_cell(source: str, names: dict[str, Any]) -> None:
    first, _, rest = source.partition("\n")
    if first.startswith("%%writefile "):
        Path(first.split()[1]).write_text(rest)
    elif first.startswith("!"):
        for line in source.splitlines():
            run_command(line)
    else:
        exec(compile(source, str(NOTEBOOK), "exec"), names)


def run_command(line: str) -> None:
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


# ---- fine-tuning

LINES = "".join(f"{a} and {b}\n" for a in range(60) for b in range(60))


def fine_tune(script: str, folder: Path, *options: str | Path) -> tuple[list[float], str]:
    """Train the model in ``folder`` on bytes that it knows; return the losses that are printed, and all that is."""
    (folder / "text.txt").write_text(LINES)
    command = [f"examples/{script}", "--gpus-per-node", "2", "--model", folder / "model"]
    command += ["--data", folder / "text.txt", "--sequence", "32", "--batch", "2"]
    done = launch(4, *command, *options, on_cpu=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", done.stdout, re.MULTILINE)], done.stdout


def loss_of(model: torch.nn.Module) -> float:
    tokens = torch.tensor([list(b"12 and 34\n56 and 7")])
    return model(input_ids=tokens, labels=tokens).loss.item()


def make_model(folder: Path, tied: bool) -> dict[str, torch.Tensor]:
    """Save a model as several files; return its weights."""
    model = llama.make_base(torch.bfloat16, tied).cpu()
    model.save_pretrained(folder / "model", max_shard_size="60KB")
    assert len(list((folder / "model").glob("*.safetensors"))) > 1
    return model.state_dict()


@pytest.mark.parametrize(("tied", "adapter"), [(True, []), (False, ["--fsdp1"])], ids=["tied", "untied-fsdp1"])
def test_what_was_read_is_what_is_exported(tmp_path: Path, adapter: list[str], tied: bool) -> None:
    weights = make_model(tmp_path, tied)
    fine_tune("finetune_full.py", tmp_path, *adapter, "--output", tmp_path / "result", "--steps", "1", "--lr", "0")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "result")
    assert exported.dtype == torch.bfloat16
    assert exported.config.architectures == ["LlamaForCausalLM"]
    assert exported.config.tie_word_embeddings == tied
    assert exported.state_dict().keys() == weights.keys()
    assert all(torch.equal(weights[name], value) for name, value in exported.state_dict().items())


def test_all_parameters_learn(tmp_path: Path) -> None:
    make_model(tmp_path, tied=True)
    options = ("--output", tmp_path / "result", "--steps", "20", "--lr", "1e-2", "--strategy", "IGG")
    (first, *_, last), _ = fine_tune("finetune_full.py", tmp_path, *options)
    assert last < 0.7 * first
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "result", dtype=torch.float32)
    assert loss_of(exported) < 1.3 * last


def test_adapters_learn_on_a_quantized_base_and_plain_peft_loads_them(tmp_path: Path) -> None:
    llama.make_base(llama.ADAPTED).cpu().save_pretrained(tmp_path / "model")
    options = ("--steps", "24", "--lr", "1e-2", "--rank", "4", "--fsdp2")
    outputs = ("--output", tmp_path / "out", "--save-base", tmp_path / "quantized")
    losses, printed = fine_tune("finetune_lora.py", tmp_path, *options, *outputs)
    assert losses[-1] < 0.8 * losses[0]
    adapted = PeftModel.from_pretrained(llama.make_base(llama.ADAPTED).cpu(), tmp_path / "out" / "adapter")
    base = sum(parameter.numel() for name, parameter in adapted.named_parameters() if "lora" not in name)
    sent, *_ = re.findall(r"'gather': {.*?'inter': (\d+)", printed)
    # All that goes between nodes in all steps is less than the base once, which full precision sends in every step.
    assert 0 < int(sent) < 4 * base
    empty = llama.make_base(llama.ADAPTED).cpu().requires_grad_(False)
    load_frozen_params(empty, tmp_path / "quantized")
    assert loss_of(PeftModel.from_pretrained(empty, tmp_path / "out" / "adapter")) < 3


# ---- jobs of Slurm, under a fake srun that really starts the ranks

JOB = free_port() - 20000
PORT = 20000 + JOB % 20000
"""Which the scripts make of a job's number."""
SRUN = """#!{python}
import os, subprocess, sys

command = sys.argv[1:]
while command[0].startswith("--"):
    del command[0]
nodes, tasks = 2, int(os.environ["SLURM_NTASKS_PER_NODE"])
started = []
for rank in range(nodes * tasks):
    node, local = divmod(rank, tasks)
    own = dict(SLURM_PROCID=rank, SLURM_LOCALID=local, SLURM_NODEID=node, SLURM_NTASKS=nodes * tasks)
    own |= dict(SLURM_STEP_TASKS_PER_NODE=f"{{tasks}}(x{{nodes}})")
    started.append(subprocess.Popen(command, env=os.environ | {{name: str(value) for name, value in own.items()}}))
sys.exit(max(process.wait() for process in started))
"""
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames n[1-2]" ] && printf '127.0.0.1\\n127.0.0.2\\n'
"""
SHIM = """#!/bin/sh
echo "${RANK-} ${LOCAL_RANK-} ${WORLD_SIZE-} ${MASTER_ADDR-} ${MASTER_PORT-} $(basename "$0") $*"
"""
"""Prints how it is started."""
ARGUMENTS = ("train.py", "--steps", "3")


def run_script(script: str, folder: Path, gpus: int, *arguments: str | Path, **fakes: str) -> CompletedProcess[str]:
    """Run a script as a job of two nodes, with a fake Slurm, and other fakes, first on its path."""
    for name, text in {"srun": SRUN.format(python=sys.executable), "scontrol": SCONTROL, **fakes}.items():
        file = folder / name
        file.write_text(text)
        file.chmod(file.stat().st_mode | stat.S_IEXEC)
    text = (ROOT / "examples" / script).read_text()
    (tasks,) = [line.split("=")[1].split()[0] for line in text.splitlines() if "ntasks-per-node" in line]
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    job = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": str(JOB), "SLURM_NNODES": "2"}
    # The scripts are for eight GPUs a node.
    job |= {"SLURM_NTASKS_PER_NODE": str(min(gpus, int(tasks))), "SLURM_GPUS_ON_NODE": str(gpus)}
    environment = kept | job | {"PATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = ["bash", ROOT / "examples" / script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_srun_starts_ranks_that_know_their_places(tmp_path: Path) -> None:
    done = run_script("slurm_srun.sbatch", tmp_path, 2, *ARGUMENTS, python=SHIM)
    assert sorted(done.stdout.splitlines()) == [
        f"{rank} {rank % 2} 4 127.0.0.1 {PORT} python {' '.join(ARGUMENTS)}" for rank in range(4)
    ]


def test_srun_starts_a_torchrun_on_each_node(tmp_path: Path) -> None:
    done = run_script("slurm_torchrun.sbatch", tmp_path, 2, *ARGUMENTS, torchrun=SHIM)
    first, second = done.stdout.splitlines()
    meeting = f"--rdzv-backend c10d --rdzv-id {JOB} --rdzv-endpoint 127.0.0.1:{PORT}"
    assert first == second
    assert first.endswith(f"torchrun --nnodes 2 --nproc-per-node 2 {meeting} {' '.join(ARGUMENTS)}")
