"""CPU time, collectives and process groups of a step as the world grows, up to a thousand ranks and more, on one CPU.

    python benchmarks/scale.py --worlds 16,64,256,1024

One rank runs in torch's fake process group, whose collectives send nothing, so what is left is what every rank's CPU
must do for a step. A unit has the same number of values on every world, and they divide evenly, so the work on tensors
is the same. Codecs (on GPUs, kernel launches; here, the PyTorch reference) and collectives (here, copies that the fake
group makes for every rank) are timed apart: what is left is Python's and torch's own time around them, and how many
functions are called, which a busy machine does not change. Each case has a process of its own. Writes a Markdown table
and JSON with machine and versions to ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which torch would import in the midst of what is timed
import torch.distributed as dist
from clock import Clock
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_zpp import Strategy, fully_shard, traffic
from fsdp_zpp.codecs import Blockwise, FullPrecision

ROWS, WIDTH = 1024, 64  # one row of each matrix a rank at 1,024 ranks; of four rows, one block of 256 values
COLLECTIVES = (
    "all_gather",
    "all_gather_single",
    "all_gather_into_tensor",
    "all_to_all_single",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "all_reduce",
)
CODEC_METHODS = (
    "encode",
    "decode",
    "decode_sum",
    "decode_sum_encode",
    "encode_corrected",
    "decode_sum_encode_corrected",
)
HEADINGS = (
    "adapter",
    "strategy",
    "ranks",
    "collectives a unit and step",
    "calls of functions around them and codecs, a unit",
    "their CPU time, ms a unit (fastest step)",
    "codecs, ms a unit",
    "fake collectives, ms a unit",
    "sent between nodes, kB a unit",
    "inside, kB a unit",
    "groups of a rank",
    "wrapping, ms",
    "of that making groups, ms (calls)",
    "first step, ms",
)
STRATEGIES: dict[str, Callable[[], Strategy] | None] = {
    "stock": None,
    "GGG": Strategy,
    "zeropp": Strategy.zeropp,
    "loco": Strategy.loco,
}


class Block(nn.Module):
    """Four matrices side by side, like those of an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ModuleList(nn.Linear(WIDTH, ROWS, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = sum(matrix(x) for matrix in self.matrices)  # type: ignore[assignment]
        return x + mixed.unflatten(-1, (-1, WIDTH)).mean(-2)


def watch() -> Clock:
    """A clock on collectives, codecs, and the making of process groups."""
    clock = Clock()
    for name in COLLECTIVES:
        if hasattr(dist, name):
            clock.wrap(dist, name, "collectives")
    for codec in (Blockwise, FullPrecision):
        for name in CODEC_METHODS:
            clock.wrap(codec, name, "codecs")
    for name in ("new_group", "split_group"):
        clock.wrap(dist, name, "groups")
    return clock


def join_fake_world(world: int, gpus_per_node: int) -> None:
    """Be rank 0 of ``world``, as torchrun would have it."""
    os.environ |= {"LOCAL_WORLD_SIZE": str(gpus_per_node), "GROUP_WORLD_SIZE": str(world // gpus_per_node)}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)


def build(adapter: str, strategy: str, blocks: int) -> nn.Module:
    """A model of ``blocks`` units."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(blocks)))
    make = STRATEGIES[strategy]
    if adapter == "fsdp1":
        return FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy.FULL_SHARD if make is None else make(),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    for module in (*model, model):
        if make is None:
            torch_fully_shard(module)
        else:
            fully_shard(module, strategy=make())
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """One optimizer step."""
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def around(seconds: float, clock: Clock) -> float:
    """What of a time is neither in codecs nor in collectives, in ms."""
    return (seconds - clock.seconds["codecs"] - clock.seconds["collectives"]) * 1e3


def measure(
    world: int, adapter: str, strategy: str, gpus_per_node: int = 8, blocks: int = 24, steps: int = 10, warmup: int = 3
) -> dict[str, Any]:
    """Figures of one case, in a process that has no process group yet. Times are in ms, of the CPU."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # a fake collective leaves what memory held before, on which sums may be slow
    join_fake_world(world, gpus_per_node)
    clock = watch()
    start = time.process_time()
    model = build(adapter, strategy, blocks)
    wrapping = (time.process_time() - start) * 1e3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(1, WIDTH)
    start = time.process_time()
    step(model, optimizer, x)
    first = around(time.process_time() - start, clock)
    group_calls, group_ms = clock.calls["groups"], clock.seconds["groups"] * 1e3
    for _ in range(warmup):
        step(model, optimizer, x)
    ours = STRATEGIES[strategy] is not None
    before: Any = traffic(model) if ours else {}
    collectives, times = [], []
    for _ in range(steps):
        clock.reset()
        start = time.process_time()
        step(model, optimizer, x)
        whole = time.process_time() - start
        parts = {kind: clock.seconds[kind] * 1e3 for kind in ("codecs", "collectives")}
        times.append({"step": whole * 1e3, "around": around(whole, clock), **parts})
        collectives.append(clock.calls["collectives"])
    after: Any = traffic(model) if ours else {}
    calls = clock.calls_outside(lambda: step(model, optimizer, x))
    return {
        "adapter": adapter,
        "strategy": strategy,
        "world": world,
        "collectives_a_step": collectives,
        "calls_around_a_unit": calls / blocks,
        "ms_a_unit": {kind: statistics.median(t[kind] for t in times) / blocks for kind in times[0]},
        "fastest_around_ms_a_unit": min(t["around"] for t in times) / blocks,
        "sent_a_unit_and_step": {
            f"{kind} {hop}": (n - before[kind][hop]) / steps / blocks
            for kind, hops in after.items()
            for hop, n in hops.items()
        },
        "groups_of_this_rank": len(dist.distributed_c10d._world.pg_names),
        "calls_that_make_groups": group_calls,
        "making_groups_ms": group_ms,
        "wrapping_ms": wrapping,
        "first_step_around_ms": first,
    }


def in_process_of_its_own(arguments: argparse.Namespace, world: int, adapter: str, strategy: str) -> dict[str, Any]:
    """:func:`measure` in a new process."""
    case = [str(world), adapter, strategy]
    options = ["--gpus-per-node", "--blocks", "--steps", "--warmup"]
    values = [arguments.gpus_per_node, arguments.blocks, arguments.steps, arguments.warmup]
    command = [sys.executable, __file__, "--case", *case]
    command += [text for option, value in zip(options, values, strict=True) for text in (option, str(value))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(rows: list[dict[str, Any]], blocks: int) -> str:
    """The figures as Markdown."""
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    for row in rows:
        times, sent = row["ms_a_unit"], row["sent_a_unit_and_step"]
        kb = {hop: sum(n for name, n in sent.items() if name.endswith(hop)) / 1e3 for hop in ("inter", "intra")}
        cells = [
            *(str(row[name]) for name in ("adapter", "strategy", "world")),
            " to ".join(f"{n / blocks:g}" for n in sorted(set(row["collectives_a_step"]))),
            f"{row['calls_around_a_unit']:.0f}",
            f"{times['around']:.2f} ({row['fastest_around_ms_a_unit']:.2f})",
            *(f"{times[kind]:.2f}" for kind in ("codecs", "collectives")),
            *(f"{kb[hop]:.0f}" if sent else "" for hop in ("inter", "intra")),
            str(row["groups_of_this_rank"]),
            f"{row['wrapping_ms']:.0f}",
            f"{row['making_groups_ms']:.1f} ({row['calls_that_make_groups']})",
            f"{row['first_step_around_ms']:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def cpu_name() -> str:
    """The processor's, if the system tells."""
    known = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in known if line.startswith("model name")]
    return models[0] if models else platform.machine()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="16,64,256,1024", help="numbers of ranks that divide 1024")
    parser.add_argument("--adapters", default="fsdp1,fsdp2")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--steps", type=int, default=20, help="timed steps, after --warmup others and the first")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/scale"), help="folder for scale.md and scale.json")
    parser.add_argument("--case", nargs=3, metavar=("WORLD", "ADAPTER", "STRATEGY"), help="this one alone, as JSON")
    return parser.parse_args()


def main() -> None:
    """Measure, print and write a table."""
    arguments = parse()
    counts = {name: getattr(arguments, name) for name in ("gpus_per_node", "blocks", "steps", "warmup")}
    if arguments.case:
        world, adapter, strategy = arguments.case
        print(json.dumps(measure(int(world), adapter, strategy, **counts)))
        return
    rows = [
        in_process_of_its_own(arguments, int(world), adapter, strategy)
        for adapter in arguments.adapters.split(",")
        for strategy in arguments.strategies.split(",")
        for world in arguments.worlds.split(",")
    ]
    machine = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine, "arguments": counts, "rows": rows}
    (arguments.out / "scale.json").write_text(json.dumps(result, indent=1) + "\n")
    (arguments.out / "scale.md").write_text(table(rows, arguments.blocks) + "\n")
    print(table(rows, arguments.blocks))


if __name__ == "__main__":
    main()
