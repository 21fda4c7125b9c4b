"""Slurm scripts of the examples, under a fake srun that really starts the ranks, as two nodes of two on one machine."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from harness.launch import ROOT
from harness.pool import free_port

SCRIPTS = sorted((ROOT / "examples").glob("*.sbatch"))

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


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a job on two nodes, with a fake Slurm first on its path."""
    for name, text in {"srun": SRUN.format(python=sys.executable), "scontrol": SCONTROL}.items():
        file = tmp_path / name
        file.write_text(text)
        file.chmod(file.stat().st_mode | stat.S_IEXEC)
    (tmp_path / "train.py").write_text(TRAINING)
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    number = free_port() - 20000  # of which the scripts make the port
    job = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": str(number), "SLURM_NNODES": "2"}
    return kept | job | {"PATH": path, "SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_is_shell_that_bash_reads(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_starts_ranks_that_know_their_nodes(script: Path, tmp_path: Path, cluster: dict[str, str]) -> None:
    (tasks,) = [line.split("=")[1].split()[0] for line in script.read_text().splitlines() if "ntasks-per-node" in line]
    cluster["SLURM_NTASKS_PER_NODE"] = str(min(2, int(tasks)))  # of two GPUs a node, where the script has eight
    done = subprocess.run(
        ["bash", script, tmp_path / "train.py"], env=cluster, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Linear: IGG on 2 nodes x 2, 1 unit" in done.stderr
