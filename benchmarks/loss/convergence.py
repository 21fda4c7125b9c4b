"""Validation loss of the same training under many ways to encode gradients and weights.

    python benchmarks/loss/run.py convergence --nodes 2 --gpus-per-node 2 --seeds 0,1,2 --tokens 50e6

Same initial weights and same data for a seed, whatever the configuration (configurations.py). Strategies are told of
nodes, but none is emulated, since only losses are measured (unless nodes share GPUs, with ``--gpus``). A job is a
torchrun over all GPUs that trains many configurations, one after the other, for its share of the seeds; jobs run side
by side, since a small model leaves a GPU waiting. Each finished run is a file in ``--output``; a later call with the
same settings does not repeat it. At the end come a table and a figure of all runs there.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from configurations import NAMES, sharding
from corpus import Corpus, load_corpus
from figures import draw_gaps
from gaps import FAMILIES, REFERENCE, Runs, table
from gpt2_training import Settings, train
from manifest import manifest
from nodes import run_on_emulated_nodes
from records import Record, read_all, write
from tables import in_columns

WEIGHTS = {"": "16-bit weights", "w8:": "int8(256) weights"}
"""What the prefix of a configuration's name means."""


def parse(given: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpus-per-node", type=int, default=2)
    parser.add_argument("--gpus", type=int, help="GPUs that there are, if fewer: nodes then share them (nodes.py)")
    parser.add_argument("--configs", default=",".join(NAMES), help="in this order; default: all")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=3, help="jobs side by side on the same GPUs; seeds are shared out")
    parser.add_argument("--time-limit", type=float, help="seconds after which no run is started that would not end")
    parser.add_argument("--port", type=int, default=29600, help="of the first job; the others take the next ones")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="folders of text; default: Python's packages")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, default=Path("runs/convergence"), help="folder of the results")
    add_settings(parser)
    parser.add_argument("--worker", action="store_true", help="this process is one rank of a job")
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    arguments.seeds = [int(seed) for seed in arguments.seeds.split(",")]
    arguments.configs = arguments.configs.split(",")
    if unknown := set(arguments.configs) - set(NAMES):
        parser.error(f"unknown configurations {sorted(unknown)}; known are {', '.join(NAMES)}")
    return arguments


def add_settings(parser: argparse.ArgumentParser) -> None:
    """What makes runs comparable, as in Settings."""
    parser.add_argument("--tokens", type=lambda text: int(float(text)), default=50_000_000, help="of a run")
    parser.add_argument("--batch", type=int, default=32, help="sequences a GPU")
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=float, default=0.05, help="share of the steps")
    parser.add_argument("--validate-every", type=int, default=100, help="steps")
    parser.add_argument("--validation-tokens", type=lambda text: int(float(text)), default=2**19)


def settings_of(arguments: argparse.Namespace, corpus: Corpus) -> Settings:
    """The settings on the command line."""
    names = set(Settings.__dataclass_fields__) - {"text"}
    return Settings(**{name: getattr(arguments, name) for name in names}, text=corpus.sha256)


def run_jobs(arguments: argparse.Namespace) -> bool:
    """Share the seeds out over jobs and wait for all of them; whether all went well."""
    began = time.time()
    # Before the jobs, which would all read it at once.
    print("text:", load_corpus(arguments.text).summary(), flush=True)
    jobs = min(arguments.jobs, len(arguments.seeds))
    layout = (arguments.nodes, arguments.gpus_per_node)
    if arguments.gpus is None:
        layout = (1, arguments.nodes * arguments.gpus_per_node)

    def job(index: int) -> bool:
        # argparse lets the last of an option decide.
        command = [*sys.argv, "--worker", "--seeds", ",".join(map(str, arguments.seeds[index::jobs]))]
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


def work(arguments: argparse.Namespace, device: torch.device) -> None:
    """One rank of a job: train what is not there yet; rank 0 writes."""
    corpus = load_corpus(arguments.text)
    settings = settings_of(arguments, corpus)
    records = [record for record in read_all(arguments.output) if record["arguments"] == asdict(settings)]
    rows = [row for record in records for row in record["rows"]]
    finished = {(row["name"], row["seed"]) for row in rows}
    # All ranks must have looked before the first run is written.
    dist.barrier()
    runs = [(name, seed) for name in arguments.configs for seed in arguments.seeds if (name, seed) not in finished]
    on_device = Corpus(corpus.training.to(device), corpus.held_out.to(device), corpus.files, corpus.sha256)
    longest = max((row["seconds"] for row in rows), default=0.0)
    for name, seed in runs:
        if not agree(arguments.deadline is None or time.time() + longest < arguments.deadline, device):
            say(f"no time left for {name}, seed {seed}, and what follows")
            return
        result = train(settings, sharding(name, arguments.gpus_per_node), seed, on_device, device)
        longest = max(longest, result["seconds"])
        if dist.get_rank() == 0:
            row = {"name": name, "seed": seed, **result}
            record = {"manifest": manifest(command_line()), "arguments": asdict(settings), "text": corpus.summary()}
            write(path_of(arguments.output, name, seed), record | {"rows": [row]})
        say(f"{name}, seed {seed}: {result['validation'][-1][1]:.4f} in {result['seconds']:.1f} s")


def path_of(folder: Path, name: str, seed: int) -> Path:
    """The file of a run; not all systems allow a colon."""
    return folder / f"{name.replace(':', '-')}-seed{seed}.json"


def command_line() -> list[str]:
    """What was typed, without what a job adds."""
    return ["python", *sys.argv[: sys.argv.index("--worker")]]


def agree(answer: bool, device: torch.device) -> bool:
    """Rank 0's answer, on all ranks."""
    shared = torch.tensor([answer], dtype=torch.int32, device=device)
    dist.broadcast(shared, src=0)
    return bool(shared.item())


def say(text: str) -> None:
    """Print, once a job."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def start_worker(arguments: argparse.Namespace) -> None:
    """Be one rank of a job."""
    if arguments.device == "cpu":
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    work(arguments, device)
    dist.destroy_process_group()


def report(folder: Path, settings: Record) -> None:
    """Print a table, and draw a figure, for each kind of weights."""
    runs = Runs([record for record in read_all(folder) if record["arguments"] == settings])
    for prefix, weights in WEIGHTS.items():
        if {REFERENCE, prefix + REFERENCE} <= runs.names and any(runs.members(prefix + family) for family in FAMILIES):
            print(f"\n{weights}\n\n{in_columns(table(runs, prefix))}")
            draw_gaps(runs, folder / f"{weights.split('(')[0].replace(' weights', '')}-weights.png", prefix)


def main(given: list[str]) -> None:
    """Train and report, or be one rank of a job."""
    arguments = parse(given)
    if arguments.worker:
        return start_worker(arguments)
    well = run_jobs(arguments)
    report(arguments.output, asdict(settings_of(arguments, load_corpus(arguments.text))))
    sys.exit(0 if well else 1)
