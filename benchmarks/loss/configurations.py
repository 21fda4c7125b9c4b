"""Configurations of the studies by name, and codecs that the library does not have.

tables.py says how names are made.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from top_k_codec import TopK
from torch import Tensor
from torch.distributed.fsdp import ShardingStrategy

from fsdp_zpp import Codec, Int2Delta, Int4, Int4Delta, Int8, LocalSteps, LoCo, Strategy

# ---- codecs
#
# They are plain torch operations, and codes travel one to a byte: their speed and their bytes have no meaning.

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
class _CodePerByte(Codec):
    """Blockwise codes: a chunk's payload has the fp32 scales of all blocks, then one int8 code for each value.

    Args:
        block: Values that share one scale.
    """

    block: int

    @abstractmethod
    def _quantize(self, blocks: Tensor, padding: int) -> tuple[Tensor, Tensor]:
        """Quantize blocks.

        Args:
            blocks: fp32 [chunks, blocks, block], which may share memory with the values.
            padding: Number of zeros at the end of each chunk that complete its last block.

        Returns:
            Scales, fp32 [chunks, blocks, 1], and codes, int8 [chunks, blocks, block].
        """

    def _levels(self, codes: Tensor) -> Tensor:
        """Return the values of codes in units of their blocks' scales; by default codes are integers themselves."""
        return codes

    def nbytes(self, numel: int) -> int:
        padded = _padded(numel, self.block)
        return padded + padded // self.block * 4

    def encode(self, values: Tensor, rows: int, cols: int) -> Tensor:
        numel = values.numel() // (rows * cols)
        blocks = _chunks(values, rows * cols, self.block).unflatten(1, (-1, self.block))
        scales, codes = self._quantize(blocks, -numel % self.block)
        payload = torch.cat([scales.flatten(1).view(torch.uint8), codes.flatten(1).view(torch.uint8)], dim=1)
        return payload.view(rows, cols, -1).transpose(0, 1).reshape(rows * cols, -1)

    def decode(self, payload: Tensor, out: Tensor, rows: int, cols: int) -> None:
        self.decode_sum(payload.view(1, rows * cols, -1), out, rows, cols, 1.0)

    def decode_sum(self, payload: Tensor, out: Tensor, rows: int, cols: int, scale: float) -> None:
        numel = out.numel() // (rows * cols)
        scales_end = _padded(numel, self.block) // self.block * 4
        scales = payload[..., :scales_end].contiguous().view(torch.float32)
        codes = payload[..., scales_end:].view(torch.int8).unflatten(-1, (-1, self.block))
        sums = (self._levels(codes) * scales.unsqueeze(-1)).sum(dim=0).mul_(scale).flatten(1)[:, :numel]
        out.view(cols, rows, numel).copy_(sums.unflatten(0, (rows, cols)).transpose(0, 1))


@dataclass(frozen=True)
class Bytewise(_CodePerByte):
    """Symmetric blockwise integers in [-qmax, qmax], with the largest magnitude of a block as scale.

    Stochastic rounding goes up or down at random so that the mean is right. It draws from the device's default
    generator: ranks must be seeded differently, or their errors would not average out.

    Args:
        block: Values that share one fp32 scale.
        qmax: Largest code; 1 takes 2 bits, 7 takes 4.
        stochastic: Whether rounding is stochastic, and not to nearest.
    """

    qmax: int
    stochastic: bool = False

    def __str__(self) -> str:
        return f"{'stochastic-' if self.stochastic else ''}int{self.qmax.bit_length() + 1}({self.block})"

    def _quantize(self, blocks: Tensor, padding: int) -> tuple[Tensor, Tensor]:
        scales = blocks.abs().amax(dim=2, keepdim=True) / self.qmax
        # A block of zeros has no scale; one that holds an infinity becomes NaN by its scale, whatever the codes.
        unit = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)).nan_to_num_()
        unit = unit.add_(torch.rand_like(unit)).floor_() if self.stochastic else unit.round_()
        return scales, unit.clamp_(-self.qmax, self.qmax).to(torch.int8)


@dataclass(frozen=True)
class LloydMax(_CodePerByte):
    """The eight levels that are best for normally distributed values, in units of a block's root mean square.

    Levels are those of J. Max, "Quantizing for minimum distortion" (1960), table I; values go to the nearest one. None
    is zero, so a zero decodes to the level below it, unless its whole block is zeros. A block with an infinity or a NaN
    decodes to NaN. Squares must neither overflow nor underflow in fp32.

    Args:
        block: Values that share one fp32 scale.
        unbiased: Whether the scale is ``<x, x> / <x, q>``, by which ``<x, decoded>`` is ``<x, x>`` (EDEN,
            arXiv 2108.08842), and not the root mean square; q are the levels that values ``x`` go to.
    """

    unbiased: bool = False

    def __str__(self) -> str:
        return f"{'unbiased-' if self.unbiased else ''}lloyd3({self.block})"

    def _quantize(self, blocks: Tensor, padding: int) -> tuple[Tensor, Tensor]:
        norms = torch.linalg.vector_norm(blocks, dim=2, keepdim=True)
        scales = norms / self.block**0.5
        scales[:, -1:] *= (self.block / (self.block - padding)) ** 0.5
        # NaN, also 0 / 0 in a block of zeros, has a code like others: the block becomes NaN or zeros by its scale.
        codes = torch.bucketize(blocks / scales, _lloyd_max(blocks.device)[1], out_int32=True)
        if self.unbiased:
            products = self._levels(codes).mul_(blocks).sum(dim=2, keepdim=True)
            scales = norms.square_() / products.clamp_min_(torch.finfo(torch.float32).tiny)
        # No level is zero, so an infinite scale would make infinities of finite values.
        return scales.masked_fill_(scales.isinf(), torch.nan), codes.to(torch.int8)

    def _levels(self, codes: Tensor) -> Tensor:
        # Indexing would make 64-bit indices.
        return _lloyd_max(codes.device)[0].index_select(0, codes.int().flatten()).view(codes.shape)


@cache
def _lloyd_max(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return eight levels for values of variance 1, and the thresholds halfway between them."""
    positive = torch.tensor([0.2451, 0.7560, 1.344, 2.152])
    levels = torch.cat([-positive.flip(0), positive])
    return levels.to(device), ((levels[1:] + levels[:-1]) / 2).to(device)


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


# ---- configurations

Sharding = Strategy | ShardingStrategy

_FAMILIES: dict[str, dict[str, Any]] = {
    "int8": {"gradients": Int8(128)},
    "int4": {"gradients": Int4(128), "intra_gradients": Int8(128)},
    "int4x2": {"gradients": Int4(2048), "intra_gradients": Int4(2048)},
    "int4c": {"gradients": Int4(2048), "intra_gradients": Int8(128)},
    "int2": {"gradients": Bytewise(128, qmax=1), "intra_gradients": Int8(128)},
    "int3": {"gradients": LloydMax(128), "intra_gradients": Int8(128)},
    "int3u": {"gradients": LloydMax(128, unbiased=True), "intra_gradients": Int8(128)},
}
NAMES = (
    "full_shard int4 int4+loco int4x2 int4x2+loco int2 int2+loco int4+loco-beta0 int4+hadamard int8 "
    "w8:full_shard w8:int4 w8:int4+loco int4x2+loco-beta0 int4x2+hadamard w8:int4+loco-beta0 w8:int4+hadamard w8:int8 "
    "int4+stochastic w8:int4x2 w8:int4x2+loco w8:int4x2+loco-beta0 int4c int4c+loco d4:int4 d4:full_shard "
    "d2:int4 d2:full_shard w8:int3 w8:int3u w8:int3u+hadamard"
).split()
"""All names of the convergence study, in the order in which they are trained, the most important first."""

_EXCHANGED = {"none": None, "int8": Int8(128), "int4": Int4(128), "topk": TopK()}
_CHANGES = {
    "overlap": ("overlap", int),
    "mix": ("mix", float),
    "outer": ("outer_lr", float),
    "momentum": ("outer_momentum", float),
    "start": ("start", int),
    "moments": ("moments_every", int),
}


def sharding(name: str, gpus_per_node: int) -> Sharding:
    """Return the sharding strategy for FullyShardedDataParallel under the configuration of that name."""
    if name == "full_shard":
        return ShardingStrategy.FULL_SHARD
    if name.startswith("local"):
        return Strategy("III", local_steps=local_steps(name), gpus_per_node=gpus_per_node)
    prefix, _, gradients = name.rpartition(":")
    weights = {"": None, "w8": Int8(256), "d4": Int4Delta(256), "d2": Int2Delta(256)}[prefix]
    encoded = {} if gradients == "full_shard" else _encoded(*gradients.partition("+")[::2])
    return Strategy("IGG", weights=weights, gpus_per_node=gpus_per_node, **encoded)


def _encoded(family: str, change: str) -> dict[str, Any]:
    """Return the codecs of a family of the convergence study with one change."""
    codecs = _FAMILIES[family]
    is_coarse_inside = family == "int4x2"
    if change.startswith("loco"):
        hops = "both" if is_coarse_inside else "inter"
        return codecs | {"error_feedback": LoCo(beta=0.0 if change == "loco-beta0" else 0.8, hops=hops)}
    if change == "hadamard":
        coarse = ("gradients", "intra_gradients") if is_coarse_inside else ("gradients",)
        return codecs | {name: Hadamard(codecs[name]) for name in coarse}
    return codecs | ({"gradients": Bytewise(128, qmax=7, stochastic=True)} if change == "stochastic" else {})


def local_steps(name: str) -> LocalSteps:
    """Return the local steps that a configuration's name describes.

    Raises:
        ValueError: If it describes none, or LocalSteps refuses them.
    """
    any_changes = r"(?::(?:at-once|momentum-auto|[a-z]+[\d.]+))*"
    parts = re.fullmatch(rf"local(\d+):(none|int8|int4|topk)(\+loco)?({any_changes})", name)
    if parts is None:
        raise ValueError(f"{name!r} is unknown; local steps are named like local32:int4+loco:overlap1:mix0.5")
    every, codec, feedback, changes = parts.groups()
    # SparseLoCo has errors in place of an outer momentum; others have DiLoCo's, unless the name says otherwise.
    options: dict[str, Any] = {"outer_momentum": 0.9}
    if codec == "topk":
        options = {"outer_lr": 1.0, "outer_momentum": 0.0}
    for change in changes.split(":")[1:]:
        word = change.rstrip("0123456789.")
        if change == "at-once":
            options["spread"] = False
        elif change == "momentum-auto":
            options["outer_momentum"] = "auto"
        elif word in _CHANGES:
            option, number = _CHANGES[word]
            options[option] = number(change.removeprefix(word))
        else:
            known = ", ".join(("at-once", "momentum-auto", *_CHANGES))
            raise ValueError(f"{name!r} changes {word!r}; what can be changed is {known}")
    loco = LoCo(beta=0, decay=0.95, reset_every=0) if codec == "topk" else LoCo(beta=0.8)
    return LocalSteps(every=int(every), codec=_EXCHANGED[codec], error_feedback=loco if feedback else None, **options)
