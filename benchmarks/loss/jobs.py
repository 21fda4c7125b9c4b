"""Trains the runs of a study: they are shared out over jobs, and each finished one is a file.

A job is a torchrun over all ranks that trains many runs, one after the other. Jobs run side by side on the same GPUs,
since a small model leaves a GPU waiting. A later call with the same settings does not repeat what is there. Strategies
are told of nodes, but none is emulated, since only losses are measured (unless nodes share GPUs, with ``--gpus``).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from configurations import sharding
from corpus import Corpus
from gpt2_training import Settings, train
from manifest import manifest
from nodes import run_on_emulated_nodes
from result_files import read, write


@dataclass(frozen=True)
class Run:
    """One training of a study.

    Args:
        name: Of its configuration (configurations.py).
        seed: Of the weights and the order of the data.
        settings: What it has in common with the runs that it is compared with.
        label: What sets it apart from all others of the study.
    """

    name: str
    seed: int
    settings: Settings
    label: str

    @property
    def file(self) -> str:
        """The name of its result; not all systems allow a colon."""
        return f"{self.label.replace(':', '-')}-seed{self.seed}.json"


def add_options(parser: argparse.ArgumentParser, output: Path) -> None:
    """The options of all studies; each adds ``--configs`` and ``--lr``.

    Args:
        parser: Of the study.
        output: Where results go by default.
    """
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpus-per-node", type=int, default=2)
    parser.add_argument("--gpus", type=int, help="GPUs that there are, if fewer: nodes then share them (nodes.py)")
    parser.add_argument("--seeds", type=_seeds, default="0,1,2")
    parser.add_argument("--jobs", type=int, default=3, help="jobs side by side on the same GPUs; runs are shared out")
    parser.add_argument("--time-limit", type=float, help="seconds after which no run is started that would not end")
    parser.add_argument("--port", type=int, default=29600, help="of the first job; the others take the next ones")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="folders of text; default: Python's packages")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, default=output, help="folder of the results")
    parser.add_argument("--tokens", type=_count, default=50_000_000, help="of a run")
    parser.add_argument("--batch", type=int, default=32, help="sequences a GPU")
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--warmup", type=float, default=0.05, help="share of the steps")
    parser.add_argument("--validate-every", type=int, default=100, help="steps")
    parser.add_argument("--validation-tokens", type=_count, default=2**19)
    parser.add_argument("--worker", action="store_true", help="this process is one rank of a job")
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)  # which of the jobs; without it, all runs are ours
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)


def _seeds(text: str) -> list[int]:
    return [int(seed) for seed in text.split(",")]


def _count(text: str) -> int:
    return int(float(text))


def settings_of(arguments: argparse.Namespace, corpus: Corpus, **others: Any) -> Settings:
    """The settings on the command line.

    Args:
        arguments: The command line.
        corpus: The text.
        others: Settings that it does not have as they are.
    """
    names = Settings.__dataclass_fields__.keys() - {"text", *others}
    return Settings(**{name: getattr(arguments, name) for name in names}, text=corpus.sha256, **others)


def carry_out(arguments: argparse.Namespace, runs: list[Run], corpus: Corpus) -> bool:
    """Train what is not there yet, as the first process or, with ``--worker``, as a rank of a job.

    Args:
        arguments: The command line.
        runs: All that are asked for, the most important first.
        corpus: The text.

    Returns:
        Whether all went well.
    """
    if not arguments.worker:
        return _run_jobs(arguments, min(arguments.jobs, len(runs)), corpus)
    if arguments.device == "cpu":
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    # Whether a run is there already does not change whose it is, since jobs look at different times.
    ours = runs if arguments.job is None else runs[arguments.job :: arguments.jobs]
    _work(arguments, ours, corpus, device)
    dist.destroy_process_group()
    return True


def _run_jobs(arguments: argparse.Namespace, jobs: int, corpus: Corpus) -> bool:
    """Start the jobs and wait for all of them; whether all went well."""
    began = time.time()
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
        if arguments.time_limit is not None:
            command += ["--deadline", str(began + arguments.time_limit)]
        try:
            run_on_emulated_nodes(*layout, command, arguments.port + index, gpus=arguments.gpus)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return False
        return True

    with ThreadPoolExecutor(jobs) as pool:
        return all(pool.map(job, range(jobs)))


def _work(arguments: argparse.Namespace, runs: list[Run], corpus: Corpus, device: torch.device) -> None:
    """One rank of a job: train what is not there yet; rank 0 writes."""
    results = read(arguments.output).values()
    finished = [(row["name"], row["seed"], result["arguments"]) for result in results for row in result["rows"]]
    # All ranks must have looked before the first run is written.
    dist.barrier()
    runs = [run for run in runs if (run.name, run.seed, asdict(run.settings)) not in finished]
    # How long one takes depends on anything but the learning rate.
    alike = [asdict(run.settings) | {"lr": None} for run in runs]
    took = [row["seconds"] for each in results if each["arguments"] | {"lr": None} in alike for row in each["rows"]]
    longest = max(took, default=0.0)
    on_device = Corpus(corpus.training.to(device), corpus.held_out.to(device), corpus.files, corpus.sha256)
    for run in runs:
        if not _agree(arguments.deadline is None or time.time() + longest < arguments.deadline, device):
            _say(f"no time left for {run.label}, seed {run.seed}, and what follows")
            return
        strategy = sharding(run.name, run.settings.gpus_per_node)
        row = {"name": run.name, "seed": run.seed, **train(run.settings, strategy, run.seed, on_device, device)}
        longest = max(longest, row["seconds"])
        if dist.get_rank() == 0:
            made_by, text = manifest(_command_line()), corpus.summary()
            write(arguments.output / run.file, made_by, run.settings, [row], text=text)
        _say(f"{run.label}, seed {run.seed}: {row['validation'][-1][1]:.4f} in {row['seconds']:.1f} s")


def _command_line() -> list[str]:
    """What was typed, without what a job adds."""
    return ["python", *sys.argv[: sys.argv.index("--worker")]]


def _agree(answer: bool, device: torch.device) -> bool:
    """Rank 0's answer, on all ranks."""
    shared = torch.tensor([answer], dtype=torch.int32, device=device)
    dist.broadcast(shared, src=0)
    return bool(shared.item())


def _say(text: str) -> None:
    """Print, once a job."""
    if dist.get_rank() == 0:
        print(text, flush=True)
