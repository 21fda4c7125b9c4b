"""Result files of benchmark runs, and the table of one run."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_zpp.frozen.base_files import write_whole

Row = dict[str, Any]
"""Figures of a strategy: ``step_ms``, ``fastest_ms``, ``slowest_ms``, ``peak_gib`` if known; or why it ``failed``."""


@dataclass(frozen=True)
class Task:
    """The model and the data that a run uses for every strategy.

    Args:
        config: The model's configuration, one of transformers' for causal language models.
        nodes: Number of nodes.
        gpus_per_node: Number of ranks on each node.
        lora: Rank of the adapters; 0 trains the whole model.
        micro_batch: Sequences per rank in a micro-batch.
        micro_batches: Micro-batches per step, all but the last without synchronization.
        sequence: Tokens per sequence.
        checkpointing: True if the activations of each layer are recomputed.
        compile: True if torch.compile compiles each layer.
        device: ``cuda``, or ``cpu`` to try things out.
    """

    config: Any
    nodes: int
    gpus_per_node: int
    lora: int = 0
    micro_batch: int = 1
    micro_batches: int = 1
    sequence: int = 1024
    checkpointing: bool = False
    compile: bool = False
    device: str = "cuda"

    @property
    def place(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")

    def tokens(self, rank: int) -> torch.Tensor:
        """Return the tokens of ``rank``, [micro-batches, sequences, tokens], the same for every strategy."""
        shape = (self.micro_batches, self.micro_batch, self.sequence)
        vocabulary = self.config.get_text_config().vocab_size
        return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(rank)).to(self.place)


# ---- manifest

PACKAGES = ("fsdp_zpp", "torch", "triton", "transformers", "numpy", "deepspeed", "megatron-fsdp", "peft")


def manifest(command: list[str] | None = None) -> dict[str, Any]:
    """Return the date, machine, versions and command of a run; the command is this process's by default."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "command": shlex.join(command or ["python", *sys.argv]),
    }


def machine() -> dict[str, Any]:
    names: dict[str, Any] = {"cpu": cpu_name(), "cores": os.cpu_count()}
    if torch.cuda.is_available():
        names |= {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()}
    return names


def cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of Python, of those ``packages`` that are installed, and of NCCL if there is a GPU."""
    numbers = {"python": platform.python_version()}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            numbers[package] = importlib.metadata.version(package)
    # The metadata of the package torch lack the suffix of a build, such as +cpu in 2.13.0+cpu.
    numbers["torch"] = str(torch.__version__)
    if torch.cuda.is_available() and dist.is_nccl_available():
        numbers["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return numbers


# ---- result file
#
# Each run has one JSON file: first its manifest and arguments, then the rows that it has measured.
#
#     {"manifest": {...}, "arguments": {...}, "rows": [{...}, ...]}
#
# A file may have further keys beside ``rows``.

NOT_RECORDED = ("out", "output", "resume", "worker", "json", "run", "parser", "version")
"""Options that result files leave out, since they change no figure: where a file goes, how a script runs processes."""


def write(path: Path, manifest: dict[str, Any], arguments: object, rows: list[Row], **others: Any) -> None:
    """Write a run's result, one line for each row; only the complete file appears, or replaces an earlier one."""
    options = {name: value for name, value in vars(arguments).items() if name not in NOT_RECORDED}
    head = {"manifest": manifest, "arguments": options, **others}
    lines = [f"{json.dumps(name)}: {json.dumps(value, default=str)}," for name, value in head.items()]
    lines += ['"rows": [', ",\n".join(json.dumps(row) for row in rows), "]"]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "\n".join(["{", *lines, "}\n"]))


# ---- table
#
# The table of a run: one row per strategy, one column per figure, all as text.


def _step(row: Row) -> str:
    if "step_ms" not in row:
        return str(row.get("failed", ""))
    return f"{row['step_ms']:.0f} ({row['fastest_ms']:.0f}-{row['slowest_ms']:.0f})"


def _sent(row: Row, hop: str) -> str:
    """Return the MiB that a rank sends over ``hop`` in a step, as text: those of weights + those of gradients."""
    figures = [mib for name, mib in row.get("sent_mib_a_step", {}).items() if name.endswith(hop)]
    shown = " + ".join(f"{mib:.0f}" if mib >= 10 else f"{mib:.2f}" for mib in figures)
    return f"~{shown}" if row.get("sent_is_planned") else shown


def _figure(key: str, form: str) -> Callable[[Row], str]:
    return lambda row: form.format(row[key]) if row.get(key) is not None else ""


TEXTS: dict[str, Callable[[Row], str]] = {
    "strategy": lambda row: str(row.get("label", row["strategy"])),
    "step, ms (fastest-slowest)": _step,
    "speedup over the first": _figure("speedup", "{:.2f}x"),
    "peak, GiB": _figure("peak_gib", "{:.1f}"),
    "tokens/s": _figure("tokens_per_s", "{:.0f}"),
    "CPU finished after, ms": _figure("host_ms", "{:.0f}"),
    "of the GPUs' peak FLOP/s": _figure("utilization", "{:.1%}"),
    "sent between nodes, MiB": lambda row: _sent(row, "inter"),
    "sent inside a node, MiB": lambda row: _sent(row, "intra"),
}
"""By heading, a function that returns a row's text, empty without the figure. Tables of benchmarks/ use it, too."""


def table(rows: list[Row]) -> dict[str, list[str]]:
    """Return the texts of a run's rows by heading, without columns that would be empty."""
    shown = [row | speedup(row, rows[0]) for row in rows]
    texts = {heading: list(map(text, shown)) for heading, text in TEXTS.items()}
    return {heading: column for heading, column in texts.items() if any(column)}


def speedup(row: Row, first: Row) -> Row:
    """Return ``{"speedup": ...}`` of ``row`` over ``first``; an empty dict unless both have a step time."""
    both = "step_ms" in row and "step_ms" in first
    return {"speedup": first["step_ms"] / row["step_ms"]} if both else {}
