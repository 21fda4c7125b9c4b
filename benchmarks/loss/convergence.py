"""Validation loss of the same training under many ways to encode gradients and weights.

    python benchmarks/loss/run.py convergence --nodes 2 --gpus-per-node 2 --seeds 0,1,2 --tokens 50e6

Same initial weights and same data for a seed, whatever the configuration (configurations.py). jobs.py says how runs are
made; each finished run is a file in ``--output``. At the end come a table and a figure of all runs there.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from configurations import NAMES
from corpus import load_corpus
from figures import draw_gaps
from gaps import FAMILIES, REFERENCE, Runs, table
from gpt2_training import Settings
from jobs import Run, add_options, carry_out, settings_of
from result_files import read
from tables import in_columns

WEIGHTS = {"": "16-bit weights", "w8:": "int8(256) weights"}
"""What the prefix of a configuration's name means."""


def parse(given: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", default=",".join(NAMES), help="in this order; default: all")
    parser.add_argument("--lr", type=float, default=1e-3)
    add_options(parser, Path("runs/convergence"))
    arguments = parser.parse_args(given)
    arguments.configs = arguments.configs.split(",")
    if unknown := set(arguments.configs) - set(NAMES):
        parser.error(f"unknown configurations {sorted(unknown)}; known are {', '.join(NAMES)}")
    return arguments


def report(folder: Path, settings: Settings) -> None:
    """Print a table, and draw a figure, for each kind of weights."""
    wanted = asdict(settings)
    runs = Runs([result for result in read(folder).values() if result["arguments"] == wanted])
    for prefix, weights in WEIGHTS.items():
        if {REFERENCE, prefix + REFERENCE} <= runs.names and any(runs.members(prefix + family) for family in FAMILIES):
            print(f"\n{weights}\n\n{in_columns(table(runs, prefix))}")
            draw_gaps(runs, folder / f"{weights.split('(')[0].replace(' weights', '')}-weights.png", prefix)


def main(given: list[str]) -> None:
    """Train and report, or be one rank of a job."""
    arguments = parse(given)
    corpus = load_corpus(arguments.text)
    settings = settings_of(arguments, corpus)
    runs = [Run(name, seed, settings, name) for name in arguments.configs for seed in arguments.seeds]
    well = carry_out(arguments, runs, corpus)
    if arguments.worker:
        return
    report(arguments.output, settings)
    sys.exit(0 if well else 1)
