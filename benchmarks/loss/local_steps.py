"""Validation loss of nodes that train on their own and exchange weights every few steps, beside synchronous training.

    python benchmarks/loss/run.py local-steps --nodes 2 --gpus 1 --seeds 0 --configs full_shard,local32:int4+loco \\
        --lr 5e-4,1e-3,2e-3                                           # which learning rate suits
    python benchmarks/loss/run.py local-steps --nodes 2 --gpus 1 --configs full_shard@1e-3,local32:int4+loco@1e-3

All see the same tokens, in the same steps, from the same weights. The learning rate must be tuned for each, since local
steps train on the batch of a node: a configuration (configurations.py) is trained with all of ``--lr``, or with the one
after an ``@``. The one model that nodes agree on is validated (training.py). jobs.py says how runs are made; each
finished run is a file in ``--output``, for any number of nodes. At the end come tables of all there.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from configurations import local_steps
from jobs import Run, add_options, carry_out, parser_of, settings_of
from markdown_tables import aligned
from result_files import Result
from tables import LOCAL_NAMES, REFERENCE, by_nodes, comparable, learning_rates, local_steps as table
from training import Settings

BATCH = 32
"""Sequences of a step, on all nodes together."""


def parse(given: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--configs", default=",".join(LOCAL_NAMES), help="NAME[@LR], in this order; default: all")
    parser.add_argument("--lr", default="1e-3", help="learning rates of configurations that name none")
    add_options(parser, Path("runs/local-steps"))
    # 3,072 steps, which all of 8, 32 and 128 divide.
    parser.set_defaults(gpus_per_node=1, batch=None, tokens=3072 * BATCH * 512, validate_every=512)
    arguments = parser.parse_args(given)
    if arguments.batch is None:
        arguments.batch = max(1, BATCH // (arguments.nodes * arguments.gpus_per_node))
    try:
        arguments.configs = configurations(arguments.configs, [float(lr) for lr in arguments.lr.split(",")])
    except ValueError as error:
        parser.error(str(error))
    return arguments


def configurations(given: str, rates: list[float]) -> list[tuple[str, float]]:
    """Return the configurations to train, each with its learning rate.

    Args:
        given: Names with commas between them, each with a learning rate after an ``@`` or without.
        rates: Learning rates of the names without.

    Raises:
        ValueError: If one is unknown.
    """
    pairs = []
    for each in given.split(","):
        name, _, rate = each.partition("@")
        if name != REFERENCE:
            local_steps(name)
        pairs += [(name, float(lr)) for lr in ([rate] if rate else rates)]
    return pairs


def report(_: Path, results: list[Result], settings: Settings) -> None:
    """Print the tables of runs with these settings."""
    wanted = comparable(asdict(settings))
    results = [result for result in results if comparable(result["arguments"]) == wanted]
    if not results:
        return
    print(f"\n{aligned(table(results))}")
    if any(len(tried) > 1 for tuned in by_nodes(results).values() for tried in tuned.tried.values()):
        print(f"\n{aligned(learning_rates(results))}")


def main(given: list[str]) -> None:
    """Train and report, or be one rank of a job."""
    arguments = parse(given)

    def runs(sha256: str) -> list[Run]:
        layout = f"{arguments.nodes}x{arguments.gpus_per_node}"
        return [
            Run(name, seed, settings_of(arguments, sha256, lr=lr), f"{layout}-{name}-lr{lr:g}")
            for name, lr in arguments.configs
            for seed in arguments.seeds
        ]

    carry_out(arguments, runs, report)
