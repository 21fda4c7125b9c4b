"""What every result says of its run: when it ran, where, with which versions, from which commit, by which command."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "transformers", "numpy", "deepspeed", "megatron-fsdp", "peft")


def manifest(command: list[str] | None = None) -> dict[str, Any]:
    """The manifest of this run.

    Args:
        command: The command that started it; by default, this process's own.

    Returns:
        ``date`` (ISO 8601, UTC), ``machine`` (names and counts of CPUs and GPUs), ``versions``, ``commit`` (with
        ``+dirty`` if tracked files differ from it; None outside of git) and ``command``, as one types it.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "command": shlex.join(command or ["python", *sys.argv]),
    }


def machine() -> dict[str, Any]:
    """Names and counts of CPU cores and GPUs; no ``gpu`` where there is none."""
    import torch  # only where something is measured: reports are made without it

    found: dict[str, Any] = {"cpu": cpu_name(), "cores": os.cpu_count()}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()}
    return found


def cpu_name() -> str:
    """The processor's name, or its architecture if the system does not tell."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions() -> dict[str, str]:
    """Versions of Python, of NCCL where there is a GPU, and of those of ``PACKAGES`` that are installed."""
    import torch

    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    # torch's metadata leave out the build, as in 2.13.0+cpu.
    found["torch"] = str(torch.__version__)
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def commit() -> str | None:
    """The commit that is checked out, ``+dirty`` if tracked files have changed since; None where there is no git."""
    head = _git("rev-parse", "HEAD")
    if head is None:
        return None
    return f"{head}+dirty" if _git("status", "--porcelain", "--untracked-files=no") else head


def _git(*arguments: str) -> str | None:
    """What git prints about the repository of this file; None if it fails or is not there."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
