"""``TopK`` beside an oracle that reads its payloads bit by bit: which values are kept, and how near they come."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from fsdp_zpp import Codec, Int4, Int8, TopK
from fsdp_zpp.codecs.top_k import REACH, TopKOfSum

BITS = (2, 4, 8)
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


def round_trip(codec: Codec, values: Tensor) -> Tensor:
    """What one chunk decodes to."""
    out = torch.full_like(values, torch.nan, dtype=torch.float32)
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


@settings(deadline=None, max_examples=40)
@given(codec=codecs, numel=numels, dtype=dtypes, seed=st.integers(0, 99))
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
    # Of equal values, any may be kept.
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


@pytest.mark.parametrize("bits", BITS)
def test_levels_are_nearer_than_equal_steps_and_two_of_them_near_the_best(bits: int) -> None:
    for seed in range(8):
        values = heavy_tailed(4096, seed)
        decoded = round_trip(TopK(bits=bits), values)
        kept = decoded != 0
        sizes, count = values[kept].abs(), 2 ** (bits - 1)
        unit = sizes.max() / (2 * count - 1)
        equal = (2 * ((sizes / unit - 1) / 2).round().clamp(0, count - 1) + 1) * unit
        error = ((decoded[kept].abs() - sizes).double() ** 2).sum().item()
        assert error < ((equal - sizes) ** 2).sum()
        assert bits > 2 or error <= 1.3 * best_two_levels(sizes)


@pytest.mark.parametrize("bits", BITS)
def test_the_largest_numbers_come_through_and_the_smallest_as_zeros(bits: int) -> None:
    for largest in (0.0, 1e-38, 1e-20, 1.0, 3e38):
        values = torch.zeros(5000)
        values[[3, 7, 4500]] = torch.tensor([largest, -largest, largest / 2])
        decoded = round_trip(TopK(bits=bits), values)
        assert torch.allclose(decoded, values if largest > 1e-30 else torch.zeros_like(values), rtol=1e-5, atol=0)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("peers", [1, 3, 16])
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
    assert Int4(128).for_sum_of(7) == Int4(128)
