"""Error feedback in the two-hop reduction: what codecs leave out does not build up, on any layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.covering import over_each
from harness.models import device
from torch import Tensor

from fsdp_zpp import Codec, Int4, Int8, LoCo, TopK
from fsdp_zpp.collectives.error_buffer import ErrorBuffer, encode_with_feedback
from fsdp_zpp.collectives.flat_layout import FlatLayout, Piece
from fsdp_zpp.collectives.gradient_reduce import GradientReduce
from fsdp_zpp.collectives.held_errors import Extent
from fsdp_zpp.collectives.hops import Traffic
from fsdp_zpp.collectives.mesh import process_mesh

OnRanks = Callable[..., list[Any]]
CPU = torch.device("cpu")
FED_BACK = {"inter": (None, Int4(32)), "both": (Int8(64), Int4(32))}
"""For each setting, codecs whose errors are all fed back."""

PIECES = [Piece(0, "always", 150), Piece(1, "at times", 100), Piece(2, "on one rank", 83)]
LAYOUT = FlatLayout.dense(PIECES)
FLUSHES = 30
"""Steps without gradients, in which errors halve at least."""


def gradient_of(step: int, rank: int, numel: int) -> Tensor:
    """Make a noisy gradient, other noise on each rank."""
    fixed = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    noisy = torch.randn(numel, generator=torch.Generator().manual_seed(1000 * step + rank + 2))
    return fixed + 0.3 * noisy


def idle_on(step: int, rank: int) -> list[str]:
    """The parameters of ``LAYOUT`` that a rank does not use in a step."""
    return ["at times"] * (step % 2) + ["on one rank"] * (step % 3 == 2 or rank != step % 4)


def sums_of_steps(keep: str, config: LoCo, dtype: torch.dtype) -> tuple[float, float, list[float]]:
    """On a rank: how far what came is from the exact means after steps, and after others whose gradients are zeros.

    At last, the largest values that came for parameters which no rank had used.
    """
    mesh, numel = process_mesh(dist.group.WORLD), LAYOUT.numel
    world, gpus = mesh.topology.world, mesh.topology.gpus_per_node
    reduce = GradientReduce(mesh, *FED_BACK[config.hops], Traffic(), optimizer_scope=keep, error_feedback=config)
    size = numel * {"G": world, "I": gpus, "N": 1}[keep]
    start = numel * {"G": mesh.rank, "I": mesh.rank % gpus, "N": 0}[keep]
    off, idle_came, offs = torch.zeros(numel).double(), [], []
    for step in range(12 + FLUSHES):
        gradients = [gradient_of(step, rank, size).to(dtype) * (step < 12) for rank in range(world)]
        idle = [idle_on(step, rank) if step < 12 else [] for rank in range(world)]
        for gradient, names in zip(gradients, idle, strict=True):
            for begin, end in LAYOUT.runs(names):
                gradient.view(-1, numel)[:, begin:end] = 0
        out, own = torch.empty(numel, device=device()), gradients[mesh.rank].to(device())
        reduce.start(own, out, layout=LAYOUT, idle=idle[mesh.rank]).finish()
        off += out.cpu().double() - torch.stack(gradients).double().mean(0)[start : start + numel]
        offs.append(off.abs().max().item())
        for begin, end in LAYOUT.runs(set.intersection(*map(set, idle))):
            idle_came.append(out[begin:end].abs().max().item())
    return offs[11], offs[-1], idle_came


# One node, or one GPU a node, turns scope I into another one, and one node alone leaves nothing between nodes.
SHAPES = [
    *((gpus, keep, "both") for gpus in (1, 2, 4) for keep in "GIN" if gpus == 2 or keep != "I"),
    *((gpus, keep, "inter") for gpus, keep in ((1, "G"), (1, "N"), (2, "I"))),
]


@over_each(rest=False, shape=SHAPES, beta=[0.0, 0.5], dtype=[torch.float32, torch.bfloat16])
def test_what_is_left_out_comes_later_also_of_parameters_that_ranks_do_not_use_meanwhile(
    on_ranks: OnRanks, shape: tuple[int, str, Any], beta: float, dtype: torch.dtype
) -> None:
    """A parameter that no rank uses comes as zeros."""
    gpus, keep, hops = shape
    if hops == "inter" and gpus > 1:
        dtype = torch.float32  # since what goes inside a node is rounded, too
    for before, after, idle_came in on_ranks(4 // gpus, gpus, sums_of_steps, keep, LoCo(beta=beta, hops=hops), dtype):
        assert before > 1e-3
        assert after < 2e-5
        assert idle_came
        assert max(idle_came) == 0


@pytest.mark.parametrize("codec", [None, Int8(128)], ids=str)
@pytest.mark.parametrize("numel", [LAYOUT.numel, 160])
def test_idle_errors_do_not_decay_and_are_not_rounded_again_and_again(codec: Int8 | None, numel: int) -> None:
    """Neighbours in their blocks grow in every step, and chunks may cut the layout anywhere."""
    buffer, extent = ErrorBuffer(0.0, codec, decay=0.9), Extent(numel, (0, numel % LAYOUT.numel), LAYOUT)
    marks = extent.marked(["at times"], CPU)
    assert marks is not None
    before = torch.empty(0)
    for step in range(60):
        values, idle = (1 + step) * gradient_of(step, 0, 2 * numel), step > 3
        if idle:
            values[marks] = 0
        if step == 4:
            before = buffer.read()[marks].clone()
        encode_with_feedback(Int4(32), values, 1, 2, buffer.prepare(extent, CPU, ["at times"] if idle else []))
    after = buffer.read()
    # In int8, at most one unit of the last scale; the largest error in a block is 127 units.
    assert (after[marks] - before).abs().max() <= (0 if codec is None else after.abs().max() / 127)
    assert before.abs().max() > 0


@pytest.mark.parametrize("dtype", [None, Int8(128)], ids=["fp32", "int8"])
@pytest.mark.parametrize("codec", [TopK(0.05, 4, 128), Int8(128)], ids=["without a kernel", "with a kernel"])
def test_errors_decay_once_each_time_they_are_used(codec: Codec, dtype: Int8 | None) -> None:
    one, other = Piece(0, "one", 256), Piece(1, "other", 256)
    both, alone = FlatLayout((one, other), (0, 256), 512), FlatLayout((one,), (0,), 256)
    values, buffer, errors = gradient_of(0, 0, 512), ErrorBuffer(0.0, dtype, 0.45), []
    for layout in (both, alone, alone, both):
        prepared = buffer.prepare(Extent(layout.numel, (0,), layout), CPU)
        errors.append(prepared.read().clone())
        if dtype is not None:  # scales stay short enough for exact products
            assert not (dtype.scales(prepared.state, layout.numel).view(torch.int32) & 0xFF).any()
        if layout is both:  # the first is sent no more, and its errors decay alone
            payload = encode_with_feedback(codec, values.clone(), 1, 1, prepared)
            if len(errors) == 1:
                codec.decode(payload, left_out := torch.empty(512), 1, 1)
                left_out = values - left_out
    first, second, third, fourth = errors
    assert not first.any()
    assert second.any()
    assert torch.allclose(third, 0.45 * second, rtol=1e-3, atol=0)
    assert torch.allclose(fourth[:256], 0.45**2 * second, rtol=2e-2, atol=1e-4)
    rounding = 0 if dtype is None else left_out.abs().max() / 127
    assert ((fourth[256:] - 0.45 * left_out[256:]).abs() <= rounding + 1e-7).all()
