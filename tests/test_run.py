"""What ``./run`` installs and how it tests: its commands are watched, with stand-ins for python, pip and nvidia-smi."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "run"
STAND_INS = {
    "nvidia-smi": '[ "$GPU" = 1 ] && echo "GPU 0: NVIDIA H200 (UUID: GPU-0)" || exit 9',
    "python": """if [ "$1" = -m ]; then mkdir -p .venv/bin; cp stand-ins/* .venv/bin; else [ "$TORCH" = 1 ]; fi""",
    "pip": "true",
    "pytest": "true",
    "torchrun": "true",
}


def commands(folder: Path, command: str = "test", *, gpu: bool, torch: bool) -> list[str]:
    """What ``./run command`` calls in a fresh clone.

    Args:
        folder: An empty one.
        command: One of those of ``./run``.
        gpu: Whether the machine has a GPU.
        torch: Whether it has a torch of its own.
    """
    shutil.copy(RUN, folder)
    stand_ins = folder / "stand-ins"
    stand_ins.mkdir()
    for name, body in STAND_INS.items():
        script = stand_ins / name
        script.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >>log\n{body}\n')
        script.chmod(0o755)
    environment = {"PATH": f"{stand_ins}:{os.environ['PATH']}", "PYTHON": "python", "GPU": str(int(gpu))}
    subprocess.run(["./run", command], cwd=folder, env=environment | {"TORCH": str(int(torch))}, check=True, timeout=30)
    return (folder / "log").read_text().splitlines()


@pytest.mark.parametrize(("gpu", "version"), [(True, "2.15.0"), (False, "2.13.0")], ids=["GPU", "no GPU"])
def test_torch_is_the_newest_with_a_gpu_and_small_without(tmp_path: Path, gpu: bool, version: str) -> None:
    called = commands(tmp_path, gpu=gpu, torch=False)
    assert called.index(f"pip install --quiet torch=={version}") < called.index(
        "pip install --quiet --editable .[test]"
    )
    assert "python -m venv .venv" in called


@pytest.mark.parametrize("gpu", [True, False], ids=["GPU", "no GPU"])
def test_a_machine_keeps_its_own_torch(tmp_path: Path, gpu: bool) -> None:
    called = commands(tmp_path, gpu=gpu, torch=True)
    assert "python -m venv --system-site-packages .venv" in called
    assert not any("torch==" in call for call in called)


@pytest.mark.parametrize(("gpu", "call"), [(True, "pytest "), (False, "pytest -n 2 --dist worksteal")], ids=str)
def test_two_tests_at_once_without_a_gpu(tmp_path: Path, gpu: bool, call: str) -> None:
    assert commands(tmp_path, gpu=gpu, torch=True)[-1] == call


def test_nothing_is_run_with_the_root_on_the_path(tmp_path: Path) -> None:
    """``python -m`` puts it there, and ``kernels`` would then be taken for Hugging Face's; a script does not."""
    for command, expected in (("test", "pytest"), ("train", "torchrun")):
        folder = tmp_path / command
        folder.mkdir()
        called = commands(folder, command, gpu=False, torch=True)[-1]
        assert called.startswith(f"{expected} ")
        assert " -m " not in called
