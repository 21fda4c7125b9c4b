"""``python -m fsdp_zpp env`` and ``--version``: what a bug report needs."""

from __future__ import annotations

import json
import sys
import tomllib
from importlib.metadata import version

import pytest
import torch
from harness.launch import ROOT

from fsdp_zpp.__main__ import main

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_the_projects(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"fsdp_zpp {PROJECT['version']}\n"


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


def test_one_rank_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    assert main(["env"]) == 0
    assert capsys.readouterr().out == ""


def test_under_srun_its_first_task_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "8(x2)")
    printed = []
    for task in ("0", "1"):
        monkeypatch.setenv("SLURM_PROCID", task)
        assert main(["env", "--json"]) == 0
        printed.append(capsys.readouterr().out)
    assert json.loads(printed[0])["nodes"]["SLURM_STEP_TASKS_PER_NODE"] == "8(x2)"
    assert printed[1] == ""


def test_without_a_launcher_env_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert main(["env"]) == 0
    assert "LOCAL_WORLD_SIZE is not set" in capsys.readouterr().out
