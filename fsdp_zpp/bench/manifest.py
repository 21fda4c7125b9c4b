"""Manifests: when and where a run was made, with which versions, by which command."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("fsdp_zpp", "torch", "triton", "transformers", "numpy", "deepspeed", "megatron-fsdp", "peft")


def manifest(command: list[str] | None = None) -> dict[str, Any]:
    """Return the manifest of this run.

    Args:
        command: Command that started it; by default, this process's own.

    Returns:
        ``date`` (ISO 8601, UTC), ``machine`` (names and counts of CPUs and GPUs), ``versions``, and ``command``, as one
        types it.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "command": shlex.join(command or ["python", *sys.argv]),
    }


def machine() -> dict[str, Any]:
    """Return names and counts of CPU cores and GPUs, without ``gpu`` where there is none."""
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
    numbers = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            numbers[package] = importlib.metadata.version(package)
    # torch's metadata leave out the build, as in 2.13.0+cpu.
    numbers["torch"] = str(torch.__version__)
    if torch.cuda.is_available():
        numbers["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return numbers
