"""Options of the training example: every default is resolved and every contradiction found here."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from train_arguments import DEVICE_DEFAULTS, FULL_SHARD, make_parser

from fsdp_zpp import Int4, Int4Delta, Int8, Strategy
from fsdp_zpp.codecs import Codec

CODECS = {"int8": Int8, "int4": Int4, "int4delta": Int4Delta}


@dataclass(frozen=True)
class Run:
    """One training run: its name in the report and its strategy, None for torch's own FULL_SHARD."""

    label: str
    strategy: Strategy | None


@dataclass(frozen=True)
class Options:
    """The command line, with all defaults resolved."""

    run: Run
    compare: bool
    fsdp2: bool
    world: int
    gpus_per_node: int
    device: str
    precision: str
    data: tuple[Path, ...]
    tokenizer: str
    vocab: int
    validation: float
    hidden: int
    layers: int
    heads: int
    sequence: int
    activation_checkpointing: bool
    batch: int
    micro_batches: int
    steps: int
    stop_at: int
    lr: float
    warmup: int
    clip: float
    seed: int
    log_every: int
    eval_every: int
    eval_batches: int
    output: Path
    save: Path
    save_every: int
    resume: Path | None

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.world // self.gpus_per_node

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs to do, in order."""
        return (Run(FULL_SHARD, None), self.run) if self.compare else (self.run,)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step sees, over all ranks."""
        return self.world * self.micro_batches * self.batch * self.sequence


def parse_options(arguments: list[str] | None = None) -> Options:
    """Parse the command line; exits with a message if it is contradictory or torchrun is missing."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    if "WORLD_SIZE" not in os.environ:
        sys.exit(
            f"train.py runs as one process per device; start it with: torchrun --nproc-per-node 4 {' '.join(sys.argv)}"
        )
    world = int(os.environ["WORLD_SIZE"])
    try:
        _resolve_defaults(args, world)
        _check(args, world)
        run = _run(args)
    except ValueError as error:
        parser.error(str(error))
    del args.strategy, args.levels, args.weights, args.gradients
    args.data = tuple(args.data)
    return Options(run=run, world=world, **vars(args))


def _resolve_defaults(args: argparse.Namespace, world: int) -> None:
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    for name, (cpu, cuda) in DEVICE_DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, cuda if args.device == "cuda" else cpu)
    args.gpus_per_node = args.gpus_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", world))
    args.stop_at = args.steps if args.stop_at is None else args.stop_at
    args.warmup = math.ceil(args.steps / 5) if args.warmup is None else args.warmup
    args.eval_every = math.ceil(args.steps / 10) if args.eval_every is None else args.eval_every
    args.save = args.save or args.output / "checkpoint"
    if args.tokenizer == "byte" and args.vocab is not None:
        raise ValueError("--vocab is the size of a BPE vocabulary; give --tokenizer bpe with it")
    args.vocab = args.vocab or (256 if args.tokenizer == "byte" else 4096)


def _check(args: argparse.Namespace, world: int) -> None:
    if args.device == "cuda" and torch.cuda.device_count() <= int(os.environ.get("LOCAL_RANK", 0)):
        raise ValueError(f"--device cuda needs a GPU per process; this machine has {torch.cuda.device_count()}")
    if world % args.gpus_per_node:
        raise ValueError(f"--gpus-per-node {args.gpus_per_node} does not divide the {world} processes")
    if args.hidden % args.heads or args.hidden // args.heads % 2:
        raise ValueError(f"--hidden {args.hidden} must be an even multiple of --heads {args.heads}")
    if not 0 < args.stop_at <= args.steps:
        raise ValueError(f"--stop-at {args.stop_at} must lie between 1 and --steps {args.steps}")
    if args.resume and args.compare:
        raise ValueError("--compare starts both runs from the same weights, and a checkpoint is of one; drop --resume")
    if args.resume and not (args.resume / ".metadata").exists():
        raise ValueError(f"--resume {args.resume} holds no checkpoint")
    if args.tokenizer == "bpe" and args.vocab < 260:
        raise ValueError(f"--vocab {args.vocab} is too small: BPE starts from the 256 bytes")
    if not 0 < args.validation < 1:
        raise ValueError(f"--validation {args.validation} must be a share between 0 and 1")
    if missing := [str(path) for path in args.data if not path.exists()]:
        raise ValueError(f"--data {' '.join(missing)} does not exist")


def _run(args: argparse.Namespace) -> Run:
    """The run that ``--strategy`` and its parts describe."""
    parts = {name: getattr(args, name) for name in ("levels", "weights", "gradients")}
    given = {name: value for name, value in parts.items() if value is not None}
    codecs = {name: _codec(name, value) for name, value in given.items() if name != "levels"}
    overrides: dict[str, Any] = ({"levels": args.levels} if args.levels else {}) | codecs
    if args.strategy == FULL_SHARD:
        if given:
            raise ValueError(f"--strategy full_shard is torch's own and takes no --{', --'.join(given)}")
        if args.compare:
            raise ValueError("--compare sets a strategy against full_shard; give another --strategy")
        return Run(FULL_SHARD, None)
    if args.strategy is None and given and args.levels is None:
        raise ValueError(f"--{next(iter(given))} needs --levels, or a --strategy that it changes")
    if args.strategy is None and given:
        strategy = Strategy(**overrides, gpus_per_node=args.gpus_per_node)
        return Run(" ".join(f"{name} {value}" for name, value in given.items()), strategy)
    preset = args.strategy or "zeropp"
    strategy = replace(getattr(Strategy, preset)(gpus_per_node=args.gpus_per_node), **overrides)
    return Run(" ".join([preset, *(f"{name} {value}" for name, value in given.items())]), strategy)


def _codec(name: str, text: str) -> Codec | None:
    if text == "none":
        return None
    codec = codec_from(text, CODECS)
    if codec is None:
        raise ValueError(f"--{name} {text} is none of: none, int8, int4, int8:BLOCK, int4:BLOCK")
    return codec


def codec_from(text: str, kinds: Mapping[str, Callable[..., Codec]]) -> Codec | None:
    """The codec of one of these ``kinds``, or with a block, as in ``int8:256``; None if it is none of them."""
    kind, _, block = text.partition(":")
    if kind not in kinds or (":" in text and not block.isdecimal()):
        return None
    return kinds[kind](int(block)) if block else kinds[kind]()
