"""Training of examples/train.py under strategies and under torch's FULL_SHARD: loss, time, memory, bytes.

    python benchmarks/loss/run.py compare --strategy zeropp

takes all GPUs, or four processes without one, as two nodes with slow links between them. Under torchrun it
takes what it is given, and slows down nothing. Runs have the same initial weights and the same data, and are made one
after the other. Writes ``result.json`` and ``loss.png`` to ``--output``, and prints a table.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import train
from figures import draw_losses
from manifest import manifest
from markdown_tables import aligned
from nodes import STARTED_BY, command, join, run_on_emulated_nodes
from result_files import Row
from sent_bytes import full_shard_sends
from tables import comparison, gain
from throttle import NoThrottleError, per_node
from torch import Tensor, nn

from fsdp_zpp import Strategy, traffic
from fsdp_zpp.bench.results import write
from fsdp_zpp.planner.cli import codec

HOPS = ("inter", "intra")
WINDOW = 10
"""Steps between two looks at the clock, for which the GPU is waited for."""


@dataclass(frozen=True)
class Text:
    """Tokens to train on and, from the end of the same text, to validate with."""

    training: Tensor
    held_out: Tensor


def main(arguments: list[str]) -> None:
    """Compare and report."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.resume or options.stop_at:
        parser.error("--resume and --stop-at are for one run, as examples/train.py makes it; here several are compared")
    try:
        strategies = labelled_strategies(options)
    except ValueError as error:
        parser.error(str(error))
    if "RANK" not in os.environ:
        start(options.gpus_per_node, options.gbps)
        return
    options.gbps = throttled_to()
    device = join("cuda" if torch.cuda.is_available() else "cpu")
    tokens = train.load_text(options.data, device)
    held_out = len(tokens) // 50
    if held_out <= options.sequence:
        raise SystemExit(f"a text of {len(tokens)} bytes is too short: a fiftieth must hold {options.sequence + 1}")
    text = Text(tokens[:-held_out], tokens[-held_out:])
    # FULL_SHARD goes last: a strategy that refuses an option does so before FULL_SHARD has run for nothing.
    strategies.append((f"{prefix(options)}full_shard", None))
    *others, full_shard = [measure(*each, options, text, device) for each in strategies]
    if dist.get_rank() == 0:
        report([full_shard, *others], options, text)
    dist.destroy_process_group()


def make_parser() -> argparse.ArgumentParser:
    """Make a parser of the options of examples/train.py, and of those that change its strategy."""
    parser = train.make_parser(__doc__)
    if not torch.cuda.is_available():
        parser.set_defaults(steps=150)  # two runs in two minutes on two cores
    parser.add_argument("--levels", nargs="+", metavar="XYZ", help="scopes instead of the strategy's; each is compared")
    for name in ("weights", "gradients"):
        parser.add_argument(f"--{name}", help="codec instead of the strategy's: none, int8, int4:256, ...")
    add_gbps(parser)
    return parser


def labelled_strategies(options: argparse.Namespace) -> list[tuple[str, Strategy | None]]:
    """Return the strategies on the command line, each after its name in tables.

    Raises:
        ValueError: If there is nothing to set against FULL_SHARD, or a name, scopes or a codec is unknown.
    """
    base = train.make_strategy(options.strategy, options.gpus_per_node)
    if base is None:
        raise ValueError("--strategy full_shard is what others are compared with; give another")
    changes: dict[str, Any] = {}
    label = prefix(options) + options.strategy
    for name in ("weights", "gradients"):
        if text := getattr(options, name):
            changes[name] = parse_codec(name, text)
            label += f" {name} {text}"
    if not options.levels:
        return [(label, dataclasses.replace(base, **changes))]
    return [(f"{label} {levels}", dataclasses.replace(base, levels=levels, **changes)) for levels in options.levels]


def prefix(options: argparse.Namespace) -> str:
    """Return the prefix of the names of strategies under ``fully_shard``."""
    return "fsdp2:" if options.fsdp2 else ""


def parse_codec(name: str, text: str) -> Any:
    """Parse a codec by its name on the planner's command line.

    Raises:
        ValueError: If there is none.
    """
    try:
        return codec(text)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--{name}: {error}") from None


def measure(
    label: str, strategy: Strategy | None, options: argparse.Namespace, text: Text, device: torch.device
) -> Row:
    """Train once, under torch's FULL_SHARD if ``strategy`` is None, and free all but the figures. Collective."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    model = train.make_model(options)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    gpus_per_node = options.gpus_per_node or int(os.environ["LOCAL_WORLD_SIZE"])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    nodes = dist.get_world_size() // gpus_per_node
    full_shard_sent = full_shard_sends(model, nodes, gpus_per_node, dtype, options.micro_batches)
    model = train.shard(model, strategy, options.fsdp2, device)
    log = run_steps(model, label, strategy, options, text)
    result = {
        "label": label,
        "strategy": str(strategy or "torch's ShardingStrategy.FULL_SHARD"),
        "parameters": parameters,
        "losses": log.losses,
        "validation": log.validation,
        # The first window pays for allocation and compilation.
        "step_seconds": median(log.seconds[1:] or log.seconds),
        "tokens_per_step": dist.get_world_size() * options.micro_batches * options.batch * options.sequence,
        "peak_memory": peak_memory(device),
        "sent_per_step": log.sent_per_step if strategy else full_shard_sent,
    }
    del model
    gc.collect()  # modules of FSDP refer to each other in circles
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


@dataclass
class Log:
    """Training losses, validation losses by step, seconds a step by window, and bytes by step of a run."""

    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    sent: list[dict[str, int]] = field(default_factory=list)

    @property
    def sent_per_step(self) -> dict[str, int]:
        """Return the median over steps, by hop."""
        return {hop: int(median(step[hop] for step in self.sent)) for hop in HOPS}


def run_steps(model: Any, label: str, strategy: Strategy | None, options: argparse.Namespace, text: Text) -> Log:
    """Train from the first step to the last. Collective."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    log, pending, validated = Log(), [], False
    since = time.perf_counter()
    for done in range(1, options.steps + 1):
        before = sent_by(model, strategy)
        pending.append(train.train_step(model, optimizer, text.training, done - 1, options))
        # A step right after a validation finds the weights that this has gathered, and sends less.
        if not validated:
            log.sent.append({hop: now - before[hop] for hop, now in sent_by(model, strategy).items()})
        validated = done == options.steps or done % math.ceil(options.steps / 10) == 0
        if validated or done % WINDOW == 0:
            log.losses += torch.stack(pending).tolist()
            log.seconds.append((time.perf_counter() - since) / len(pending))
            if validated:
                log.validation.append((done, validate(model, text.held_out, options)))
                losses = f"loss {log.losses[-1]:.4f}, validation {log.validation[-1][1]:.4f}"
                say(f"{label}: step {done} of {options.steps}, {losses}")
            pending, since = [], time.perf_counter()
    return log


@torch.no_grad()
def validate(model: nn.Module, tokens: Tensor, options: argparse.Namespace) -> float:
    """Return the mean loss of sequences spread evenly over ``tokens``. Collective."""
    model.eval()
    shape = (16, dist.get_world_size(), options.batch)
    starts = torch.linspace(0, len(tokens) - options.sequence - 1, math.prod(shape)).long().view(shape)
    mine = starts[:, dist.get_rank()]
    loss = torch.stack([train.loss_of(model, tokens, part, options.sequence) for part in mine]).mean()
    model.train()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def sent_by(model: nn.Module, strategy: Strategy | None) -> dict[str, int]:
    """Return the bytes that this rank has sent so far, by hop."""
    kinds = traffic(model).values() if strategy else ()
    return {hop: sum(sent[hop] for sent in kinds) for hop in HOPS}


def peak_memory(device: torch.device) -> int | None:
    """Return the largest peak of all ranks' memory on the GPU, in bytes; None on a CPU. Collective."""
    if device.type == "cpu":
        return None
    peak = torch.tensor(torch.cuda.max_memory_allocated(device), device=device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return int(peak)


def report(rows: list[Row], options: argparse.Namespace, text: Text) -> None:
    """Print a table, and write the figure and the result."""
    torchrun = ["torchrun", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"], *sys.argv]
    lengths = {"training_bytes": len(text.training), "held_out_bytes": len(text.held_out)}
    folder = Path(options.output)
    made_by, ranks = manifest(command() if STARTED_BY in os.environ else torchrun), dist.get_world_size()
    write(folder / "result.json", made_by, options, rows, ranks=ranks, text=lengths)
    draw_losses(rows, folder / "loss.png")
    print(aligned(comparison(rows)))
    print("Bytes are what one rank sends in a step; FULL_SHARD's are counted, not measured: the fewest that do.")
    links = f"links of {options.gbps:g} Gbit/s between nodes" if options.gbps else "links that are not throttled"
    print(f"\nOver {options.steps} steps, on {links}:")
    print("\n".join(f"- {gain(row, rows[0])}" for row in rows[1:]))
    print(f"Wrote loss.png and result.json to {folder}")


def say(line: str) -> None:
    """Print, once for all ranks."""
    if dist.get_rank() == 0:
        print(line, flush=True)


# ---- slow links between nodes

RANKS_ON_CPU = 4


def add_gbps(parser: argparse.ArgumentParser) -> None:
    """Add the option that says how slow links are."""
    default = 25.0 if torch.cuda.is_available() else 0.25
    text = f"Gbit/s that a node sends to others at most, unless torchrun starts this; 0: no limit (default: {default})"
    parser.add_argument("--gbps", type=float, default=default, help=text)


def throttled_to() -> float | None:
    """Return the Gbit/s that this rank's node sends to others at most; None if there is no limit."""
    gbps = os.environ.get("THROTTLE_GBPS")
    return float(gbps) if gbps else None


def start(gpus_per_node: int | None, gbps: float) -> None:
    """Start this script again, on all ranks, and wait for them. Exits if a rank fails.

    Args:
        gpus_per_node: Ranks of a node; by default half of all, if their number is even.
        gbps: Gbit/s that a node sends to others at most; 0 for no limit.
    """
    gpus = torch.cuda.device_count()
    ranks = gpus or RANKS_ON_CPU
    of_node = gpus_per_node or (ranks // 2 if ranks > 1 and ranks % 2 == 0 else ranks)
    nodes = max(1, ranks // of_node)
    os.environ |= slow_links(nodes, of_node, gbps)
    os.environ[STARTED_BY] = json.dumps(sys.argv)
    command = [*sys.argv, f"--gpus-per-node={of_node}"]
    if gpus:
        try:
            run_on_emulated_nodes(nodes, of_node, command)
        except RuntimeError as error:
            sys.exit(str(error))
        return
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    sys.exit(subprocess.run([*torchrun, *command], check=False).returncode)


def slow_links(nodes: int, of_node: int, gbps: float) -> dict[str, str]:
    """Return the variables that make links slow, and print how slow they are, or why they are not."""
    if nodes == 1:
        print(f"One node of {of_node}: no link between nodes, and so nothing to throttle", flush=True)
        return {}
    reason = "--gbps 0" if gbps <= 0 else ""
    try:
        variables = {} if reason else per_node(gbps, nodes, of_node)
    except NoThrottleError as error:
        variables, reason = {}, str(error)
    how = f"not throttled: {reason}" if reason else f"throttled to {gbps:g} Gbit/s a node (common/throttle.c)"
    print(f"{nodes} nodes of {of_node}; links between them are {how}", flush=True)
    return variables
