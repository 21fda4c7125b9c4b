"""Commands of ``./run``, watched with stand-ins for python, pip and nvidia-smi, and ``python -m fsdp_zpp env``.

Git's hook and GitHub run commands of ``./run`` and, but for torch of another version, no others.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import yaml
from harness.launch import ROOT

from fsdp_zpp.__main__ import main

RUN = ROOT / "run"
STAND_INS = {
    "nvidia-smi": '[ "$GPU" = 1 ] && echo "GPU 0: NVIDIA H200 (UUID: GPU-0)" || exit 9',
    "python": """case "$*" in
        *version_info*) [ "$OLD" = 0 ] ;;
        --version) echo Python 3.10.13 ;;
        benchmarks/*|"-P -m pytest"*) ;;
        *venv*) mkdir -p .venv/bin; cp stand-ins/* .venv/bin ;;
        *) [ "$TORCH" = 1 ] ;;
        esac""",
    "pip": "true",
    "torchrun": "true",
}


def commands(folder: Path, *, gpu: bool, own_torch: bool) -> list[str]:
    """The calls of ``./run test`` in a fresh clone, which ``folder`` becomes."""
    result = attempt(folder, PYTHON="python", GPU=str(int(gpu)), TORCH=str(int(own_torch)))
    assert result.returncode == 0, result.stderr
    return (folder / "log").read_text().splitlines()


def attempt(folder: Path, *options: str, do: str = "test", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``./run test`` in ``folder``, which it makes a clone; ``OLD=1`` makes its Python too old."""
    shutil.copy(RUN, folder)
    stand_ins = folder / "stand-ins"
    stand_ins.mkdir(exist_ok=True)
    for name, body in STAND_INS.items():
        script = stand_ins / name
        script.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >>log\n{body}\n')
        script.chmod(0o755)
    shutil.copy(stand_ins / "python", stand_ins / "python3")
    environment = {"PATH": f"{stand_ins}:{os.environ['PATH']}", "GPU": "0", "TORCH": "0", "OLD": "0"} | variables
    command_line = ["./run", do, *options]
    return subprocess.run(command_line, cwd=folder, env=environment, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(("gpu", "newest"), [(True, "2.15.0"), (False, "2.13.0")], ids=["GPU", "no GPU"])
def test_torch_is_the_newest_with_a_gpu_and_small_without(tmp_path: Path, gpu: bool, newest: str) -> None:
    called = commands(tmp_path, gpu=gpu, own_torch=False)
    assert called.index(f"pip install torch=={newest}") < called.index("pip install --editable .[test]")
    assert "python -m venv --clear .venv" in called


@pytest.mark.parametrize(("gpu", "options"), [(True, ""), (False, " -n 2 --dist worksteal")], ids=str)
def test_a_machine_keeps_its_own_torch_and_without_a_gpu_runs_two_tests_at_once(
    tmp_path: Path, gpu: bool, options: str
) -> None:
    called = commands(tmp_path, gpu=gpu, own_torch=True)
    assert "python -m venv --clear --system-site-packages .venv" in called
    assert not any("torch==" in each for each in called)
    assert called[-1] == f"python -P -m pytest{options}"


def test_training_installs_no_tests_and_tests_add_the_rest(tmp_path: Path) -> None:
    for do, extras in (("train", ["examples"]), ("test", ["examples", "test"]), ("train", ["examples", "test"])):
        result = attempt(tmp_path, do=do)
        assert result.returncode == 0, result.stderr
        assert ("GB" in result.stderr) == (do == "test" or extras == ["examples"]), "says what it will install"
        assert re.findall(r"--editable \.\[(\w+)\]", (tmp_path / "log").read_text()) == extras


def test_it_says_at_once_how_long_the_whole_suite_takes(tmp_path: Path) -> None:
    for options, says_it in (((), True), (("--wide",), True), (("-m", "smoke"), False), (("tests/codecs",), False)):
        told = attempt(tmp_path, *options)
        assert ("minutes on two cores" in told.stderr) == says_it, options
        assert told.stderr.count("--wide") == told.stderr.count("-m smoke") == says_it


def test_a_python_that_is_too_old_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    result = attempt(tmp_path, OLD="1")
    assert result.returncode == 1
    assert "needs Python 3.11 or later, but python3 is: Python 3.10.13" in result.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize("remainder", ["another Python", "no pip", "all but the packages"])
def test_a_try_that_failed_does_not_spoil_the_next_one(tmp_path: Path, remainder: str) -> None:
    bin_ = tmp_path / ".venv/bin"
    bin_.mkdir(parents=True)
    for name in ("python", "pip"):
        fails = (remainder, name) in (("another Python", "python"), ("no pip", "pip"))
        (bin_ / name).write_text(f"#!/bin/sh\nexit {int(fails)}\n")
        (bin_ / name).chmod(0o755)
    result = attempt(tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / ".venv/ready-test").exists()
    is_new = "-m venv --clear .venv" in (tmp_path / "log").read_text()
    assert is_new == (remainder != "all but the packages")


def test_the_hook_before_a_commit_is_lint_and_nothing_else() -> None:
    configured = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repository in configured["repos"] for hook in repository["hooks"]]
    assert [(hook["entry"], hook["pass_filenames"], hook["always_run"]) for hook in hooks] == [
        ("./run lint", False, True)
    ]


def test_github_runs_lint_and_all_shards_on_the_oldest_and_the_newest_torch() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert [job["steps"][-1]["run"] for job in jobs.values()] == [
        "./run lint",
        "./run test --shard ${{ matrix.shard }}/4",
    ]
    matrix = jobs["test"]["strategy"]["matrix"]
    assert matrix["shard"] == [0, 1, 2, 3]
    supported = re.search(r'"torch>=2\.(\d+),<2\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert supported
    versions = [int(each["torch"].split(".")[1]) for each in matrix["environment"]]
    assert versions == [int(supported[1]), int(supported[2]) - 1]


# ---- what a bug report needs


def test_env_names_versions_the_job_and_what_communication_depends_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    for name in ("HF_TOKEN", "TORCH_HUB_TOKEN"):
        monkeypatch.setenv(name, "secret")
    assert main(["env", "--json"]) == 0
    printed = capsys.readouterr().out
    assert "secret" not in printed
    sections = json.loads(printed)
    assert sections["versions"]["torch"] == torch.__version__
    assert sections["versions"]["triton"] == version("triton")
    assert sections["versions"]["python"] == sys.version.split()[0]
    assert len(sections["GPUs"]) == torch.cuda.device_count()
    assert (sections["nodes"]["LOCAL_WORLD_SIZE"], sections["nodes"]["GROUP_WORLD_SIZE"]) == ("4", "2")
    assert sections["variables"]["NCCL_SOCKET_IFNAME"] == "eth1"
    assert sections["variables"]["TORCH_HUB_TOKEN"] == "(hidden)"
    assert "HF_TOKEN" not in sections["variables"]

    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["NCCL_SOCKET_IFNAME", "eth1"] for line in lines)


def test_the_first_rank_prints_also_under_srun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(launcher: dict[str, str]) -> str:
        for name, value in launcher.items():
            monkeypatch.setenv(name, value)
        assert main(["env", "--json"]) == 0
        return capsys.readouterr().out

    assert printed({"RANK": "1"}) == ""
    for name in ("RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert "LOCAL_WORLD_SIZE is not set" in printed({})
    nodes = json.loads(printed({"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_PROCID": "0"}))["nodes"]
    assert nodes["SLURM_STEP_TASKS_PER_NODE"] == "8(x2)"
    assert printed({"SLURM_PROCID": "1"}) == ""
