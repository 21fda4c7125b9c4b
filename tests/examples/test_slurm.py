"""Slurm scripts of the examples, under a fake srun that really starts the ranks, as two nodes of two on one machine."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from harness.launch import ROOT
from harness.pool import free_port

SCRIPTS = sorted(script.name for script in (ROOT / "examples").glob("*.sbatch"))
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
TRAINING = """
import logging

import torch
import torch.distributed as dist

from fsdp_zpp import Strategy, fully_shard

logging.basicConfig(level=logging.INFO)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = fully_shard(torch.nn.Linear(64, 64), strategy=Strategy.zeropp())
model(torch.ones(1, 64)).sum().backward()
dist.barrier()
dist.destroy_process_group()
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


@pytest.mark.wide
@pytest.mark.parametrize("script", SCRIPTS)
def test_ranks_train_on_two_nodes_of_two(script: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    done = run_script(script, tmp_path, 2, tmp_path / "train.py")
    assert "Linear: IGG on 2 nodes x 2, 1 unit" in done.stderr
