"""Validation loss and sent bytes of Muon beside AdamW, where the optimizer's shards are whole in a node and where not.

    python benchmarks/loss/run.py muon --nodes 2 --gpus-per-node 2 --seeds 0,1,2

A configuration is ``adamw:SHARDING`` or ``muon:SHARDING`` (muon_training.py says what these are). All have the same
initial weights and the same data for a seed. jobs.py says how runs are made; each finished run is a file in
``--output``. At the end comes a table of all runs there.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

import torch
from corpus import Corpus
from jobs import Run, add_options, carry_out, parse_configs, parser_of, settings_of
from markdown_tables import aligned
from muon_table import NAMES, table
from muon_training import MuonSettings, train_and_count
from result_files import Result, Row
from training import Settings


def parse(given: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--lr", type=float, default=1e-3, help="of AdamW")
    parser.add_argument("--muon-lr", type=float, default=0.02, help="of Muon")
    add_options(parser, Path("runs/muon"))
    return parse_configs(parser, NAMES, given)


def report(_: Path, results: list[Result], settings: Settings) -> None:
    """Print a table of the runs with these settings."""
    print(f"\n{aligned(table([result for result in results if result['arguments'] == asdict(settings)]))}")


def train_run(run: Run, corpus: Corpus, device: torch.device) -> Row:
    """Train a run. Collective."""
    assert isinstance(run.settings, MuonSettings)
    return train_and_count(run.settings, run.name, run.seed, corpus, device)


def main(given: list[str]) -> None:
    """Train and report, or be one rank of a job."""
    arguments = parse(given)

    def runs(sha256: str) -> list[Run]:
        settings = settings_of(arguments, sha256, MuonSettings)
        return [Run(name, seed, settings, name) for seed in arguments.seeds for name in arguments.configs]

    carry_out(arguments, runs, report, train_run)
