"""Options of the command ``bench``."""

from __future__ import annotations

import argparse
from pathlib import Path

from fsdp_zpp.config.levels import LEGAL_LEVELS
from fsdp_zpp.planner.config import whole

from .contenders import ALONE, BASES, NAMES_ON_NODES, Contender, contender

_SHOWN = [name for name in NAMES_ON_NODES if not name.endswith(LEGAL_LEVELS)]
_AT_LEAST = {
    "lora": 1,
    "micro_batch": 1,
    "micro_batches": 1,
    "sequence": 1,
    "steps": 2,
    "warmup": 1,
    "gpus_per_node": 1,
}
"""Options that are whole numbers, and the least of each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    _add_model(parser.add_argument_group("model"))
    _add_work(parser.add_argument_group("work of a step"))
    _add_measurement(parser.add_argument_group("measurement"))
    report = parser.add_argument_group("report")
    report.add_argument("--json", type=Path, metavar="FILE", help="write all figures, after each strategy")
    report.add_argument("--chart", type=Path, metavar="FILE", help="draw step times and peak memory: bench.svg or .png")


def _add_model(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--model",
        required=True,
        metavar="CONFIG",
        help="a config.json, a directory that has one, or a name on the Hugging Face hub; weights are random",
    )
    add(
        "--lora",
        type=float,
        metavar="RANK",
        help="train adapters of this rank on q, k, v and o of attention (on all layers if the model has none of these "
        "names); the base is frozen, in bf16 (default: train the whole model)",
    )
    add(
        "--frozen",
        choices=BASES,
        help="with --lora: the only codec of a quantized base to try (default: all that can be made here)",
    )
    add("--checkpointing", action="store_true", help="recompute the activations of each layer")
    add("--compile", action="store_true", help="torch.compile each layer")


def _add_work(group: argparse._ArgumentGroup) -> None:
    for name, default, what in (
        ("micro-batch", 1, "sequences on one GPU in a micro-batch"),
        ("micro-batches", 1, "micro-batches in an optimizer step, all but the last without synchronization"),
        ("sequence", 1024, "tokens of a sequence"),
    ):
        group.add_argument(f"--{name}", type=float, default=default, metavar="N", help=f"{what} (default: {default})")


def _add_measurement(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--gpus-per-node",
        type=float,
        metavar="N",
        help="ranks that share fast links, as in Strategy (default: as the machine is)",
    )
    add(
        "--strategies",
        metavar="NAMES",
        help=f"the only strategies to try, separated by commas: {', '.join(_SHOWN)}; IIG: these scopes without codecs; "
        "zeropp-IIG: with those of zeropp. Prefix fsdp1: uses FullyShardedDataParallel; suffix "
        f"{ALONE} counts each GPU as a node (not for torch's own); once-...: the base is quantized and the model "
        "wrapped once; mixzpp wraps each layer (default: those that may pay)",
    )
    add("--steps", type=float, default=8, metavar="N", help="timed steps of each strategy (default: 8)")
    add("--warmup", type=float, default=3, metavar="N", help="steps before them (default: 3)")


def check(arguments: argparse.Namespace) -> None:
    """Check parsed options, and make whole numbers ints.

    Raises:
        ValueError: If one is out of range, or goes with another that is missing.
    """
    for name, least in _AT_LEAST.items():
        if (value := getattr(arguments, name)) is not None:
            setattr(arguments, name, whole(f"--{name.replace('_', '-')}", value, least))
    if arguments.frozen is not None and arguments.lora is None:
        raise ValueError(f"--frozen {arguments.frozen} quantizes a frozen base, which --lora has; add --lora 16, say")


def named_contenders(names: str, gpus_per_node: int | None, lora: bool) -> list[Contender]:
    """Return the contenders of names that commas separate.

    Args:
        names: The names.
        gpus_per_node: Ranks of a node that each strategy is told, unless its name says another number; None tells none.
        lora: Whether there is a frozen base.

    Raises:
        ValueError: If there is none of a name, or it is for a frozen base and there is none.
        ModuleNotFoundError: If one needs a package that is not installed.
    """
    found = []
    for name in names.split(","):
        own = name.removeprefix("fsdp1:")
        one = contender(own, fsdp2=own == name, called=name)
        if not lora and (one.base is not None or one.arguments.get("frozen") or one.preset == "mixzpp"):
            raise ValueError(f"--strategies {name} is for a frozen base, which --lora has; add --lora 16, say")
        is_told = gpus_per_node is None or "gpus_per_node" in one.arguments
        found.append(one if is_told else one.on_nodes_of(gpus_per_node or 1))
    return found
