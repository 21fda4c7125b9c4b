"""One case of run.py: the cost of a strategy's step for rank 0's CPU in a fake world of some size."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._dynamo  # which torch would import in the midst of a timed step
import torch.distributed as dist
from clock import Clock
from sharding import shard
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_zpp import Strategy, traffic
from fsdp_zpp.codecs import Blockwise, FullPrecision
from fsdp_zpp.comm import hops

ROWS, WIDTH = 1024, 64  # one row of each matrix a rank at 1,024 ranks; of four rows, one block of 256 values
COLLECTIVES = (
    "all_gather all_gather_single all_gather_into_tensor all_to_all_single reduce_scatter reduce_scatter_single "
    "reduce_scatter_tensor all_reduce"
).split()
CODEC_METHODS = ("encode", "decode", "decode_sum", "decode_sum_encode")
STRATEGIES: dict[str, Strategy | None] = {
    "stock": None,
    "GGG": Strategy(),
    "zeropp": Strategy.zeropp(),
    "loco": Strategy.loco(),
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
    """Return a clock on collectives, codecs, and the making of process groups."""
    clock = Clock()
    for name in filter(partial(hasattr, dist), COLLECTIVES):
        clock.wrap(dist, name, "collectives")
    for codec in (Blockwise, FullPrecision):
        for name in CODEC_METHODS:
            clock.wrap(codec, name, "codecs")
    for name in ("encode_with_feedback", "decode_sum_encode_with_feedback"):
        clock.wrap(hops, name, "codecs")
    for name in ("new_group", "split_group"):
        clock.wrap(dist, name, "groups")
    return clock


def join_fake_world(world: int, gpus_per_node: int) -> None:
    """Join a fake process group as rank 0 of ``world``, as under torchrun, on one thread."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # a fake collective leaves old values in its memory, on which sums may be slow
    os.environ |= {"LOCAL_WORLD_SIZE": str(gpus_per_node), "GROUP_WORLD_SIZE": str(world // gpus_per_node)}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)


def build(adapter: str, strategy: str, blocks: int) -> nn.Module:
    """Build a model of ``blocks`` units."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(blocks)))
    return shard(model, list(model), adapter, STRATEGIES[strategy] or "FULL_SHARD")


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Make one optimizer step."""
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def around(seconds: float, clock: Clock) -> float:
    """Return the part of a time that is neither in codecs nor in collectives, in ms."""
    return (seconds - clock.seconds["codecs"] - clock.seconds["collectives"]) * 1e3


def timed_steps(one_step: Callable[[], None], clock: Clock, steps: int) -> tuple[list[dict[str, float]], list[int]]:
    """Return the CPU time of each step in ms, whole and by its parts, and its number of collectives."""
    times, collectives = [], []
    for _ in range(steps):
        clock.reset()
        start = time.process_time()
        one_step()
        whole = time.process_time() - start
        parts = {kind: clock.seconds[kind] * 1e3 for kind in ("codecs", "collectives")}
        times.append({"step": whole * 1e3, "around": around(whole, clock), **parts})
        collectives.append(clock.calls["collectives"])
    return times, collectives


def sent(model: nn.Module, strategy: str) -> dict[str, int]:
    """Return the bytes that this rank has sent so far, by kind and hop; nothing for stock FSDP."""
    kinds = {} if STRATEGIES[strategy] is None else traffic(model)
    return {f"{kind} {hop}": n for kind, hops in kinds.items() for hop, n in hops.items()}


def measure(
    world: int, adapter: str, strategy: str, gpus_per_node: int, blocks: int, steps: int, warmup: int
) -> dict[str, Any]:
    """Measure one case, in a process that has no process group yet. Times are in ms, of the CPU."""
    join_fake_world(world, gpus_per_node)
    clock = watch()
    start = time.process_time()
    model = build(adapter, strategy, blocks)
    wrapping = (time.process_time() - start) * 1e3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    one_step = partial(step, model, optimizer, torch.randn(1, WIDTH))
    start = time.process_time()
    one_step()
    first = around(time.process_time() - start, clock)
    group_calls, group_ms = clock.calls["groups"], clock.seconds["groups"] * 1e3
    for _ in range(warmup):
        one_step()
    before = sent(model, strategy)
    times, collectives = timed_steps(one_step, clock, steps)
    after = sent(model, strategy)
    return {
        "adapter": adapter,
        "strategy": strategy,
        "world": world,
        "collectives_a_step": collectives,
        "calls_around_a_unit": clock.calls_outside(one_step) / blocks,
        "ms_a_unit": {kind: statistics.median(t[kind] for t in times) / blocks for kind in times[0]},
        "fastest_around_ms_a_unit": min(t["around"] for t in times) / blocks,
        "sent_a_unit_and_step": {name: (n - before[name]) / steps / blocks for name, n in after.items()},
        "groups_of_this_rank": len(dist.distributed_c10d._world.pg_names),
        "calls_that_make_groups": group_calls,
        "making_groups_ms": group_ms,
        "wrapping_ms": wrapping,
        "first_step_around_ms": first,
    }
