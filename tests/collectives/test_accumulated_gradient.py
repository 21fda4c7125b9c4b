"""Sums of earlier micro-batches, which arrive in the stream of the slow hop while the last micro-batch begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.models import device
from harness.pool import Pool
from torch import Tensor

from fsdp_zpp import Int4, Int8
from fsdp_zpp.collectives.flat_layout import FlatLayout, Piece
from fsdp_zpp.collectives.gradient_reduce import GradientReduce
from fsdp_zpp.collectives.hops import Traffic
from fsdp_zpp.collectives.mesh import process_mesh

A, B = Piece(0, "a", 40), Piece(1, "b", 24)
LAYOUTS = {"alike": ([A, B], [A, B]), "wider": ([B], [A, B]), "none": (None, None)}


def gradient(seed: int, pieces: list[Piece] | None) -> Tensor:
    """In a worker: a gradient of a chunk for each rank, other values on each."""
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    numel = sum(piece.numel for piece in pieces or (A, B))
    return torch.randn(dist.get_world_size() * numel, generator=generator).to(device())


def reduced(codecs: Any, pieces: Any, divided_by: float, late: bool) -> Tensor:
    """In a worker: the mean of two micro-batches; sums that are late arrive after the last reduction has begun."""
    reduce = GradientReduce(process_mesh(dist.group.WORLD, 2), *codecs, Traffic())
    first, both = (None if each is None else FlatLayout.dense(each) for each in pieces)
    reduce.accumulate(gradient(0, pieces[0]), first).finish()
    sums = reduce.accumulated.sums
    assert sums is not None
    arrived = sums.clone()
    if late:
        sums.fill_(torch.nan)
    out = torch.empty(A.numel + B.numel, device=device())
    pending = reduce.start(gradient(1, pieces[1]), out, 1.0, both, divided_by)
    if late:
        sums.copy_(arrived)
    pending.finish()
    assert reduce.accumulated.sums is None
    return out


def compared(codecs: Any, pieces: Any, divided_by: float) -> bool:
    """In a worker: whether late sums change nothing."""
    in_time, late = (reduced(codecs, pieces, divided_by, late) for late in (False, True))
    return torch.equal(in_time, late)


@pytest.mark.parametrize("codecs", [(None, None), (Int8(32), Int4(32))], ids=str)
@pytest.mark.parametrize("divided_by", [1.0, 4.0])
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_a_reduction_begins_before_earlier_sums_have_arrived(
    pool: Callable[[int], Pool], layouts: str, divided_by: float, codecs: Any
) -> None:
    assert pool(4).run(compared, codecs, LAYOUTS[layouts], divided_by) == [True] * 4
