"""ZeRO++ by hand: the example computes what the library computes, bit for bit, and sends as much."""

from __future__ import annotations

import importlib
import math
import re
import sys

import pytest
import torch
import torch.distributed as dist
from harness.covering import over_each
from harness.launch import ROOT, launch
from harness.models import device
from harness.pool import Pools
from torch import Tensor

from fsdp_zpp import Int4, Int8
from fsdp_zpp.comm.gradient_reduce import GradientReduce
from fsdp_zpp.comm.hops import Traffic
from fsdp_zpp.comm.mesh import process_mesh
from fsdp_zpp.comm.weight_gather import WeightGather

EXAMPLE = "examples/zeropp_by_hand.py"
LAYOUTS = [(2, 2), (3, 2)]
"""Nodes, and ranks on each. A mean over six ranks multiplies by what fp32 rounds, a sum over three depends on order."""
WHOLE = 1024
"""A number of values that fills blocks and payloads, so that neither side sends padding."""


sys.path.append(str(ROOT / "examples"))
by_hand = importlib.import_module("zeropp_by_hand")


def values(kind: str, chunks: int, numel: int, largest_code: int) -> Tensor:
    """Return this rank's values [chunks * numel]; ``largest_code`` is that of the codec that is to encode them."""
    generator = torch.Generator().manual_seed(1000 * numel + dist.get_rank())
    x = torch.randn(chunks, numel, generator=generator) * torch.exp(3 * torch.randn(chunks, numel, generator=generator))
    x[torch.rand(x.shape, generator=generator) < 0.1] = 0
    x[:, 300:700] = 0  # whole blocks
    match kind:
        case "half steps":  # between two codes; times the rounded inverse of the scale, many are no longer half steps
            step = 209 / 256
            x = (torch.randint(-largest_code, largest_code, x.shape, generator=generator) + 0.5) * step
            x[:, ::128] = largest_code * step
        case "tiny":
            x *= 2.0**-135
        case "uneven":  # of which fp32 cannot hold the sums over nodes
            x = torch.randn(x.shape, generator=generator) * 2.0 ** (5 * dist.get_rank())
        case "inf" | "nan":
            if dist.get_rank() == 1:
                x[0, numel // 2] = float(kind)
    return x.flatten().to(device(), torch.bfloat16 if kind == "bf16" else torch.float32)


def bits(x: Tensor) -> Tensor:
    """Return the bits of fp32 values, with one pattern for all NaN, which may have any."""
    return x.masked_fill(x.isnan(), torch.nan).view(torch.int32)


def check_equal(layout: tuple[int, int], numel: int, kind: str) -> None:
    """In a worker: fail unless weights, gradients and bytes by hand are the library's."""
    nodes, gpus = layout
    world = nodes * gpus
    shard, gradient = values(kind, 1, numel, 127), values(kind, world, numel, 7)

    network = by_hand.Network(nodes, gpus, device().type)
    int8, int4 = by_hand.Blockwise(8, 256), by_hand.Blockwise(4, 128)
    secondary = by_hand.gather_between_nodes(shard, int8, network)
    gathered = by_hand.gather_inside_node(secondary, numel, int8, network)
    reduced = by_hand.reduce_gradient(gradient, int4, network)

    mesh, traffic = process_mesh(dist.group.WORLD, gpus), Traffic()
    weights, mean = (torch.empty(n, device=device()) for n in (world * numel, numel))
    WeightGather(mesh, Int8(256), True, traffic)(shard, weights)
    GradientReduce(mesh, Int4(128), Int4(128), traffic)(gradient, mean)
    assert torch.equal(bits(gathered), bits(weights))
    assert torch.equal(bits(reduced), bits(mean))
    if numel == WHOLE:
        names = {"gather": "weights", "reduce": "gradients"}
        sent = {f"{names[kind]} {level}": nbytes for (kind, level), nbytes in traffic.sent.items()}
        assert dict(network.sent) == sent


@over_each(
    rest=False,
    layout=LAYOUTS,
    numel=[1, 77, WHOLE, 3001],
    kind=["fp32", "bf16", "half steps", "uneven", "tiny", "inf", "nan"],
)
def test_equals_the_library_bit_for_bit(pool: Pools, layout: tuple[int, int], numel: int, kind: str) -> None:
    pool(math.prod(layout)).run(check_equal, layout, numel, kind)


def test_prints_what_each_hop_sends_and_the_errors() -> None:
    done = launch(4, EXAMPLE, "--gpus-per-node", "2", on_cpu=True)
    assert done.returncode == 0, done.stderr
    printed = re.findall(r"^(weights|gradients) .*?([\d,]+) +([\d,]+)$", done.stdout, re.MULTILINE)
    ratios = [int(bf16.replace(",", "")) / int(sent.replace(",", "")) for _, sent, bf16 in printed]
    assert ratios == pytest.approx([2 / (1 + 4 / 256)] * 2 + [2 / (0.5 + 4 / 128)] * 2)
    errors = re.findall(r"^error of the (\w+): (\d+\.\d+)% of their norm$", done.stdout, re.MULTILINE)
    assert [what for what, _ in errors] == ["weights", "gradients"]
    # A block of 256 normal values reaches to 3 of their standard deviations and is cut into 127 steps each way, one of
    # 128 into 7; a step's error is its width over the root of 12. Gradients are rounded in both hops.
    assert 0 < float(errors[0][1]) < 1
    assert 0 < float(errors[1][1]) < 20
