"""Validation loss of the same training under many ways to encode gradients and weights.

    python benchmarks/loss/run.py convergence --nodes 2 --gpus-per-node 2 --seeds 0,1,2 --tokens 50e6

All configurations (configurations.py) have the same initial weights and the same data for a seed. jobs.py says how runs
are made; each finished run is a file in ``--output``. At the end comes a table of all runs there.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial
from pathlib import Path

from configurations import NAMES
from jobs import Run, add_options, carry_out, parse_configs, parser_of, settings_of, train_under_fsdp1
from markdown_tables import aligned
from result_files import Result, Row
from tables import convergence
from training import Settings


def parse(given: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--keep-weights", action="store_true", help="at the end of each run, beside its result")
    help_ = "share of the steps, the last ones, that FULL_SHARD repeats from the state before them"
    parser.add_argument("--exact-end", type=float, default=0.0, help=help_)
    add_options(parser, Path("runs/convergence"))
    return parse_configs(parser, NAMES, given)


def report(_: Path, results: list[Result], settings: Settings) -> None:
    """Print a table of the runs with these settings."""
    print(f"\n{aligned(convergence([result for result in results if result['arguments'] == asdict(settings)]))}")


def main(given: list[str]) -> None:
    """Train and report, or be one rank of a job; finished runs that lack what is asked for are repeated."""
    arguments = parse(given)

    def runs(sha256: str) -> list[Run]:
        settings = settings_of(arguments, sha256)
        return [Run(name, seed, settings, name) for name in arguments.configs for seed in arguments.seeds]

    def lacks(run: Run, row: Row) -> bool:
        without_weights = arguments.keep_weights and not (arguments.output / run.weights).exists()
        return without_weights or (bool(arguments.exact_end) and row.get("exact_end") is None)

    keep = arguments.output if arguments.keep_weights else None
    train_run = partial(train_under_fsdp1, keep=keep, exact_end=arguments.exact_end)
    carry_out(arguments, runs, report, train_run, lacks)
