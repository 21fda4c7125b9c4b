"""Codecs that the library does not have, for their effect on the loss: Hadamard, stochastic rounding, 2 bits.

They are plain torch operations, and codes travel one to a byte: their speed and their bytes have no meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_zpp import Codec

RUN = 32
"""Values that one Hadamard transform mixes (SDP4Bit, arXiv 2410.15526, section 3.3)."""


@dataclass(frozen=True)
class Hadamard(Codec):
    """Another codec in a rotated basis: each run of 32 values is transformed, which spreads outliers over it.

    Args:
        codec: Encodes the transformed values.
    """

    codec: Codec

    def __str__(self) -> str:
        return f"hadamard+{self.codec}"

    def nbytes(self, numel: int) -> int:
        return self.codec.nbytes(_padded(numel, RUN))

    def encode(self, values: Tensor, rows: int, cols: int) -> Tensor:
        chunks = _chunks(values, rows * cols, RUN)
        return self.codec.encode(_transform(chunks).flatten(), rows, cols)

    def decode(self, payload: Tensor, out: Tensor, rows: int, cols: int) -> None:
        transformed = self._like(out, rows * cols)
        self.codec.decode(payload, transformed.view(-1), rows, cols)
        self._write(transformed, out)

    def decode_sum(self, payload: Tensor, out: Tensor, rows: int, cols: int, scale: float) -> None:
        # The transform is linear, so one inverse of the sum is enough.
        transformed = self._like(out, rows * cols)
        self.codec.decode_sum(payload, transformed.view(-1), rows, cols, scale)
        self._write(transformed, out)

    @staticmethod
    def _like(out: Tensor, chunks: int) -> Tensor:
        return torch.empty(chunks, _padded(out.numel() // chunks, RUN), dtype=torch.float32, device=out.device)

    @staticmethod
    def _write(transformed: Tensor, out: Tensor) -> None:
        numel = out.numel() // len(transformed)
        out.view(-1, numel).copy_(_transform(transformed)[:, :numel])


@dataclass(frozen=True)
class Bytewise(Codec):
    """Symmetric blockwise integers in [-qmax, qmax], one code a byte, with the largest magnitude of a block as scale.

    Stochastic rounding goes up or down at random so that the mean is right. It draws from the device's default
    generator: ranks must be seeded differently, or their errors would not average out.

    Args:
        block: Values that share one fp32 scale.
        qmax: Largest code; 1 takes 2 bits, 7 takes 4.
        stochastic: Whether rounding is stochastic, and not to nearest.
    """

    block: int
    qmax: int
    stochastic: bool = False

    def __str__(self) -> str:
        return f"{'stochastic-' if self.stochastic else ''}int{self.qmax.bit_length() + 1}({self.block})"

    def nbytes(self, numel: int) -> int:
        padded = _padded(numel, self.block)
        return padded + padded // self.block * 4

    def encode(self, values: Tensor, rows: int, cols: int) -> Tensor:
        blocks = _chunks(values, rows * cols, self.block).unflatten(1, (-1, self.block))
        scales = blocks.abs().amax(dim=2, keepdim=True) / self.qmax
        # A block of zeros has no scale; one that holds an infinity becomes NaN by its scale, whatever the codes.
        unit = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)).nan_to_num_()
        unit = unit.add_(torch.rand_like(unit)).floor_() if self.stochastic else unit.round_()
        codes = unit.clamp_(-self.qmax, self.qmax).to(torch.int8)
        payload = torch.cat([scales.flatten(1).view(torch.uint8), codes.flatten(1).view(torch.uint8)], dim=1)
        return payload.view(rows, cols, -1).transpose(0, 1).reshape(rows * cols, -1)

    def decode(self, payload: Tensor, out: Tensor, rows: int, cols: int) -> None:
        self.decode_sum(payload.view(1, rows * cols, -1), out, rows, cols, 1.0)

    def decode_sum(self, payload: Tensor, out: Tensor, rows: int, cols: int, scale: float) -> None:
        numel = out.numel() // (rows * cols)
        scales_end = _padded(numel, self.block) // self.block * 4
        scales = payload[..., :scales_end].contiguous().view(torch.float32)
        codes = payload[..., scales_end:].view(torch.int8).unflatten(-1, (-1, self.block))
        sums = (codes * scales.unsqueeze(-1)).sum(dim=0).mul_(scale).flatten(1)[:, :numel]
        out.view(cols, rows, numel).copy_(sums.unflatten(0, (rows, cols)).transpose(0, 1))


def _padded(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


def _chunks(values: Tensor, count: int, multiple: int) -> Tensor:
    """Return fp32 [count, numel], each chunk completed with zeros to a multiple."""
    numel = values.numel() // count
    return F.pad(values.float().view(count, numel), (0, _padded(numel, multiple) - numel))


def _transform(chunks: Tensor) -> Tensor:
    """Apply the orthonormal transform to each run of [n, numel]; it is its own inverse."""
    return (chunks.unflatten(1, (-1, RUN)) @ _hadamard(chunks.device)).flatten(1)


@cache
def _hadamard(device: torch.device) -> Tensor:
    matrix, twofold = torch.ones(1, 1), torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    while len(matrix) < RUN:
        matrix = torch.kron(matrix, twofold)
    return (matrix / RUN**0.5).to(device)
