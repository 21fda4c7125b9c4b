"""NF4 against bitsandbytes itself, on whole tensors."""

from __future__ import annotations

import sys

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from harness import models
from hypothesis import given, settings, strategies as st
from torch import Tensor

from fsdp_zpp import NF4, Strategy

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rounded(values: Tensor, block: int) -> Tensor:
    """Return what bitsandbytes makes of a flat tensor of whole blocks."""
    codes, state = quantize_4bit(values, blocksize=block, quant_type="nf4")
    return dequantize_4bit(codes, state).flatten()


def random_values(numel: int, dtype: torch.dtype) -> Tensor:
    """Make normally distributed values, of a size that differs from block to block."""
    values = torch.randn(numel) * torch.arange(numel).div(64, rounding_mode="floor").remainder(7).add(1)
    return values.to(models.device(), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None, max_examples=20)
@given(
    rows=st.integers(1, 3), cols=st.integers(1, 3), numel=st.integers(0, 300), block=st.sampled_from([64, 128, 4096])
)
def test_each_chunk_is_rounded_as_bitsandbytes_does(
    rows: int, cols: int, numel: int, block: int, dtype: torch.dtype
) -> None:
    codec = NF4(block)
    values = random_values(rows * cols * numel, dtype)
    payload = codec.encode(values, rows, cols)
    assert payload.shape == (cols * rows, codec.nbytes(numel))
    assert codec.nbytes(numel) % 16 == 0
    if numel == 0:
        return
    out = torch.full_like(values, torch.nan)
    codec.decode(payload, out, cols, rows)
    for chunk, decoded in zip(values.view(-1, numel), out.view(-1, numel), strict=True):
        padded = torch.cat([chunk, chunk.new_zeros(-numel % block)])
        assert torch.equal(decoded, rounded(padded, block)[:numel])
    for row in range(rows):
        for col in range(cols):
            alone = codec.encode(values.view(rows, cols, numel)[row, col].clone(), 1, 1)
            assert torch.equal(payload[col * rows + row], alone[0])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_block_with_a_non_finite_value_decodes_to_nan(bad: float) -> None:
    codec, values = NF4(64), random_values(192, torch.float32)
    values[70] = bad
    out = torch.empty_like(values)
    codec.decode(codec.encode(values, 1, 1), out, 1, 1)
    assert out.view(3, 64).isnan().all(dim=1).tolist() == [False, True, False]
    assert out.view(3, 64)[::2].isfinite().all()


@pytest.mark.parametrize("name", ["weights", "gradients", "intra_gradients"])
def test_nf4_is_for_frozen_weights_alone(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} can't be NF4\(block=64\), which is for frozen weights alone"):
        Strategy("IGG", **{name: NF4()})
    assert Strategy("IGG", frozen=NF4()).frozen == NF4(64)


def test_a_payload_takes_half_a_byte_a_value_and_four_a_block() -> None:
    codec = NF4()
    assert str(codec) == "nf4(64)"
    assert codec.nbytes(2**20) == 2**19 + 4 * 2**20 // 64


def test_a_missing_bitsandbytes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "bitsandbytes")
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    with pytest.raises(ModuleNotFoundError, match=r"NF4 needs bitsandbytes: run pip install '\.\[nf4\]' in your"):
        NF4()
