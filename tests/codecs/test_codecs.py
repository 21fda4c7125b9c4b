"""The contract of codecs, with and without tails behind their rows, and what TopK and NF4 keep of values."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from harness import models
from harness.covering import over_pairs
from hypothesis import given, settings, strategies as st
from top_k_codec import REACH, TopK, TopKOfSum
from torch import Tensor
from torch._subclasses import FakeTensorMode

from fsdp_zpp import NF4, Codec, Int2Delta, Int3, Int4, Int4Delta, Int8, Strategy, codecs
from fsdp_zpp.codecs import Delta, FullPrecision, _rotation, exact_tail, tails_of, without_tail
from fsdp_zpp.comm.error_feedback import ErrorBuffer, decode_sum_encode_with_feedback, encode_with_feedback
from fsdp_zpp.comm.flat_layout import Extent
from fsdp_zpp_kernels import ops

BETA, SCALE, TAIL = 0.8, 0.3, 12


@dataclass(frozen=True)
class Halves(Codec):
    """A user's codec: fp16 after three bytes, so that rows are not aligned; it takes contiguous payloads alone."""

    def nbytes(self, numel: int) -> int:
        return 3 + 2 * numel

    def encode(self, values: Tensor, rows: int, cols: int) -> Tensor:
        chunks = values.view(rows, cols, -1).transpose(0, 1).flatten(0, 1).half()
        return torch.cat([torch.full((rows * cols, 3), 7, dtype=torch.uint8), chunks.view(torch.uint8)], dim=1)

    def decode(self, payload: Tensor, out: Tensor, rows: int, cols: int) -> None:
        self.decode_sum(payload[None], out, rows, cols, 1.0)

    def decode_sum(self, payload: Tensor, out: Tensor, rows: int, cols: int, scale: float) -> None:
        assert payload.is_contiguous()
        if not out.numel():
            return
        halves = payload[..., 3:].clone(memory_format=torch.contiguous_format).view(torch.float16)
        sums = halves.float().sum(dim=0).mul_(scale)
        out.view(cols, rows, -1).copy_(sums.view(rows, cols, -1).transpose(0, 1))


BARE = (
    *(Int8(64), Int8(4096), Int4(32), Int3(64), Int4Delta(32, Int8(64)), Int2Delta(32, Int8(64))),
    *(FullPrecision(torch.float32), FullPrecision(torch.bfloat16)),
    *(TopK(0.1, 2, 256), TopK(0.5, 8, 128), TopKOfSum(0.1, 4, 128, 3)),
    *(NF4(64), Halves()),
)
SUMMING = [codec for codec in BARE if not isinstance(codec, NF4)]
FOLLOWING = [
    Int8(64),
    Int4(32),
    Int3(32),
    Int4Delta(32, Int8(64)),
    FullPrecision(torch.bfloat16),
    TopK(0.5, 8, 128),
    Halves(),
]
"""Codecs with kernels for a sum that is encoded again, and some of those without."""
SHAPES = [(1, 1, 300), (1, 3, 33), (3, 1, 1), (2, 3, 33), (2, 3, 300)]
"""Grids of chunks, and values in a chunk."""
TAILED = [exact_tail(codec, TAIL) for codec in FOLLOWING]
over_codecs = pytest.mark.parametrize("codec", [*BARE, *TAILED], ids=str)
over_summing = pytest.mark.parametrize("codec", [*SUMMING, *TAILED], ids=str)


def values_of(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values, some of them zeros of either sign."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    values[::7] = -0.0
    values[3::7] = 0.0
    return values.to(dtype)


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, which tell -0 from 0."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def coded(codec: Codec, payload: Tensor) -> Tensor:
    """A payload without tails, which codecs leave to their callers."""
    tail = without_tail(codec)[1]
    return payload[..., : payload.shape[-1] - 4 * tail]


def decoded(
    codec: Codec, payload: Tensor, rows: int, cols: int, numel: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    out = torch.full((rows * cols * numel,), torch.nan, dtype=dtype)
    codec.decode(payload, out, rows, cols)
    return out


def round_trip(codec: Codec, values: Tensor) -> Tensor:
    """The values of one chunk, decoded, in fp32."""
    return decoded(codec, codec.encode(values.clone(), 1, 1), 1, 1, len(values))


def peers(codec: Codec, count: int, chunks: int, numel: int) -> Tensor:
    return torch.stack([codec.encode(values_of(chunks * numel, seed), 1, chunks) for seed in range(count)])


# ---- sizes and order


@over_codecs
def test_a_chunk_takes_as_many_bytes_as_its_number_of_values_says(codec: Codec) -> None:
    for (rows, cols, numel), factor in product(SHAPES, (0.0, 1.0, 1e6, torch.nan)):
        payload = codec.encode(values_of(rows * cols * numel) * factor, rows, cols)
        assert (payload.dtype, payload.shape) == (torch.uint8, (rows * cols, codec.nbytes(numel)))
    assert torch.equal(coded(codec, codec.encode(values_of(99), 1, 1)), coded(codec, codec.encode(values_of(99), 1, 1)))
    nothing = codec.encode(torch.empty(0), 2, 3)
    assert nothing.shape == (6, codec.nbytes(0))
    if not isinstance(without_tail(codec)[0], NF4):
        codec.decode_sum(nothing[None], torch.empty(0), 2, 3, SCALE)


@over_codecs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_chunk_is_encoded_by_itself_and_the_grid_of_chunks_is_transposed(codec: Codec, dtype: torch.dtype) -> None:
    for rows, cols, numel in SHAPES:
        values = values_of(rows * cols * numel, 1, dtype)
        before = values.clone()
        payload = codec.encode(values, rows, cols).clone()
        alone = torch.cat([codec.encode(chunk.clone(), 1, 1) for chunk in values.split(numel)])
        transposed = alone.unflatten(0, (rows, cols)).transpose(0, 1).flatten(0, 1)
        assert torch.equal(coded(codec, payload), coded(codec, transposed))
        assert torch.equal(bytes_of(values), bytes_of(before))
        back = decoded(codec, payload, cols, rows, numel, dtype)
        each = [decoded(codec, row[None], 1, 1, numel) for row in alone]
        assert torch.equal(bytes_of(back), bytes_of(torch.cat(each).to(dtype)))


@over_codecs
def test_rows_that_lie_apart_are_decoded_in_order(codec: Codec) -> None:
    numel = 256 if isinstance(without_tail(codec)[0], NF4) else 300
    payload = codec.encode(values_of(3 * numel), 1, 3)
    apart = torch.full((3, payload.shape[1] + 32), 0xAB, dtype=torch.uint8)[:, 16:-16]
    apart.copy_(payload)
    out = torch.full((3, numel), torch.nan)
    codec.decode_rows(apart, out)
    assert torch.equal(out.view(-1), decoded(codec, payload, 3, 1, numel))


def test_full_precision_takes_values_that_lie_apart_as_they_are() -> None:
    for codec, dtype in product(map(FullPrecision, (torch.float32, torch.bfloat16)), (torch.float32, torch.bfloat16)):
        for rows, cols, numel in SHAPES:
            values = values_of(2 * rows * cols * numel, dtype=dtype)[::2]
            expected = values.to(codec.dtype).reshape(rows, cols, numel).transpose(0, 1)
            assert torch.equal(bytes_of(codec.encode(values, rows, cols)), bytes_of(expected))


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
@over_codecs
def test_what_is_not_finite_is_seen_and_stays_in_its_block(codec: Codec, bad: float) -> None:
    block, place = without_tail(codec)[0].block_numel or 1, 260
    values = values_of(700)
    fine = round_trip(codec, values)
    values[place] = bad
    after = round_trip(codec, values)
    hit = torch.arange(700) // block == place // block
    assert not after[hit].isfinite().any()
    assert after[hit].isnan().all() or not isinstance(without_tail(codec)[0], NF4 | TopK)
    assert torch.equal(after[~hit], fine[~hit])
    if not isinstance(without_tail(codec)[0], NF4):
        other = codec.encode(values_of(700, 1), 1, 1)
        sums = codec.sums(torch.stack([codec.encode(values, 1, 1), other]), 700, SCALE)
        assert torch.equal(sums.isfinite(), ~hit)


# ---- sums


@over_summing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_those_of_what_peers_sent_in_their_order(codec: Codec, dtype: torch.dtype) -> None:
    for (rows, cols, numel), count in product(SHAPES, (1, 3)):
        payload = peers(codec, count, rows * cols, numel)
        before = payload.clone()
        total = decoded(codec, payload[0], rows, cols, numel)
        for row in payload[1:]:
            total += decoded(codec, row, rows, cols, numel)
        out = torch.full_like(total, torch.nan, dtype=dtype)
        codec.decode_sum(payload, out, rows, cols, SCALE)
        bare = without_tail(codec)[0]
        if bare.mixes_values:  # blocks are rounded to bf16 twice
            exact = (total * SCALE).view(-1, numel)
            pieces = (each.split(bare.block_numel, dim=1) for each in (out.float().view(-1, numel) - exact, exact))
            for some, of in zip(*pieces, strict=True):
                assert (some.square().sum(1) <= 2**-12 * of.square().sum(1) + 1e-9).all()
        else:
            assert torch.equal(out, (total * SCALE).to(dtype))
        in_order = torch.empty_like(total)
        codec.decode_sum(payload, in_order, 1, rows * cols, SCALE)
        assert torch.equal(codec.sums(payload, numel, SCALE), in_order)
        assert torch.equal(payload, before)


@over_pairs(
    rest=False,
    codec=FOLLOWING,
    following=FOLLOWING,
    tails=[(0, 0), (TAIL, 0), (0, TAIL), (TAIL, 40), (TAIL, TAIL)],
    kept_in=[None, Int8(64)],
)
def test_sums_are_encoded_as_any_values_are_and_corrected_after_the_scale(
    codec: Codec, following: Codec, tails: tuple[int, int], kept_in: Int8 | None
) -> None:
    source, then = (exact_tail(each, n) if n else each for each, n in zip((codec, following), tails, strict=True))
    for numel in (1, 33, 300):
        payload = peers(source, 3, 2, numel)
        sums = source.sums(payload, numel, SCALE)
        encoded = source.decode_sum_encode(payload, numel, then, SCALE)
        assert encoded.shape == (2, then.nbytes(numel))
        assert torch.equal(coded(then, encoded), coded(then, then.encode(sums.clone(), 1, 2)))
        fused, apart = errors_of(2, numel, kept_in), errors_of(2, numel, kept_in)
        encoded = decode_sum_encode_with_feedback(source, payload, numel, then, SCALE, fused)
        assert torch.equal(coded(then, encoded), coded(then, encode_with_feedback(then, sums, 1, 2, apart)))
        assert torch.equal(fused.state, apart.state)


@pytest.mark.parametrize("block", [64, 128, 512])
def test_three_bits_lose_as_much_of_other_values_as_of_normal_ones(block: int) -> None:
    normal = torch.randn(block * 2**9, generator=torch.Generator().manual_seed(0))
    for values, lost in ((normal, 0.002), (normal**3, 0.015), (normal + 3, 0.008), (torch.ones(block), 0.01)):
        back, square = round_trip(Int3(block), values).double(), values.double().square().sum()
        assert ((back - values).square().sum() / square).item() == pytest.approx(0.039, abs=lost)
        assert ((back * values).sum() / square).item() == pytest.approx(1, abs=0.03)


def test_rotations_are_orthogonal_and_the_same_everywhere() -> None:
    for power in range(5, 13):
        matrix = _rotation(2**power, torch.empty(0)).double()
        assert torch.equal(matrix @ matrix.t(), (1 + power % 2) * torch.eye(2**power, dtype=torch.float64))
    assert sum(int(sign) << at for at, sign in enumerate(_rotation(32, torch.empty(0))[:, 0] > 0)) == 2367410956


def test_a_rotation_that_is_made_while_tracing_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "_ROTATIONS", {})
    for context in (FakeTensorMode(), torch.device("meta"), torch.inference_mode()):
        with context:
            assert Int3(32).encode(torch.zeros(64, device="cpu"), 1, 1).shape == (1, 48)
        assert (round_trip(Int3(32), torch.ones(64)) - 1).abs().max() < 0.5


def test_a_block_is_rotated_alike_among_any_number_of_blocks() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for block, some in product((32, 128, 1024), (1, 2, 3, 17, 64, 333)):
        codec, values = Int3(block), (values_of(500 * block) ** 3).to(device)
        assert torch.equal(codec.encode(values[: some * block], some, 1), codec.encode(values, 500, 1)[:some])
        few, many = torch.empty(some * block, device=device), torch.empty_like(values)
        codec.decode(codec.encode(values[: some * block], some, 1), few, 1, some)
        codec.decode(codec.encode(values, 500, 1), many, 1, 500)
        assert torch.equal(few, many[: some * block])


def test_a_codec_that_mixes_values_must_have_blocks() -> None:
    with patch.object(Halves, "mixes_values", True), pytest.raises(ValueError, match="its block_numel must not be 0"):
        Strategy("IGG", gradients=Halves())


def test_nf4_can_not_be_summed_and_is_for_frozen_weights_alone() -> None:
    with pytest.raises(NotImplementedError, match="NF4 can't sum payloads"):
        NF4().decode_sum(torch.zeros(1, 1, 48, dtype=torch.uint8), torch.empty(64), 1, 1, 1.0)
    for name in ("weights", "gradients", "intra_gradients"):
        with pytest.raises(ValueError, match=rf"{name} can't be NF4\(block=64\), which is for frozen weights alone"):
            Strategy("IGG", **{name: NF4()})
    assert Strategy("IGG", frozen=NF4()).frozen == NF4(64)


# ---- error feedback


def errors_of(chunks: int, numel: int, codec: Int8 | None, beta: float = BETA) -> ErrorBuffer:
    """Errors that an earlier step has left."""
    buffer = ErrorBuffer(beta, codec).prepare(Extent(numel, (0,) * chunks), torch.device("cpu"))
    buffer.write(0.1 * values_of(chunks * numel, 7), chunks)
    return buffer


@over_summing
@pytest.mark.parametrize("kept_in", [None, Int8(64)], ids=str)
def test_errors_are_added_before_and_what_is_left_out_is_kept(codec: Codec, kept_in: Int8 | None) -> None:
    for rows, cols, numel in (*SHAPES, (2, 1, 4223)):
        chunks, values = rows * cols, values_of(rows * cols * numel)
        errors = errors_of(chunks, numel, kept_in)
        old = errors.read().clone()
        payload = encode_with_feedback(codec, values.clone(), rows, cols, errors)
        corrected = values.view(rows, cols, numel).transpose(0, 1).flatten() + old
        assert torch.equal(coded(codec, payload), coded(codec, codec.encode(corrected.clone(), 1, chunks)))
        left_out = corrected.double() - decoded(codec, payload, 1, chunks, numel).double()
        new = BETA * old.double() + (1 - BETA) * left_out
        precision = new.abs().max().item() * (1e-6 if kept_in is None else 1 / 250)
        torch.testing.assert_close(errors.read().double(), new, rtol=0, atol=precision)


@over_summing
@pytest.mark.parametrize("kept_in", [None, Int8(64)], ids=str)
def test_what_is_not_finite_leaves_the_errors_of_its_block(codec: Codec, kept_in: Int8 | None) -> None:
    block, values, errors = without_tail(codec)[0].block_numel or 1, values_of(8192), errors_of(1, 8192, kept_in)
    values[300] = torch.inf
    old = errors.read().clone()
    encode_with_feedback(codec, values, 1, 1, errors)
    hit, new = torch.arange(8192) // block == 300 // block, errors.read()
    assert new.isfinite().all()
    if kept_in is None or block % kept_in.block == 0:
        torch.testing.assert_close(new[hit], old[hit], rtol=1e-6, atol=0)
    assert not torch.equal(new[~hit], old[~hit])


# ---- tails


@pytest.mark.parametrize("codec", BARE, ids=str)
def test_a_tail_follows_the_codecs_bytes_and_is_the_callers(codec: Codec) -> None:
    tailed = exact_tail(codec, TAIL)
    assert tailed is exact_tail(codec, TAIL) != exact_tail(codec, 4)
    assert without_tail(tailed) == (codec, TAIL)
    assert without_tail(codec) == (codec, 0)
    for rows, cols, numel in SHAPES:
        values, nbytes = values_of(rows * cols * numel), codec.nbytes(numel)
        assert tailed.nbytes(numel) % 16 == 0
        assert 0 <= tailed.nbytes(numel) - nbytes - 4 * TAIL < 16
        payload, bare = tailed.encode(values, rows, cols), codec.encode(values, rows, cols)
        assert torch.equal(payload[:, :nbytes], bare)
        assert not payload[:, nbytes : -4 * TAIL].any()
        tails = tails_of(payload, TAIL)
        assert (tails.shape, tails.dtype) == ((rows * cols, TAIL), torch.float32)
        for filling in (0.0, 1.0, torch.nan):
            tails.fill_(filling)
            expected, out = (decoded(*each, cols, rows, numel) for each in ((codec, bare), (tailed, payload)))
            assert torch.equal(out, expected)
        assert payload[:, -4 * TAIL :].view(torch.float32).isnan().all()


def test_blockwise_codecs_take_one_kernel_with_their_tails() -> None:
    """So no row is copied to make room for a tail."""
    int8, int4 = exact_tail(Int8(64), TAIL), exact_tail(Int4(32), TAIL)
    payload, errors = peers(int8, 1, 2, 300), errors_of(2, 300, None)
    with patch.object(ops.Op, "__call__", autospec=True, side_effect=ops.Op.__call__) as called:
        int8.decode_sum_encode(payload, 300, int4, SCALE)
        encode_with_feedback(int4, values_of(600), 1, 2, errors)
        decode_sum_encode_with_feedback(int8, payload, 300, int4, SCALE, errors)
    names = [call.args[0].__name__ for call in called.call_args_list]
    assert names == ["dequantize_sum_quantize", "quantize_with_feedback", "dequantize_sum_quantize_with_feedback"]


# ---- deltas


@pytest.mark.parametrize("numel", [1, 33, 300])
@pytest.mark.parametrize("tail", [0, TAIL])
@pytest.mark.parametrize("codec", [Int4Delta(32, Int8(64)), Int2Delta(32, Int8(64))], ids=str)
def test_a_delta_is_the_encoded_change_and_is_added_to_what_the_base_decodes_to(
    codec: Delta, numel: int, tail: int
) -> None:
    values = values_of(2 * numel, 1)
    sender = exact_tail(codec, tail) if tail else codec
    base = sender.encode(values_of(2 * numel), 1, 2)
    held = decoded(codec.whole, coded(sender, base).contiguous(), 1, 2, numel)
    delta = codec.encode_delta(base, values, tail)
    changes = exact_tail(codec.changes, tail) if tail else codec.changes
    assert torch.equal(coded(changes, delta), codec.changes.encode(values - held, 1, 2))
    change = decoded(codec.changes, coded(changes, delta).contiguous(), 1, 2, numel)
    changed = codec.apply_delta(base, delta, numel, tail)
    assert torch.equal(coded(sender, changed), codec.whole.encode(held + change, 1, 2))


# ---- NF4 beside bitsandbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(deadline=None, max_examples=12)
@given(chunks=st.integers(1, 3), numel=st.integers(1, 300), block=st.sampled_from([64, 128, 4096]))
def test_nf4_rounds_each_chunk_as_bitsandbytes_does(chunks: int, numel: int, block: int, dtype: torch.dtype) -> None:
    # The size of values differs from block to block.
    sizes = torch.arange(chunks * numel).div(64, rounding_mode="floor").remainder(7).add(1)
    codec, values = NF4(block), (values_of(chunks * numel) * sizes).to(models.device(), dtype)
    out = torch.full_like(values, torch.nan)
    codec.decode(codec.encode(values, 1, chunks), out, 1, chunks)
    for chunk, ours in zip(values.split(numel), out.split(numel), strict=True):
        padded = torch.cat([chunk, chunk.new_zeros(-numel % block)])
        codes, state = quantize_4bit(padded, blocksize=block, quant_type="nf4")
        assert torch.equal(ours, dequantize_4bit(codes, state).flatten()[:numel])


def test_a_missing_bitsandbytes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "bitsandbytes")
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    with pytest.raises(ModuleNotFoundError, match=r"NF4 needs bitsandbytes: run pip install '\.\[nf4\]' in your"):
        NF4()


# ---- TopK beside an oracle that reads its payloads bit by bit

BITS = (2, 4, 8)


def heavy_tailed(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of which a few are far larger than the others, a tenth of them 0."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) / torch.rand(numel, generator=generator).add(0.01)
    return (values * (torch.rand(numel, generator=generator) > 0.1)).to(dtype)


def read(codec: TopK, row: bytes, numel: int) -> dict[int, list[float]]:
    """An oracle of the format: the values that a row of bytes has for each place, one word after the other."""
    if not numel:
        assert row == b""
        return {}
    levels = torch.frombuffer(bytearray(row), dtype=torch.float32)
    whole, rest = divmod(numel, codec.block)
    words = [(block, codec.kept(codec.block)) for block in range(whole)] + [(whole, codec.kept(rest))] * bool(rest)
    start, width = 8 * 8 * len(words), 12 + codec.bits
    bits = int.from_bytes(row, "little")
    found: dict[int, list[float]] = {}
    for block, count in words:
        smallest, ratio = levels[2 * block].double().item(), levels[2 * block + 1].double().item()
        before = -1
        for _ in range(count):
            word = bits >> start & ((1 << width) - 1)
            assert word >= before
            before, start = word, start + width
            step = word & ((1 << (codec.bits - 1)) - 1)
            sign = -1 if word >> (codec.bits - 1) & 1 else 1
            found.setdefault(block * codec.block + (word >> codec.bits), []).append(sign * smallest * ratio**step)
    assert bits >> start == 0  # what pads the row
    return found


def expected_places(codec: TopK, values: Tensor) -> set[int]:
    """An oracle of what is kept: the places of the largest, of those that reach far enough and are not 0."""
    places, most = set(), max(1, round(codec.fraction * codec.block))
    for start in range(0, len(values), codec.block):
        sizes = [abs(value) for value in values[start : start + codec.block].tolist()]
        by_size = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)[:most]
        places |= {start + place for place in by_size if sizes[place] * REACH >= sizes[by_size[0]] > 0}
    return places


@settings(deadline=None, max_examples=40)
@given(
    codec=st.builds(
        TopK, st.sampled_from([0.001, 0.02, 0.5]), st.sampled_from(BITS), st.sampled_from([128, 256, 4096])
    ),
    numel=st.one_of(st.integers(0, 700), st.sampled_from([4095, 4096, 4097, 9000])),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_the_largest_values_of_each_block_are_sent_within_half_a_step_and_no_others(
    codec: TopK, numel: int, dtype: torch.dtype, seed: int
) -> None:
    values = heavy_tailed(numel, seed, dtype)
    payload = codec.encode(values, 1, 1)
    assert payload.shape == (1, codec.nbytes(numel))
    found = read(codec, payload.numpy().tobytes(), numel)
    decoded = round_trip(codec, values)
    nonzero = set(decoded.nonzero().flatten().tolist())
    wanted, sizes = expected_places(codec, values), values.float().abs()
    # Any of equal values may be kept.
    assert sorted(sizes[list(nonzero)].tolist()) == sorted(sizes[list(wanted)].tolist())
    assert nonzero == {place for place, sent in found.items() if sent[0] != 0}
    for place in nonzero:
        assert len(set(found[place])) == 1
        assert decoded[place].item() == pytest.approx(found[place][0], rel=1e-5)
        assert decoded[place].sign() == values[place].sign()
    for block, levels in zip(values.float().split(codec.block), decoded.split(codec.block), strict=True):
        check_levels(codec, block[levels != 0].abs().double(), levels[levels != 0].abs().double())


def check_levels(codec: TopK, sizes: Tensor, levels: Tensor) -> None:
    """Fail unless the levels of a block are within half a step of the sizes that were kept."""
    if not len(sizes):
        return
    if codec.bits == 2:
        assert len(levels.unique()) <= 2
        assert levels.sum().item() == pytest.approx(sizes.sum().item(), rel=1e-5)
    else:
        half = (sizes.max() / sizes.min()).log() / (2 ** (codec.bits - 1) - 1) / 2
        assert (levels / sizes).log().abs().max() <= half * (1 + 1e-4) + 1e-5


def best_two_levels(sizes: Tensor) -> float:
    """The least squared error of two levels, by all ways to split sorted values."""
    ordered = sizes.double().sort().values
    return min(
        ((ordered[:n] - ordered[:n].mean()) ** 2).sum().item() + ((ordered[n:] - ordered[n:].mean()) ** 2).sum().item()
        for n in range(1, len(ordered))
    )


def test_two_levels_are_near_the_best() -> None:
    for seed in range(8):
        values = heavy_tailed(4096, seed)
        decoded = round_trip(TopK(bits=2), values)
        sizes, levels = values[decoded != 0].abs(), decoded[decoded != 0].abs()
        assert ((levels - sizes).double() ** 2).sum().item() <= 1.3 * best_two_levels(sizes)


@pytest.mark.parametrize("bits", BITS)
def test_the_largest_numbers_come_through_and_the_smallest_as_zeros(bits: int) -> None:
    for largest in (0.0, 1e-38, 1e-20, 1.0, 3e38):
        values = torch.zeros(5000)
        values[[3, 7, 4500]] = torch.tensor([largest, -largest, largest / 2])
        decoded = round_trip(TopK(bits=bits), values)
        assert torch.allclose(decoded, values if largest > 1e-30 else torch.zeros_like(values), rtol=1e-5, atol=0)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [1, 3, 16])
def test_a_sum_keeps_all_that_its_peers_kept(bits: int, count: int) -> None:
    codec, numel = TopK(bits=bits), 2 * 4096 + 100
    back = codec.for_sum_of(count)
    mean = sum(round_trip(codec, heavy_tailed(numel, peer)) for peer in range(count)) / count
    assert isinstance(mean, Tensor)
    if isinstance(back, TopKOfSum):
        assert back.nbytes(4096) <= Int4(128).nbytes(4096) * (2 if bits == 8 else 1)
        sizes = mean.abs()
        blocks = [slice(start, start + 4096) for start in range(0, numel, 4096)]
        reached = torch.cat([sizes[each] * REACH >= sizes[each].max() for each in blocks])
        assert torch.equal(round_trip(back, mean) != 0, (mean != 0) & reached)
    else:
        assert back == (Int8(128) if bits == 8 else Int4(128))
        assert back.nbytes(4096) < TopKOfSum(0.02, bits, 4096, count).nbytes(4096)
    assert Int4(128).for_sum_of(7) == Int4(128)


# ---- arguments


def test_bytes_of_payloads() -> None:
    assert [codec.nbytes(2**20) for codec in (Int8(256), Int4(128), Int3(128))] == [
        *(2**20 + 2**14, 2**19 + 2**15, 3 * 2**17 + 2**15)
    ]
    assert NF4().nbytes(2**20) == 2**19 + 4 * 2**20 // 64
    # 82 of 4096 values in 16 bits each, and two fp32 numbers.
    assert TopK().nbytes(4096) == math.ceil((82 * 2 + 8) / 16) * 16 == 176
    assert TopK().nbytes(4096 * 1000) == (82 * 2 + 8) * 1000
    assert TopK(bits=2).nbytes(4096 * 1000) == 82 * 1000 * 14 // 8 + 8 * 1000 + 4
    assert [str(codec) for codec in (Int8(), Int4(), Int3(), NF4())] == [
        *("int8(256)", "int4(128)", "int3(128)", "nf4(64)")
    ]


@pytest.mark.parametrize(
    ("codec", "least"), [(Int8, 32), (Int4, 32), (Int3, 32), (Int4Delta, 32), (Int2Delta, 32), (NF4, 64)]
)
def test_blocks_are_powers_of_two_in_a_codecs_range(codec: Any, least: int) -> None:
    most = 1024 if codec is Int3 else 4096
    for block in (least, most):
        assert codec(block=block).block == block
    for block in (0, least // 2, least + 1, 1000, 2 * most, -256):
        with pytest.raises(ValueError, match=rf"(?s)power of two.*{block}|{block}.*power of two"):
            codec(block=block)
    for block in (float(least), "256", True, None):
        with pytest.raises(TypeError, match="block must be an int, got"):
            codec(block=block)


def test_the_whole_of_a_difference_codec_is_int8() -> None:
    with pytest.raises(TypeError, match="whole must be an Int8"):
        Int4Delta(whole=Int4(128))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fraction": 0}, r"TopK's fraction must be a number in \(0, 1\], such as 0.02, got 0"),
        ({"fraction": True}, "got True"),
        ({"fraction": float("nan")}, "got nan"),
        ({"bits": 3}, "TopK's bits must be 2, 4 or 8, got 3"),
    ],
)
def test_arguments_of_top_k_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TopK(**arguments)
