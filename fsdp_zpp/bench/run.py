"""A run: the links, then each strategy in turn, then what to do."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_zpp.collectives.agreement import agree, from_first_rank, run_on_first_rank
from fsdp_zpp.planner.bandwidth import world
from fsdp_zpp.planner.model_size import module_size

from .arguments import named_contenders
from .candidates import candidates
from .contenders import FULL_SHARD, Contender
from .fitting import Planner
from .job import free_gib, is_rank_zero
from .links import Links, measure_links
from .manifest import manifest
from .measuring import Schedule, attempt
from .models import network
from .overlap import traced
from .progress import with_progress
from .recommendation import Recommendation, recommend
from .result_file import Row, write
from .task import Task
from .timing import PeakMemory
from .torch_fsdp import TorchFSDP
from .training import Training

_log = logging.getLogger(__name__)
_ON_CPU = (
    "on CPUs: ranks share this machine's cores and talk through its memory (gloo), so times show that all of this "
    "runs, not what GPUs would gain; bytes are those of GPUs"
)


@dataclass(frozen=True)
class Findings:
    """Result of a run.

    Attributes:
        links: The links.
        rows: A row for each strategy, in the order of preference among equals.
        recommendation: What to do.
        notes: What a reader has to know of the figures.
    """

    links: Links
    rows: list[Row]
    recommendation: Recommendation
    notes: tuple[str, ...]


def measure_all(arguments: argparse.Namespace, config: Any, place: torch.device) -> Findings:
    """Measure the links and all strategies in turn. Collective; rank 0 writes the JSON file after each.

    Raises:
        ValueError: If the layout is not possible, or a strategy is unknown.
        OSError: On every rank, if rank 0 can't write the JSON file.
    """
    if is_rank_zero():
        _log.info("measuring the links")
    links = measure_links(arguments.gpus_per_node, place.type)
    task = _task(arguments, config, links, place.type)
    planner = Planner(module_size(network(task)), task, links, free_gib(place))
    # Ranks may have different packages, but they must try the same.
    names = arguments.strategies or from_first_rank(",".join(candidates(planner, arguments.frozen)))
    contenders = agree(world(), lambda: named_contenders(names, arguments.gpus_per_node, bool(task.lora)))
    notes = (_ON_CPU,) if place.type == "cpu" else ()
    rows: list[Row] = []
    findings = Findings(links, rows, Recommendation("", None), notes)
    for row in _measured(arguments, task, planner, contenders):
        rows.append(row)
        findings = Findings(links, rows, recommend(rows), notes)
        if arguments.json is not None:
            run_on_first_rank(partial(_write, arguments, findings))
    return findings


def _task(arguments: argparse.Namespace, config: Any, links: Links, device: str) -> Task:
    return Task(
        config,
        links.nodes,
        links.gpus_per_node,
        lora=arguments.lora or 0,
        micro_batch=arguments.micro_batch,
        micro_batches=arguments.micro_batches,
        sequence=arguments.sequence,
        checkpointing=arguments.checkpointing,
        compile=arguments.compile,
        device=device,
    )


def _measured(
    arguments: argparse.Namespace, task: Task, planner: Planner, contenders: list[Contender]
) -> Iterator[Row]:
    """Measure each contender that fits, one after the other."""
    schedule = Schedule(arguments.warmup, arguments.steps)
    beside_states = 0.0
    named = [(one.label, one) for one in contenders]
    with tempfile.TemporaryDirectory() as folder:
        further = _exposed(task, Path(folder)) if task.device == "cuda" else None
        for one in with_progress(named, is_rank_zero()):
            about = {"label": one.label, "code": one.code, "is_torchs": one.is_torchs}
            reason = planner.does_not_fit(one, beside_states)
            if reason:
                yield {"strategy": one.name, **about, "failed": reason, "left_out": True}
                continue
            row = attempt(task, one.name, partial(TorchFSDP, task, one), schedule, further) | about
            if one.is_torchs and "step_ms" in row:
                row |= planner.sent(one)
            if one.preset == FULL_SHARD and row.get("peak_gib") is not None:
                beside_states = max(0.0, row["peak_gib"] - (planner.states_gib(one) or 0.0))
            yield row


def _exposed(task: Task, folder: Path) -> Callable[[Training, PeakMemory], Row]:
    """Return a function that adds how much communication nothing hides, from a trace of the GPU alone."""

    def further(training: Training, memory: PeakMemory) -> Row:
        return dict(traced(training, task.tokens(dist.get_rank()), folder / "trace.json.gz", with_host=False))

    return further


def _write(arguments: argparse.Namespace, findings: Findings) -> None:
    write(
        arguments.json,
        manifest(["python", "-m", "fsdp_zpp", *sys.argv[1:]]),
        arguments,
        findings.rows,
        links=vars(findings.links) | {"inter": _shown(findings.links.inter), "intra": _shown(findings.links.intra)},
        recommendation=vars(findings.recommendation),
        notes=findings.notes,
    )


def _shown(link: Any) -> dict[str, float] | None:
    return None if link is None else vars(link)
