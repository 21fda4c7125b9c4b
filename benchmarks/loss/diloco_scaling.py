"""Validation loss of DiLoCo by its authors' recipe: the first row of "Scaling Laws for DiLoCo" (arXiv 2503.09799).

    python benchmarks/loss/run.py diloco-scaling --nodes 1 --configs synchronous --seeds 0,1,2
    python benchmarks/loss/run.py diloco-scaling --nodes 2 --gpus 1 --configs local30:none:at-once:outer0.6

A node is a replica. ``synchronous`` trains one replica on the whole batch; local_gaps.py says how the others are named.
Batch and learning rate are those of the paper's fits for the number of replicas, unless they are given
(diloco_recipe.py). jobs.py says how runs are made; each finished run is a file in ``--output``, for any number of
nodes. At the end comes a table of all there.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from configurations import local_steps
from corpus import Corpus
from diloco_recipe import WARMUP_STEPS, RecipeSettings, fitted_batch, fitted_lr, train_by_recipe
from diloco_table import SYNCHRONOUS, table
from jobs import Run, add_options, carry_out, parser_of, settings_of
from markdown_tables import aligned
from result_files import Result, Row
from training import Settings

PLAIN = "local30:none:at-once:outer0.6"
"""The paper's own: all weights at once every 30 steps, in full precision."""


def parse(given: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--configs", help=f"default: {SYNCHRONOUS} on one node, {PLAIN} on several")
    parser.add_argument("--lr", type=float, help="peak learning rate; default: the paper's fit")
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=True)
    add_options(parser, Path("runs/diloco-scaling"))
    parser.set_defaults(gpus_per_node=1, batch=None, tokens=700_000_000, sequence=2048, validate_every=1000)
    arguments = parser.parse_args(given)
    arguments.configs = (arguments.configs or (SYNCHRONOUS if arguments.nodes == 1 else PLAIN)).split(",")
    try:
        for name in arguments.configs:
            if (name == SYNCHRONOUS) != (arguments.nodes == 1):
                raise ValueError(f"{SYNCHRONOUS} is for one node, and local steps are for several; got {name!r}")
            if name != SYNCHRONOUS:
                local_steps(name)
    except ValueError as error:
        parser.error(str(error))
    arguments.batch = arguments.batch or fitted_batch(arguments.nodes)
    arguments.lr = arguments.lr or fitted_lr(arguments.nodes)
    return arguments


def train_run(run: Run, corpus: Corpus, device: torch.device) -> Row:
    """Train a run. Collective."""
    assert isinstance(run.settings, RecipeSettings)
    return train_by_recipe(run.settings, run.name, run.seed, corpus, device)


def report(_: Path, results: list[Result], __: Settings) -> None:
    """Print a table of all runs."""
    print(f"\n{aligned(table(results))}")


def main(given: list[str]) -> None:
    """Train and report, or be one rank of a job."""
    arguments = parse(given)

    def runs(sha256: str) -> list[Run]:
        settings = settings_of(arguments, sha256, RecipeSettings)
        settings = replace(settings, warmup=min(0.5, WARMUP_STEPS / settings.steps))
        label = f"{arguments.nodes}x{arguments.gpus_per_node}"
        label = f"{label}-{{}}-lr{arguments.lr:.4g}-batch{arguments.batch}-{arguments.tokens / 1e6:.0f}M"
        return [Run(name, seed, settings, label.format(name)) for seed in arguments.seeds for name in arguments.configs]

    carry_out(arguments, runs, report, train_run)
