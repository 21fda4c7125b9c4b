"""Training of the runs of a study: they are shared out over jobs, and each finished one is a file.

A job is a torchrun over all ranks that trains many runs, one after the other. Jobs run side by side on the same GPUs,
since a small model leaves a GPU waiting. A later call with the same settings does not repeat finished runs. Strategies
are told of nodes, but none is emulated, since only losses are measured (unless nodes share GPUs, with ``--gpus``).

With ``--simulate`` a job is one process, in which all ranks take turns on one GPU (``common/loopback.py``). A training
computes what it computes on real ranks, and needs no NCCL.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from configurations import sharding
from loopback import on_ranks
from manifest import manifest
from nodes import add_layout, join, run_on_emulated_nodes
from result_files import Result, Row, finished
from torch.distributed.fsdp import ShardingStrategy
from training import Corpus, Settings, load_corpus, train, under_fsdp1

from fsdp_zpp.bench.results import write


@dataclass(frozen=True)
class Run:
    """One training of a study.

    Args:
        name: Name of its configuration (configurations.py).
        seed: Seed of the weights and the order of the data.
        settings: Settings that it has in common with the runs that it is compared with.
        label: Text that sets it apart from all others of the study with its seed.
        base: SHA-256 of the weights that it starts from; empty if its seed tells them.
    """

    name: str
    seed: int
    settings: Settings
    label: str
    base: str = ""

    @property
    def file(self) -> str:
        """Return the name of its result; not all systems allow a colon."""
        return f"{self.label.replace(':', '-')}-seed{self.seed}.json"

    @property
    def weights(self) -> str:
        """Return the name of its weights, where they are kept."""
        return self.file.replace(".json", ".pt")


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Make a study's parser, which shows the description as it is."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_options(parser: argparse.ArgumentParser, output: Path) -> None:
    """Add the options of all studies; each adds ``--configs`` and ``--lr``.

    Args:
        parser: Parser of the study.
        output: Default folder of results.
    """

    def count(text: str) -> int:
        return int(float(text))

    add_layout(parser)
    add = parser.add_argument
    add("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default="0,1,2")
    add("--jobs", type=int, default=3, help="jobs side by side on the same GPUs; runs are shared out")
    add("--port", type=int, default=29600, help="of the first job; the others take the next ones")
    add("--text", type=Path, nargs="*", default=[], help="folders of text; default: Python's packages")
    add("--output", type=Path, default=output, help="folder of the results")
    add("--tokens", type=count, default=50_000_000, help="of a run")
    add("--batch", type=int, default=32, help="sequences a GPU")
    for name, default in (("sequence", 512), ("hidden", 512), ("intermediate", 2048), ("layers", 8), ("heads", 8)):
        add(f"--{name}", type=int, default=default)
    add("--warmup", type=float, default=0.05, help="share of the steps")
    add("--validate-every", type=int, default=100, help="steps")
    add("--validation-tokens", type=count, default=2**19)
    add("--simulate", action="store_true", help="ranks of a job take turns in one process, on one of the --gpus")
    add("--job", type=int, help=argparse.SUPPRESS)  # number of this worker's job; without it, it trains all runs


def parse_configs(parser: argparse.ArgumentParser, known: Collection[str], given: Sequence[str]) -> argparse.Namespace:
    """Parse ``given`` with the further option ``--configs``: some of the ``known`` names, all by default."""
    parser.add_argument("--configs", default=",".join(known), help="in this order; default: all")
    arguments = parser.parse_args(given)
    arguments.configs = arguments.configs.split(",")
    if unknown := set(arguments.configs) - set(known):
        parser.error(f"unknown configurations {sorted(unknown)}; known are {', '.join(known)}")
    return arguments


def settings_of(arguments: argparse.Namespace, sha256: str, kind: type[Settings] = Settings, **others: Any) -> Settings:
    """Return the settings on the command line.

    Args:
        arguments: The command line.
        sha256: SHA-256 of the text.
        kind: Class of the settings.
        others: Settings instead of those on the command line.
    """
    given = {field.name: getattr(arguments, field.name) for field in fields(kind) if field.name != "text"}
    return kind(**given | {"text": sha256} | others)


def train_under_fsdp1(
    run: Run, corpus: Corpus, device: torch.device, keep: Path | None = None, exact_end: float = 0.0
) -> Row:
    """Train with AdamW under ``FullyShardedDataParallel``, as the run's configuration says. Collective.

    Args:
        run: The run.
        corpus: Text on ``device``.
        device: This rank's device.
        keep: Folder for the weights at the end, in a file that :attr:`Run.weights` names.
        exact_end: Share of the steps, the last ones, that FULL_SHARD repeats from the state before them.
    """
    strategy = sharding(run.name, run.settings.gpus_per_node)
    prepare = partial(under_fsdp1, strategy=strategy, lr=run.settings.lr)
    exact = partial(under_fsdp1, strategy=ShardingStrategy.FULL_SHARD, lr=run.settings.lr)
    repeated = (exact_end, exact) if exact_end else None
    keep = keep and keep / run.weights
    return train(run.settings, prepare, run.seed, corpus, device, keep=keep, exact=repeated)


def carry_out(
    arguments: argparse.Namespace,
    runs_on: Callable[[str], list[Run]],
    report: Callable[[Path, list[Result], Settings], None],
    train_run: Callable[[Run, Corpus, torch.device], Row] = train_under_fsdp1,
    lacks: Callable[[Run, Row], bool] = lambda run, row: False,
) -> None:
    """Train the runs that are not there yet and report, or, with ``--worker``, be a rank of a job. Exits.

    Exits with an error if a finished run started from another base.

    Args:
        arguments: The command line.
        runs_on: Returns all runs on the text of an SHA-256, the most important first.
        report: Reports results in a folder that have these settings.
        train_run: Trains a run and returns its figures.
        lacks: Returns whether a finished run, which has these figures, lacks something and is to be repeated.
    """
    corpus = load_corpus(arguments.text)
    runs = runs_on(corpus.sha256)
    _trained(arguments.output, runs, lacks)  # which exits before anything is trained
    work = partial(_work, arguments.output, lacks)
    if arguments.worker:
        # The share of a job does not depend on finished runs, since jobs look at different times.
        mine = runs if arguments.job is None else runs[arguments.job :: arguments.jobs]
        if arguments.simulate:
            device = torch.device(arguments.device)
            on_ranks(arguments.nodes, arguments.gpus_per_node, work, mine, corpus, device, train_run)
            return
        device = join(arguments.device)
        work(mine, corpus, device, train_run)
        dist.destroy_process_group()
        return
    succeeded = _run_jobs(arguments, min(arguments.jobs, len(runs)), corpus)
    report(arguments.output, list(finished(arguments.output).values()), runs[0].settings)
    sys.exit(0 if succeeded else 1)


def _run_jobs(arguments: argparse.Namespace, jobs: int, corpus: Corpus) -> bool:
    """Start the jobs, wait for all of them, and return whether all succeeded."""
    print("text:", corpus.summary(), flush=True)
    layout = (arguments.nodes, arguments.gpus_per_node)
    if arguments.gpus is None:
        layout = (1, arguments.nodes * arguments.gpus_per_node)
    else:
        # MPS has some 128 channels a GPU; where processes ask for more than their share, the last ones find it busy.
        processes = math.ceil(jobs * arguments.nodes * arguments.gpus_per_node / arguments.gpus)
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(max(1, min(32, 64 // processes))))

    def job(index: int) -> bool:
        command = [*sys.argv, "--worker", "--job", str(index)]
        if arguments.simulate:
            visible = {"CUDA_VISIBLE_DEVICES": str(index % (arguments.gpus or 1))} if arguments.device == "cuda" else {}
            return subprocess.run([sys.executable, *command], env={**os.environ, **visible}).returncode == 0
        try:
            run_on_emulated_nodes(*layout, command, arguments.port + index, gpus=arguments.gpus)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return False
        return True

    with ThreadPoolExecutor(jobs) as pool:
        return all(pool.map(job, range(jobs)))


def _trained(output: Path, runs: list[Run], lacks: Callable[[Run, Row], bool]) -> list[Run]:
    """Return the finished ``runs`` that lack nothing; see :func:`carry_out`."""
    rows = [(result["arguments"], row) for result in finished(output).values() for row in result["rows"]]
    trained = []
    for run in runs:
        of_run = (run.name, run.seed, asdict(run.settings))
        found = [row for arguments, row in rows if (row["name"], row["seed"], arguments) == of_run]
        if any(row.get("base", "") != run.base for row in found):
            sys.exit(f"{output / run.file} is of a run that started from another base; use another --output")
        if found and not any(lacks(run, row) for row in found):
            trained.append(run)
    return trained


def _work(
    output: Path,
    lacks: Callable[[Run, Row], bool],
    runs: list[Run],
    corpus: Corpus,
    device: torch.device,
    train_run: Callable[[Run, Corpus, torch.device], Row],
) -> None:
    """Train the runs that are not there yet, as one rank of a job; rank 0 writes."""
    trained = _trained(output, runs, lacks)
    # All ranks must have looked before the first run is written.
    dist.barrier()
    on_device = corpus.to(device)
    for run in runs:
        if run in trained:
            continue
        if dist.get_rank() == 0:
            (output / run.weights).unlink(missing_ok=True)  # of an earlier run with other settings
        of_base = {"base": run.base} if run.base else {}
        row = {"name": run.name, "seed": run.seed, **of_base, **train_run(run, on_device, device)}
        if dist.get_rank() == 0:
            # The command without the options that a job adds.
            made_by = manifest(["python", *sys.argv[: sys.argv.index("--worker")]])
            write(output / run.file, made_by, run.settings, [row], text=corpus.summary())
            loss, seconds = row["validation"][-1][1], row["seconds"]
            print(f"{run.label}, seed {run.seed}: {loss:.4f} in {seconds:.1f} s", flush=True)
