"""``python -m fsdp_zpp bench``."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import Any

from fsdp_zpp.collectives.agreement import run_on_first_rank
from fsdp_zpp.planner.table import aligned

from .arguments import add_arguments, check, named_contenders
from .chart import check_format, draw_steps
from .columns import filled, of_a_run
from .job import is_rank_zero, joined
from .models import load_config
from .result_file import check_writable
from .run import Findings, measure_all

NOTHING_MEASURED = 1

EXAMPLE = (
    "torchrun --nproc-per-node 8 -m fsdp_zpp bench --model config.json --micro-batch 2 --json bench.json "
    "--chart bench.svg"
)


def add_bench(subparsers: argparse._SubParsersAction[Any], formatter: Any) -> None:
    """Add the subcommand ``bench``."""
    parser = subparsers.add_parser(
        "bench",
        usage="torchrun [options] -m fsdp_zpp bench [options]",
        formatter_class=formatter,
        help="under torchrun: step time of your model under each strategy, and which to use",
        description="Measure the links of the running job and some steps of your model under torch's FULL_SHARD, HSDP "
        "and the strategies that may pay, and say which to use. Run it under torchrun, one process a GPU.",
        epilog=f"Example: {EXAMPLE}. Exit status: 0 if something was measured, {NOTHING_MEASURED} if nothing was, 2 "
        "for errors.",
    )
    add_arguments(parser)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, report and return the exit status. Rank 0 alone reports."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger(__package__).setLevel(logging.INFO)
    try:
        check(arguments)
        if arguments.strategies is not None:  # names are checked before the hub is asked for a model
            named_contenders(arguments.strategies, arguments.gpus_per_node, arguments.lora is not None)
        config = load_config(arguments.model)
        _check_sequence(arguments.sequence, config)
        if arguments.chart is not None:
            check_format(arguments.chart)  # now, not after minutes of measurements
        with joined() as place:
            run_on_first_rank(lambda: _check_files(arguments))
            findings = measure_all(arguments, config, place)
            if arguments.chart is not None and findings.recommendation.strategy is not None:
                run_on_first_rank(lambda: draw_steps(findings.rows, arguments.chart))
    # These are errors of the arguments; anything else is a bug and keeps its traceback.
    except (ValueError, TypeError, ModuleNotFoundError, OSError) as error:
        # All ranks have the same arguments and so the same error; one message is enough.
        if is_rank_zero():
            arguments.parser.error(str(error))
        return 2
    if is_rank_zero():
        _report(findings, arguments)
    return 0 if findings.recommendation.strategy is not None else NOTHING_MEASURED


def _check_files(arguments: argparse.Namespace) -> None:
    """Raise if a result could not be written after minutes of measurements."""
    for option in ("json", "chart"):
        if (path := getattr(arguments, option)) is not None:
            check_writable(f"--{option}", path)


def _check_sequence(sequence: int, config: Any) -> None:
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if most is not None and sequence > most:
        raise ValueError(f"--sequence must be at most {most:,}, the positions that the model has, got {sequence:,}")


def _report(findings: Findings, arguments: argparse.Namespace) -> None:
    cells = filled(findings.rows, of_a_run(findings.rows))
    print("\n".join(findings.links.lines()), end="\n\n")
    print("\n".join(aligned([tuple(cells), *zip(*cells.values(), strict=True)], names=1)))
    if any(row.get("sent_is_planned") for row in findings.rows):
        print("~: torch's own collectives are not counted; planned, as if every byte went to each rank by itself")
    print("", *findings.notes, findings.recommendation.line, sep="\n")
    for path in filter(None, (arguments.json, arguments.chart)):
        print(f"wrote {path}", file=sys.stderr)
