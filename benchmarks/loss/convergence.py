"""Validation loss of the same training under many ways to encode gradients and weights.

    python benchmarks/loss/run.py convergence --nodes 2 --gpus-per-node 2 --seeds 0,1,2 --tokens 50e6

All configurations (configurations.py) have the same initial weights and the same data for a seed. jobs.py says how runs
are made; each finished run is a file in ``--output``. At the end come a table and a figure of all runs there.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from configurations import NAMES
from figures import gaps_svg
from jobs import Run, add_options, carry_out, parse_configs, parser_of, settings_of
from markdown_tables import aligned
from result_files import Result
from tables import FAMILIES, REFERENCE, Runs, convergence
from training import Settings

WEIGHTS = {"": "16-bit weights", "w8:": "int8(256) weights", "d4:": "int4(256) weight deltas"}
"""Kinds of weights by the prefix of a configuration's name."""


def parse(given: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--lr", type=float, default=1e-3)
    add_options(parser, Path("runs/convergence"))
    return parse_configs(parser, NAMES, given)


def report(folder: Path, results: list[Result], settings: Settings) -> None:
    """Print a table, and draw a figure, for each kind of weights."""
    runs = Runs([result for result in results if result["arguments"] == asdict(settings)])
    for prefix, weights in WEIGHTS.items():
        if {REFERENCE, prefix + REFERENCE} <= runs.names and any(runs.members(prefix + family) for family in FAMILIES):
            print(f"\n{weights}\n\n{aligned(convergence(runs, prefix))}")
            (folder / f"{weights.split('(')[0].replace(' weights', '')}-weights.svg").write_text(gaps_svg(runs, prefix))


def main(given: list[str]) -> None:
    """Train and report, or be one rank of a job."""
    arguments = parse(given)

    def runs(sha256: str) -> list[Run]:
        settings = settings_of(arguments, sha256)
        return [Run(name, seed, settings, name) for name in arguments.configs for seed in arguments.seeds]

    carry_out(arguments, runs, report)
