"""A chunk is read and encoded some values at a time, and is what encoding all of it at once makes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fsdp_zpp import NF4, Int4, Int8
from fsdp_zpp.codecs.base import Codec, FullPrecision
from fsdp_zpp.collectives.mesh import ProcessMesh
from fsdp_zpp.config.topology import Topology
from fsdp_zpp.frozen import weight as module
from fsdp_zpp.frozen.placement import Placement
from fsdp_zpp.frozen.weight import FrozenWeight

RANKS = 3
PIECE = 512
CPU = torch.device("cpu")


def of_rank(rank: int, shape: torch.Size, codec: Codec) -> FrozenWeight:
    mesh = ProcessMesh(Topology(RANKS, RANKS), rank, None, None)
    return FrozenWeight("weight", shape, torch.float32, codec, Placement("I", mesh))


@dataclass
class Values:
    """A weight's values, and how many were read at once at most."""

    all: Tensor
    most: int = 0

    def read(self, first: int, last: int) -> Tensor:
        assert 0 <= first < last <= self.all.numel()
        self.most = max(self.most, last - first)
        return self.all.view(-1)[first:last]


@pytest.mark.parametrize("codec", [Int8(64), Int4(128), NF4(64)], ids=str)
@pytest.mark.parametrize("shape", [(64, 129), (3, 50, 70), (1, 100)], ids=str)
def test_pieces_make_the_payload_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], codec: Int8 | Int4 | NF4
) -> None:
    monkeypatch.setattr(module, "_PIECE", PIECE)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    rows = []
    for rank in range(RANKS):
        source = Values(values)
        rows.append(of_rank(rank, values.shape, codec).encode(source.read, CPU))
        assert source.most <= PIECE
    weight = of_rank(0, values.shape, codec)
    padded = torch.zeros(RANKS * weight.chunk_numel)
    padded[: values.numel()] = values.view(-1)
    whole = codec.encode(padded, RANKS, 1)
    out, expected = torch.empty_like(padded), torch.empty_like(padded)
    codec.decode_rows(torch.stack(rows), out)
    codec.decode_rows(whole, expected)
    assert torch.equal(out[: values.numel()], expected[: values.numel()])
    codes, scales = weight.codes_and_scales(torch.stack(rows))
    assert [torch.equal(a, b) for a, b in zip((codes, scales), weight.codes_and_scales(whole), strict=True)] == [
        True
    ] * 2


def test_a_codec_without_blocks_gets_the_whole_chunk() -> None:
    values = Values(torch.randn(40, 100))
    row = of_rank(1, values.all.shape, FullPrecision(torch.float32)).encode(values.read, CPU)
    chunk = -(-4000 // (RANKS * 16)) * 16
    assert torch.equal(row.view(torch.float32), values.all.view(-1)[chunk : 2 * chunk])
