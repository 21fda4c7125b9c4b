"""Weights of each packed format, written code by code from the format's definition, and the values that they stand for.

Each function returns the stored tensors of one weight [out, in], by the end of their names, and the values that the
library that owns the format gives them, computed from the codes before they were packed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

Stored = tuple[dict[str, Tensor], Tensor]
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # output i of eight lies in these nibbles of a word


def words(codes: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Pack unsigned codes of the last dimension, each in its place of a word; what is left of the last word is 0."""
    per_word = 32 // bits
    each = nn.functional.pad(codes, (0, -codes.shape[-1] % per_word)).long().unflatten(-1, (-1, per_word))
    return (each << bits * torch.tensor(places or range(per_word))).sum(-1).to(torch.int32)  # the low 32 bits


def _codes(shape: tuple[int, ...], bits: int, seed: int) -> Tensor:
    return torch.randint(2**bits, shape, generator=torch.Generator().manual_seed(seed))


def _scales(shape: tuple[int, ...], dtype: torch.dtype, seed: int, bits: int = 4) -> Tensor:
    scales = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.01 + 0.001
    return (scales * 16 / 2**bits).to(dtype)


def _groups(inputs: int, group: int, in_order: bool, seed: int) -> Tensor:
    """The group of each input; ``in_order`` of activations, they come in any."""
    groups = torch.arange(inputs) // group
    return groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))] if in_order else groups


def _values(codes: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor) -> Tensor:
    """(code - zero) * scale, rounded once to the dtype of the scales; zeros and scales are [out, groups]."""
    exact = (codes - zeros[:, group_of]).double() * scales[:, group_of].double()
    return exact.to(scales.dtype)


def gptq(
    out: int,
    inputs: int,
    seed: int = 0,
    *,
    bits: int = 4,
    group: int = 32,
    sym: bool = False,
    act: bool = False,
    v2: bool = False,
) -> Stored:
    """As gptqmodel and auto_gptq write it; ``v2`` is the format whose zero points are stored as they are."""
    codes = _codes((out, inputs), bits, seed)
    groups = inputs // group
    zeros = torch.full((out, groups), 2 ** (bits - 1)) if sym else _codes((out, groups), bits, seed + 1)
    if not sym:
        zeros[:, 0] = 0  # minus one is -1, for which writers borrow from the next zero point of the word
    scales = _scales((out, groups), torch.float16, seed + 2, bits)
    group_of = _groups(inputs, group, act, seed + 3)
    qzeros = words(zeros.T, bits)
    if not v2:
        qzeros = (qzeros.long() - sum(1 << (bits * i) for i in range(32 // bits))).to(torch.int32)
    parts = {"qweight": words(codes, bits).T, "qzeros": qzeros, "scales": scales.T, "g_idx": group_of.int()}
    return {name: part.contiguous() for name, part in parts.items()}, _values(codes, zeros, scales, group_of)


def awq(out: int, inputs: int, seed: int = 0, *, group: int = 32) -> Stored:
    """As autoawq writes its version ``gemm``."""
    codes, groups = _codes((out, inputs), 4, seed), inputs // group
    zeros, scales = _codes((out, groups), 4, seed + 1), _scales((out, groups), torch.float16, seed + 2)
    parts = {"qweight": words(codes.T, 4, _AWQ_PLACES), "qzeros": words(zeros.T, 4, _AWQ_PLACES), "scales": scales.T}
    values = _values(codes, zeros, scales, torch.arange(inputs) // group)
    return {name: part.contiguous() for name, part in parts.items()}, values


def mxfp4(experts: int, out: int, inputs: int, seed: int = 0) -> Stored:
    """As gpt-oss stores a stack, which models have as [experts, in, out]; in bf16."""
    codes = _codes((experts, out, inputs), 4, seed)
    exponents = torch.randint(118, 126, (experts, out, inputs // 32), generator=torch.Generator().manual_seed(seed + 1))
    pairs = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    parts = {"blocks": pairs.unflatten(-1, (-1, 16)), "scales": exponents.to(torch.uint8)}
    values = torch.tensor(FP4)[codes] * 2.0 ** (exponents.repeat_interleave(32, dim=-1) - 127)
    return parts, values.to(torch.bfloat16).mT.contiguous()


def _fp8_codes(out: int, inputs: int, generator: torch.Generator) -> Tensor:
    return (torch.randn(out, inputs, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)


def fp8(out: int, inputs: int, seed: int = 0, *, block: int = 32) -> Stored:
    """As DeepSeek stores weights: a scale for each square block, at the edges for what there is of it."""
    generator = torch.Generator().manual_seed(seed)
    codes = _fp8_codes(out, inputs, generator)
    scales = torch.rand(-(-out // block), -(-inputs // block), generator=generator) * 1e-3 + 1e-4
    each = scales.repeat_interleave(block, 0)[:out].repeat_interleave(block, 1)[:, :inputs]
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * each


def fp8_rows(out: int, inputs: int, seed: int = 0) -> Stored:
    """As compressed-tensors writes ``float-quantized`` with a scale for each row."""
    generator = torch.Generator().manual_seed(seed)
    codes = _fp8_codes(out, inputs, generator)
    scales = (torch.rand(out, 1, generator=generator) * 1e-3 + 1e-4).bfloat16()
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales.float()  # the library rounds to bf16
