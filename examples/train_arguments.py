"""Command line of the training example: what can be chosen, and what the help says about it."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

FULL_SHARD = "full_shard"
PRESETS = ("zeropp", "loco", "zero3")

# A CPU run has to learn something in a minute on two cores; a GPU run has to be worth sharding.
DEVICE_DEFAULTS: dict[str, tuple[Any, Any]] = {  # name: (cpu, cuda)
    "precision": ("fp32", "bf16"),
    "hidden": (128, 1024),
    "layers": (2, 16),
    "heads": (4, 16),
    "sequence": (128, 1024),
    "batch": (4, 8),
    "lr": (1.5e-3, 4e-4),
    "eval_batches": (16, 4),
}


class _RankZeroParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # All ranks see the same mistake; one message is enough.
        if os.environ.get("RANK", "0") == "0":
            super().error(message)
        sys.exit(2)


def make_parser() -> argparse.ArgumentParser:
    """The parser; its errors are printed once, not by every rank."""
    parser = _RankZeroParser(
        prog="train.py",
        usage="torchrun --nproc-per-node N examples/train.py [options]",
        description="Train a Llama on real text under FSDP with a ZeRO++ sharding strategy, and set it "
        "against FSDP's own FULL_SHARD: loss, speed, memory, bytes between nodes.",
        epilog="Two nodes of two on one machine: torchrun --nproc-per-node 4 examples/train.py "
        "--gpus-per-node 2 --strategy zeropp --compare",
        formatter_class=partial(argparse.HelpFormatter, max_help_position=28, width=100),
    )
    _add_strategy(parser.add_argument_group("strategy"))
    _add_model_and_data(parser.add_argument_group("model and data"))
    _add_training(parser.add_argument_group("training"))
    _add_report(parser.add_argument_group("evaluation, checkpoints, report"))
    return parser


def _add_strategy(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--strategy",
        choices=(FULL_SHARD, *PRESETS),
        metavar="NAME",
        help=f"{', '.join(PRESETS)}; or full_shard, torch's own (default: zeropp, unless --levels describes another)",
    )
    add(
        "--levels",
        metavar="XYZ",
        help="letters for parameters, gradients, optimizer state: N replicated, I sharded inside a node, G "
        "sharded over all ranks; alone it means full precision, with --strategy it changes the preset",
    )
    add(
        "--weights", metavar="CODEC", help="of their all-gather: none, int8, int4, int4delta, or with a block, int8:256"
    )
    add("--gradients", metavar="CODEC", help="of their reduction between nodes, likewise")
    add(
        "--gpus-per-node",
        type=_positive,
        metavar="N",
        help="consecutive ranks that count as a node (default: as many as torchrun started on a machine)",
    )
    add("--fsdp2", action="store_true", help="shard with fully_shard instead of FullyShardedDataParallel")
    add("--compare", action="store_true", help="also run full_shard, with the same seed and data")


def _add_model_and_data(group: argparse._ArgumentGroup) -> None:
    add, count = group.add_argument, partial(group.add_argument, type=_positive, metavar="N")
    add(
        "--data",
        type=Path,
        nargs="+",
        default=[],
        metavar="PATH",
        help="files or folders of text (default: the source of Python's standard library)",
    )
    add(
        "--tokenizer",
        choices=("byte", "bpe"),
        default="byte",
        help="bpe is trained on the text (default: byte)",
    )
    count("--vocab", help="size of the BPE vocabulary (default: 4096)")
    add("--validation", type=float, default=0.02, metavar="X", help="share held out, the end (default: 0.02)")
    count("--hidden", help=f"size of the hidden state {_by_device('hidden')}")
    count("--layers", help=f"decoder layers {_by_device('layers')}")
    count("--heads", help=f"attention heads {_by_device('heads')}")
    count("--sequence", help=f"tokens in a sequence {_by_device('sequence')}")
    add("--activation-checkpointing", action="store_true", help="recompute each layer in backward")


def _add_training(group: argparse._ArgumentGroup) -> None:
    add, count = group.add_argument, partial(group.add_argument, type=_positive, metavar="N")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    add("--precision", choices=("bf16", "fp32"), help=f"of the computation {_by_device('precision')}")
    count("--batch", help=f"sequences of a rank in a micro-batch {_by_device('batch')}")
    count("--micro-batches", default=1, help="accumulated in an optimizer step (default: 1)")
    count("--steps", default=300, help="optimizer steps of the learning rate schedule (default: 300)")
    count("--stop-at", help="stop at this step, to go on with --resume (default: the last)")
    add("--lr", type=float, metavar="X", help=f"peak learning rate {_by_device('lr')}")
    add("--warmup", type=_not_negative, metavar="N", help="steps of linear warmup (default: a fifth of --steps)")
    add("--clip", type=float, default=1.0, metavar="X", help="largest gradient norm (default: 1.0)")
    add("--seed", type=_not_negative, default=0, metavar="N", help="of weights and data order (default: 0)")


def _add_report(group: argparse._ArgumentGroup) -> None:
    add, count = group.add_argument, partial(group.add_argument, type=_positive, metavar="N")
    folder = partial(group.add_argument, type=Path, metavar="DIR")
    count("--log-every", default=10, help="steps (default: 10)")
    count("--eval-every", help="steps (default: a tenth of --steps)")
    count("--eval-batches", help=f"batches of a rank in an evaluation {_by_device('eval_batches')}")
    folder("--output", default=Path("runs/train"), help="of loss.png and result.json (default: runs/train)")
    folder("--save", help="of the checkpoint; not written for --compare's run (default: OUTPUT/checkpoint)")
    add("--save-every", type=_not_negative, default=0, metavar="N", help="steps (default: at the end only)")
    folder("--resume", help="checkpoint to go on from; not with --compare")


def _by_device(name: str) -> str:
    cpu, cuda = DEVICE_DEFAULTS[name]
    return f"(default: {cpu} on CPU, {cuda} on GPU)"


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _not_negative(text: str) -> int:
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value
