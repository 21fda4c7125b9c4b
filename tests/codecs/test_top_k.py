"""``TopK`` beside an oracle that reads its payloads bit by bit, and the laws of what is kept and what is not."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from fsdp_zpp import Codec, Int4, Int8, TopK
from fsdp_zpp.codecs.top_k import REACH, TopKOfSum

BITS = (2, 4, 8)
GRIDS = [(1, 1), (1, 3), (3, 1), (2, 3)]
codecs = st.builds(
    TopK, st.sampled_from([0.001, 0.02, 0.1, 0.5]), st.sampled_from(BITS), st.sampled_from([128, 256, 4096])
)
numels = st.one_of(st.integers(0, 700), st.sampled_from([4095, 4096, 4097, 9000]))
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def heavy_tailed(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of which a few are far larger than the others, a tenth of them 0."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) / torch.rand(numel, generator=generator).add(0.01)
    return (values * (torch.rand(numel, generator=generator) > 0.1)).to(dtype)


def round_trip(codec: Codec, values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What one chunk decodes to."""
    out = torch.full_like(values, torch.nan, dtype=dtype)
    codec.decode(codec.encode(values, 1, 1), out, 1, 1)
    return out


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
    places = set()
    for start in range(0, len(values), codec.block):
        sizes = [abs(value) for value in values[start : start + codec.block].tolist()]
        by_size = sorted(range(len(sizes)), key=lambda place: -sizes[place])[
            : max(1, round(codec.fraction * codec.block))
        ]
        places |= {start + place for place in by_size if sizes[place] * REACH >= sizes[by_size[0]] > 0}
    return places


@settings(deadline=None, max_examples=60)
@given(codec=codecs, numel=numels, dtype=dtypes, seed=st.integers(0, 99))
def test_the_largest_values_of_each_block_are_sent_and_no_others(
    codec: TopK, numel: int, dtype: torch.dtype, seed: int
) -> None:
    values = heavy_tailed(numel, seed, dtype)
    payload = codec.encode(values, 1, 1)
    assert payload.shape == (1, codec.nbytes(numel))
    found = read(codec, payload.numpy().tobytes(), numel)
    decoded = round_trip(codec, values)
    nonzero = set(decoded.nonzero().flatten().tolist())
    wanted, sizes = expected_places(codec, values), values.float().abs()
    # Of equal values, any may be kept.
    assert sorted(sizes[list(nonzero)].tolist()) == sorted(sizes[list(wanted)].tolist())
    assert nonzero == {place for place, sent in found.items() if sent[0] != 0}
    for place in nonzero:
        assert len(set(found[place])) == 1
        assert decoded[place].item() == pytest.approx(found[place][0], rel=1e-5)
        assert decoded[place].sign() == values[place].sign()


@settings(deadline=None, max_examples=40)
@given(
    codec=codecs,
    numel=numels.filter(bool),
    grid=st.sampled_from(GRIDS),
    seed=st.integers(0, 99),
)
def test_kept_values_are_within_half_a_step(codec: TopK, numel: int, grid: tuple[int, int], seed: int) -> None:
    rows, cols = grid
    values = heavy_tailed(rows * cols * numel, seed)
    payload = codec.encode(values, rows, cols)
    assert payload.shape == (rows * cols, codec.nbytes(numel))
    out = torch.empty_like(values)
    codec.decode(payload, out, cols, rows)
    for kept, sent in zip(values.split(numel), out.split(numel), strict=True):
        for block, decoded in zip(kept.split(codec.block), sent.split(codec.block), strict=True):
            sizes, levels = block[decoded != 0].abs().double(), decoded[decoded != 0].abs().double()
            if not len(sizes):
                assert not block.any()
            elif codec.bits == 2:
                assert len(levels.unique()) <= 2
                assert levels.sum().item() == pytest.approx(sizes.sum().item(), rel=1e-5)
            else:
                span = (sizes.max() / sizes.min()).log()
                half = span / (2 ** (codec.bits - 1) - 1) / 2
                assert (levels / sizes).log().abs().max() <= half * (1 + 1e-4) + 1e-5


def best_two_levels(sizes: Tensor) -> float:
    """The least squared error of two levels, by all ways to split sorted values."""
    ordered = sizes.double().sort().values
    return min(
        ((ordered[:n] - ordered[:n].mean()) ** 2).sum().item() + ((ordered[n:] - ordered[n:].mean()) ** 2).sum().item()
        for n in range(1, len(ordered))
    )


@pytest.mark.parametrize("seed", range(8))
def test_two_bits_come_near_the_best_two_levels(seed: int) -> None:
    values = heavy_tailed(4096, seed)
    decoded = round_trip(TopK(bits=2), values)
    kept = decoded != 0
    error = ((decoded - values)[kept].double() ** 2).sum().item()
    assert error <= 1.3 * best_two_levels(values[kept].abs())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("seed", range(4))
def test_levels_are_nearer_than_equal_steps_of_the_largest(bits: int, seed: int) -> None:
    values = heavy_tailed(4096, seed)
    decoded = round_trip(TopK(bits=bits), values)
    kept = decoded != 0
    sizes, count = values[kept].abs(), 2 ** (bits - 1)
    unit = sizes.max() / (2 * count - 1)
    equal = (2 * ((sizes / unit - 1) / 2).round().clamp(0, count - 1) + 1) * unit
    assert ((decoded[kept].abs() - sizes) ** 2).sum() < ((equal - sizes) ** 2).sum()


@settings(deadline=None, max_examples=30)
@given(
    codec=codecs,
    numel=st.integers(0, 700),
    peers=st.integers(1, 4),
    grid=st.sampled_from(GRIDS),
    dtype=dtypes,
    scale=st.sampled_from([1.0, 0.25, 1 / 3]),
)
def test_sums_are_those_of_what_peers_sent(
    codec: TopK, numel: int, peers: int, grid: tuple[int, int], dtype: torch.dtype, scale: float
) -> None:
    rows, cols = grid
    payloads = torch.stack([codec.encode(heavy_tailed(rows * cols * numel, peer), cols, rows) for peer in range(peers)])
    sums, out = torch.zeros(rows * cols * numel), torch.empty(rows * cols * numel, dtype=dtype)
    for payload in payloads:
        decoded = torch.empty_like(sums)
        codec.decode(payload, decoded, rows, cols)
        sums += decoded
    codec.decode_sum(payloads, out, rows, cols, scale)
    assert torch.equal(out, (sums * scale).to(dtype))
    assert torch.equal(codec.sums(payloads.view(peers, rows * cols, -1), numel, 1.0).sort().values, sums.sort().values)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_block_that_is_not_finite_decodes_to_nan(bits: int, bad: float) -> None:
    codec, values = TopK(0.02, bits, 128), heavy_tailed(300)
    values[130] = bad
    finite = round_trip(codec, values)
    assert finite[128:256].isnan().all()
    assert finite[:128].isfinite().all()
    assert finite[256:].isfinite().all()
    sums = torch.empty_like(values)
    codec.decode_sum(torch.stack([codec.encode(each, 1, 1) for each in (values, heavy_tailed(300))]), sums, 1, 1, 0.5)
    assert torch.equal(sums.isnan(), finite.isnan())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("largest", [0.0, 1e-38, 1e-20, 1.0, 3e38])
def test_extremes(bits: int, largest: float) -> None:
    values = torch.zeros(5000)
    values[[3, 7, 4500]] = torch.tensor([largest, -largest, largest / 2])
    decoded = round_trip(TopK(bits=bits), values)
    assert torch.allclose(decoded, values if largest > 1e-30 else torch.zeros_like(values), rtol=1e-5, atol=0)


@pytest.mark.parametrize("bits", BITS)
def test_what_follows_a_block_does_not_matter_to_it(bits: int) -> None:
    codec, values = TopK(0.1, bits, 256), heavy_tailed(100)
    padded = torch.cat((values, torch.zeros(156), heavy_tailed(500, 1)))
    assert torch.equal(round_trip(codec, values), round_trip(codec, padded)[:100])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("peers", [1, 2, 3, 16])
def test_a_sum_keeps_all_that_its_peers_kept(bits: int, peers: int) -> None:
    codec = TopK(bits=bits)
    back = codec.for_sum_of(peers)
    numel = 2 * 4096 + 100
    mean = sum(round_trip(codec, heavy_tailed(numel, peer)) for peer in range(peers)) / peers
    assert isinstance(mean, Tensor)
    if isinstance(back, TopKOfSum):
        assert back.nbytes(4096) <= Int4(128).nbytes(4096) * (2 if bits == 8 else 1)
        sizes = mean.abs()
        blocks = [slice(start, start + 4096) for start in range(0, numel, 4096)]
        reached = torch.cat([sizes[each] * REACH >= sizes[each].max() for each in blocks])
        assert torch.equal(round_trip(back, mean) != 0, (mean != 0) & reached)
    else:
        assert back == (Int8(128) if bits == 8 else Int4(128))
        assert back.nbytes(4096) < TopKOfSum(0.02, bits, 4096, peers).nbytes(4096)


def test_other_codecs_send_sums_as_they_send_summands() -> None:
    assert Int4(128).for_sum_of(7) == Int4(128)


@pytest.mark.parametrize("scale", [1.0, 1e6, 0.0, torch.nan])
def test_sizes_depend_on_the_number_of_values_alone(scale: float) -> None:
    codec = TopK(0.03, 2, 512)
    assert codec.encode(heavy_tailed(1000) * scale, 1, 1).shape == (1, codec.nbytes(1000))


def test_defaults_take_a_twelfth_of_int4() -> None:
    # 82 of 4096 values in 16 bits each, and two fp32 numbers.
    assert TopK().nbytes(4096) == math.ceil((82 * 2 + 8) / 16) * 16 == 176
    assert TopK().nbytes(4096 * 1000) == (82 * 2 + 8) * 1000
    assert TopK(bits=2).nbytes(4096 * 1000) == 82 * 1000 * 14 // 8 + 8 * 1000 + 4


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"fraction": 0}, ValueError, r"TopK's fraction must be a number in \(0, 1\], such as 0.02, got 0"),
        ({"fraction": 2}, ValueError, "got 2"),
        ({"fraction": True}, ValueError, "got True"),
        ({"fraction": float("nan")}, ValueError, "got nan"),
        ({"bits": 3}, ValueError, "TopK's bits must be 2, 4 or 8, got 3"),
        ({"bits": 4.0}, ValueError, "got 4.0"),
        ({"block": 64}, ValueError, "TopK's block must be a power of two from 128 to 4096, got 64"),
        ({"block": 1000}, ValueError, "got 1000"),
        ({"block": 8192}, ValueError, "got 8192"),
        ({"block": 256.0}, TypeError, "TopK's block must be an int, got 256.0"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TopK(**arguments)  # type: ignore[arg-type]
