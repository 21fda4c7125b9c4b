"""``ExactTail`` against the codec that it wraps: the same bytes before tails, and tails that nobody touches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness.covering import over_pairs
from torch import Tensor

from fsdp_zpp import Codec, Int4, Int4Delta, Int8
from fsdp_zpp.codecs.base import FullPrecision
from fsdp_zpp.codecs.exact_tail import ExactTail, exact_tail, sends_deltas, without_tail
from fsdp_zpp.collectives.error_buffer import ErrorBuffer, decode_sum_encode_with_feedback, encode_with_feedback
from fsdp_zpp.collectives.held_errors import Extent
from fsdp_zpp.kernels import dispatch

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
        sums = (
            payload[..., 3:]
            .clone(memory_format=torch.contiguous_format)
            .view(torch.float16)
            .float()
            .sum(dim=0)
            .mul_(scale)
        )
        out.view(cols, rows, -1).copy_(sums.view(rows, cols, -1).transpose(0, 1))


CODECS = (Int8(64), Int4(32), Int4Delta(), FullPrecision(torch.float32), FullPrecision(torch.bfloat16), Halves())
GRIDS = [(1, 1), (1, 3), (2, 3)]
NUMELS = [1, 33, 300]


def values_of(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def longer(codec: ExactTail, rows: Tensor, numel: int) -> Tensor:
    """Return rows of the wrapped codec as ``codec`` has them, with tails that differ."""
    payload = torch.zeros((*rows.shape[:-1], codec.nbytes(numel)), dtype=torch.uint8)
    payload[..., : rows.shape[-1]] = rows
    tails = codec.tails(payload)
    tails.copy_(torch.arange(tails.numel()).view_as(tails))
    return payload


def peers(codec: Codec, count: int, chunks: int, numel: int) -> Tensor:
    return torch.stack([codec.encode(values_of(chunks * numel, seed), 1, chunks) for seed in range(count)])


def check_payload(codec: ExactTail, payload: Tensor, rows: Tensor, numel: int) -> None:
    """Check a payload against the rows of the wrapped codec: the tail is behind them, and zeros between."""
    assert payload.shape == (*rows.shape[:-1], codec.nbytes(numel))
    codec.tails(payload).zero_()
    assert torch.equal(payload[..., : rows.shape[-1]], rows)
    assert not payload[..., rows.shape[-1] :].any()


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("numel", [0, *NUMELS])
def test_rows_end_in_their_tails(codec: Codec, numel: int) -> None:
    tailed = exact_tail(codec, TAIL)
    assert tailed.nbytes(numel) % 16 == 0
    assert 0 <= tailed.nbytes(numel) - codec.nbytes(numel) - 4 * TAIL < 16
    payload = torch.zeros((2, 3, tailed.nbytes(numel)), dtype=torch.uint8)
    tails = tailed.tails(payload)
    assert (tails.shape, tails.dtype) == ((2, 3, TAIL), torch.float32)
    tails.fill_(1)
    assert not payload[..., : -4 * TAIL].any()
    assert payload[..., -4 * TAIL :].view(torch.float32).eq(1).all()


@over_pairs(codec=CODECS, grid=GRIDS, numel=NUMELS)
def test_encode_and_decode(codec: Codec, grid: tuple[int, int], numel: int) -> None:
    tailed, (rows, cols) = exact_tail(codec, TAIL), grid
    values = values_of(rows * cols * numel)
    coded = codec.encode(values, rows, cols)
    check_payload(tailed, tailed.encode(values, rows, cols), coded, numel)
    expected, out = torch.empty(2, values.numel())
    codec.decode(coded, expected, cols, rows)
    payload = longer(tailed, coded, numel)
    before = payload.clone()
    tailed.decode(payload, out, cols, rows)
    assert torch.equal(out, expected)
    assert torch.equal(payload, before)


@over_pairs(codec=CODECS, grid=GRIDS, numel=NUMELS)
def test_sums(codec: Codec, grid: tuple[int, int], numel: int) -> None:
    tailed, (rows, cols) = exact_tail(codec, TAIL), grid
    coded = peers(codec, 3, rows * cols, numel)
    payload = longer(tailed, coded, numel)
    expected, out = torch.empty(2, rows * cols * numel)
    codec.decode_sum(coded, expected, rows, cols, SCALE)
    tailed.decode_sum(payload, out, rows, cols, SCALE)
    assert torch.equal(out, expected)
    assert torch.equal(tailed.sums(payload, numel, SCALE), codec.sums(coded, numel, SCALE))


@over_pairs(codec=CODECS, following=CODECS, numel=NUMELS)
def test_decode_sum_encode(codec: Codec, following: Codec, numel: int) -> None:
    coded, tailed, then = peers(codec, 3, 2, numel), exact_tail(codec, TAIL), exact_tail(following, TAIL)
    payload = longer(tailed, coded, numel)
    expected = following.encode(codec.sums(coded, numel, SCALE), 1, 2)
    check_payload(then, tailed.decode_sum_encode(payload, numel, then, SCALE), expected, numel)
    # To rows without tails, from such, and to longer ones.
    assert torch.equal(tailed.decode_sum_encode(payload, numel, following, SCALE), expected)
    check_payload(then, codec.decode_sum_encode(coded, numel, then, SCALE), expected, numel)
    check_payload(
        exact_tail(following, 40),
        tailed.decode_sum_encode(payload, numel, exact_tail(following, 40), SCALE),
        expected,
        numel,
    )


@over_pairs(codec=CODECS, following=CODECS, error_codec=[None, Int8(64)])
def test_feedback(codec: Codec, following: Codec, error_codec: Int8 | None) -> None:
    """Errors are laid out and updated as for the wrapped codec."""
    numel, tailed, then = 300, exact_tail(codec, TAIL), exact_tail(following, TAIL)
    buffers = [ErrorBuffer(BETA, error_codec).prepare(Extent(numel, (0,) * 6), torch.device("cpu")) for _ in range(2)]
    for step in range(2):
        values = values_of(6 * numel, step)
        expected = encode_with_feedback(codec, values, 2, 3, buffers[0])
        check_payload(tailed, encode_with_feedback(tailed, values, 2, 3, buffers[1]), expected, numel)
        assert torch.equal(buffers[0].state, buffers[1].state)
    coded = peers(codec, 3, 6, numel)
    expected = decode_sum_encode_with_feedback(codec, coded, numel, following, SCALE, buffers[0])
    payload = longer(tailed, coded, numel)
    payload_with_tails = decode_sum_encode_with_feedback(tailed, payload, numel, then, SCALE, buffers[1])
    check_payload(then, payload_with_tails, expected, numel)
    assert torch.equal(buffers[0].state, buffers[1].state)
    assert buffers[0].state.any() or following == FullPrecision(torch.float32)


@pytest.mark.parametrize("numel", NUMELS)
def test_deltas(numel: int) -> None:
    codec = Int4Delta(32, Int8(64))
    tailed = exact_tail(codec, TAIL)
    base, values = codec.encode(values_of(2 * numel), 1, 2), values_of(2 * numel, 1)
    long_base = longer(tailed, base, numel)
    delta = codec.encode_delta(base, values)
    long_delta = tailed.encode_delta(long_base, values)
    check_payload(tailed.changes, long_delta, delta, numel)
    whole = codec.apply_delta(base, delta, numel)
    check_payload(tailed, tailed.apply_delta(long_base, longer(tailed.changes, delta, numel), numel), whole, numel)


def test_which_codecs_send_deltas() -> None:
    sending = [codec for codec in (*CODECS, *(exact_tail(codec, 4) for codec in CODECS), None) if sends_deltas(codec)]
    assert sending == [Int4Delta(), exact_tail(Int4Delta(), 4)]
    assert exact_tail(Int4Delta(32), 4).changes == ExactTail(Int4(32), 4)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_one_instance_for_each_codec_and_tail(codec: Codec) -> None:
    assert exact_tail(codec, TAIL) is exact_tail(codec, TAIL)
    assert exact_tail(codec, TAIL) == ExactTail(codec, TAIL) != exact_tail(codec, 4)
    assert without_tail(exact_tail(codec, TAIL)) == (codec, TAIL)
    assert without_tail(codec) == (codec, 0)


def test_blockwise_codecs_take_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """So no row is copied to make room for a tail."""
    called: list[str] = []
    call = dispatch.Op.__call__

    def counted(op: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(op.__name__)
        return call(op, *args, **kwargs)

    int8, int4 = exact_tail(Int8(64), TAIL), exact_tail(Int4(32), TAIL)
    payload = int8.encode(values_of(600), 1, 2)[None].clone()
    errors = ErrorBuffer(BETA, None).prepare(Extent(300, (0, 300)), torch.device("cpu"))
    monkeypatch.setattr(dispatch.Op, "__call__", counted)
    int8.decode_sum_encode(payload, 300, int4, SCALE)
    encode_with_feedback(int4, values_of(600), 1, 2, errors)
    decode_sum_encode_with_feedback(int8, payload, 300, int4, SCALE, errors)
    assert called == ["dequantize_sum_quantize", "quantize_with_feedback", "dequantize_sum_quantize_with_feedback"]


@pytest.mark.parametrize("tail", [-4, 2, 5])
def test_tails_are_multiples_of_four(tail: int) -> None:
    with pytest.raises(ValueError, match=rf"tail is {tail}, but a row ends in a multiple of 4 fp32 values"):
        exact_tail(Int8(), tail)
