"""Weights gathered as differences stay near the true ones on every rank, and only a step is sent as one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.models import device
from harness.pool import Pool
from torch import Tensor

from fsdp_zpp import Int4, Int4Delta, Int8
from fsdp_zpp.collectives.hops import Traffic
from fsdp_zpp.collectives.mesh import process_mesh
from fsdp_zpp.collectives.weight_gather import WeightGather

DELTAS = Int4Delta(64, whole=Int8(64))
NUMEL = 333


def block_steps(values: Tensor, codec: Int8 | Int4) -> Tensor:
    """Return the quantization step of each value, by the definition."""
    steps = [block.abs().max().expand(len(block)) / (2 ** (codec.bits - 1) - 1) for block in values.split(codec.block)]
    return torch.cat(steps)


def followed(gpus_per_node: int, dtype: torch.dtype) -> list[tuple[float, bool]]:
    """In a worker: over 30 steps of a walk, the error of what is gathered against its bound, and if all ranks agree.

    The bound: half a step of the 4-bit change, against what was held, and half one of the 8 bits that it is kept in.
    """
    world = dist.get_world_size()
    gather = WeightGather(process_mesh(dist.group.WORLD, gpus_per_node), DELTAS, True, Traffic())
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(world, NUMEL, generator=generator)
    held = torch.zeros(world, NUMEL)
    results = []
    for step in range(30):
        out = torch.empty(world * NUMEL, dtype=dtype, device=device())
        gather(weights[dist.get_rank()].to(device()), out)
        now = out.float().cpu().view(world, NUMEL)
        rounding = now.abs() * torch.finfo(dtype).eps
        worst = 0.0
        for rank in range(world):
            bound = block_steps(now[rank], DELTAS.whole) * 0.51 + rounding[rank]
            if step:
                bound += block_steps(weights[rank] - held[rank], DELTAS.changes) * 0.51 + 2 * rounding[rank]
            worst = max(worst, ((now[rank] - weights[rank]).abs() / bound.clamp(min=1e-30)).max().item())
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, now)
        results.append((worst, all(torch.equal(other, now) for other in everyone)))
        held = now
        weights = weights + 0.01 * torch.randn(world, NUMEL, generator=generator)
        gather.secondary.mark_stale(by_step=True)
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("gpus_per_node", [1, 2])
def test_gathered_weights_stay_within_half_a_step_of_the_true_ones(
    pool: Callable[[int], Pool], gpus_per_node: int, dtype: torch.dtype
) -> None:
    for results in pool(4).run(followed, gpus_per_node, dtype):
        for error, equal in results:
            assert error <= 1
            assert equal


def after_events() -> list[float]:
    """In a worker: bytes between nodes of the first gather, after a step, after weights from elsewhere, and again."""
    traffic = Traffic()
    gather = WeightGather(process_mesh(dist.group.WORLD, 2), DELTAS, True, traffic)
    shard = torch.ones(NUMEL, device=device())
    sent = []
    for event in (
        lambda: None,
        partial(gather.secondary.mark_stale, by_step=True),
        gather.secondary.mark_stale,
        lambda: None,
    ):
        event()
        before = traffic.sent.get(("gather", "inter"), 0)
        gather(shard, torch.empty(4 * NUMEL, device=device()))
        sent.append(traffic.sent["gather", "inter"] - before)
    return sent


def test_a_change_is_sent_after_a_step_and_whole_weights_after_any_other_event(pool: Callable[[int], Pool]) -> None:
    whole, change = Int8(64).nbytes(NUMEL), Int4(64).nbytes(NUMEL)
    assert pool(4).run(after_events) == [[whole, change, whole, 0]] * 4
