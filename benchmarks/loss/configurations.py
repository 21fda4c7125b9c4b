"""Configurations of the studies by name, and codecs that the library does not have.

tables.py says how names are made.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from top_k_codec import TopK
from torch import Tensor
from torch.distributed.fsdp import ShardingStrategy

from fsdp_zpp import Codec, Int2Delta, Int3, Int4, Int4Delta, Int8, LocalSteps, LoCo, Strategy

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
class Bytewise(Codec):
    """Symmetric blockwise integers in [-qmax, qmax], with the largest magnitude of a block as scale.

    Stochastic rounding goes up or down at random so that the mean is right. It draws from the device's default
    generator: ranks must be seeded differently, or their errors would not average out. A chunk's payload has the fp32
    scales of all blocks, then one int8 code for each value.

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


# ---- configurations

Sharding = Strategy | ShardingStrategy

_FAMILIES: dict[str, dict[str, Any]] = {
    "int8": {"gradients": Int8(128)},
    "int4": {"gradients": Int4(128), "intra_gradients": Int8(128)},
    "int4x2": {"gradients": Int4(2048), "intra_gradients": Int4(2048)},
    "int4c": {"gradients": Int4(2048), "intra_gradients": Int8(128)},
    "int2": {"gradients": Bytewise(128, qmax=1), "intra_gradients": Int8(128)},
    "int3": {"gradients": Int3(128), "intra_gradients": Int8(128)},
}
NAMES = (
    "full_shard int4 int4+loco int4x2 int4x2+loco int2 int2+loco int4+loco-beta0 int4+hadamard int8 "
    "w8:full_shard w8:int4 w8:int4+loco int4x2+loco-beta0 int4x2+hadamard w8:int4+loco-beta0 w8:int4+hadamard w8:int8 "
    "int4+stochastic w8:int4x2 w8:int4x2+loco w8:int4x2+loco-beta0 int4c int4c+loco d4:int4 d4:full_shard "
    "d2:int4 d2:full_shard w8:int3"
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
