"""Finished runs as lines of JSON, which a later call of convergence.py does not repeat."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

Record = dict[str, Any]


def append(path: Path, record: Record) -> None:
    """Add a run. One write, so that jobs that end together don't mix their lines."""
    with path.open("ab", buffering=0) as file:
        file.write((json.dumps(record) + "\n").encode())


def read(path: Path, settings: Record | None = None) -> list[Record]:
    """The runs made so far, the newest of each configuration and seed.

    Args:
        path: Of the lines; may not exist.
        settings: Runs with other settings are left out; None takes the settings of the last run.
    """
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:  # a call was cut while it wrote
            print(f"{path}: skipped a broken line")
    if settings is None and records:
        settings = records[-1]["settings"]
    kept = {(record["name"], record["seed"]): record for record in records if record["settings"] == settings}
    return list(kept.values())


def machine(device: str) -> Record:
    """Where a run was made, and with what."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if device == "cuda" else []
    versions = {"python": platform.python_version()}
    for package in ("torch", "triton", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    if gpus:
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {"platform": platform.platform(), "cpus": os.cpu_count(), "gpus": gpus, "versions": versions}
