"""Manifests: when and where a run was made, with which versions, from which commit, by which command."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "transformers", "numpy", "deepspeed", "megatron-fsdp", "peft")


def manifest(command: list[str] | None = None) -> dict[str, Any]:
    """Return the manifest of this run.

    Args:
        command: Command that started it; by default, this process's own.

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
    """Return names and counts of CPU cores and GPUs, without ``gpu`` where there is none."""
    import torch  # only where something is measured: reports are made without it

    names: dict[str, Any] = {"cpu": cpu_name(), "cores": os.cpu_count()}
    if torch.cuda.is_available():
        names |= {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()}
    return names


def cpu_name() -> str:
    """Return the processor's name, or its architecture if the system does not tell."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of Python, of the installed ``PACKAGES``, and of NCCL where there is a GPU."""
    import torch

    numbers = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            numbers[package] = importlib.metadata.version(package)
    # torch's metadata leave out the build, as in 2.13.0+cpu.
    numbers["torch"] = str(torch.__version__)
    if torch.cuda.is_available():
        numbers["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return numbers


def commit() -> str | None:
    """Return the commit that is checked out, ``+dirty`` if tracked files have changed since; None without git."""
    head = _git("rev-parse", "HEAD")
    return f"{head}+dirty" if head and _git("status", "--porcelain", "--untracked-files=no") else head


def _git(*arguments: str) -> str | None:
    """Return git's output about the repository of this file; None if it fails or is not there."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
