"""Payload format: sizes, and bytes written down by hand."""

import struct

import pytest
import torch

from fsdp_zpp.kernels import PayloadLayout, quantize


@pytest.mark.parametrize(
    ("bits", "block", "numel", "codes", "offset", "nbytes"),
    [
        (8, 32, 0, 0, 0, 0),
        (8, 32, 1, 1, 16, 32),
        (8, 32, 16, 16, 16, 32),
        (8, 32, 17, 17, 32, 48),
        (8, 32, 160, 160, 160, 192),
        (4, 32, 1, 1, 16, 32),
        (4, 32, 33, 17, 32, 48),
        (4, 4096, 4096, 2048, 2048, 2064),
        (8, 256, 2**33, 2**33, 2**33, 2**33 + 2**27),
    ],
)
def test_sizes(bits: int, block: int, numel: int, codes: int, offset: int, nbytes: int) -> None:
    layout = PayloadLayout(bits, block)
    assert (layout.codes_nbytes(numel), layout.scales_offset(numel), layout.nbytes(numel)) == (codes, offset, nbytes)
    assert layout.blocks(numel) == -(-numel // block)


@pytest.mark.parametrize(("numel", "offset"), [(0, 0), (1, 32), (33, 48), (4096, 2560)])
@pytest.mark.parametrize("tail", [4, 20])
def test_a_row_ends_in_its_tail(numel: int, offset: int, tail: int) -> None:
    layout = PayloadLayout(4, 32, tail)
    assert (layout.tail_offset(numel), layout.nbytes(numel)) == (offset, offset + 4 * tail)
    payload = torch.zeros(2, 3, layout.nbytes(numel), dtype=torch.uint8)
    tails = layout.tails(payload, numel)
    assert (tails.shape, tails.dtype) == ((2, 3, tail), torch.float32)
    tails.fill_(1)
    assert not payload[..., :offset].any()
    assert payload[..., offset:].flatten().tolist() == list(struct.pack("<f", 1)) * 6 * tail
    one = PayloadLayout(4, 32, tail).tails(payload[1, 2], numel)
    assert torch.equal(one, tails[1, 2])


@pytest.mark.parametrize("bits", [0, 2, 16, -8])
def test_bits_must_be_4_or_8(bits: int) -> None:
    with pytest.raises(ValueError, match=rf"bits is {bits}, .* 4 or 8 bits"):
        PayloadLayout(bits, 256)


@pytest.mark.parametrize("block", [0, -256, 16, 48, 8192])
def test_block_must_be_a_power_of_two_in_range(block: int) -> None:
    with pytest.raises(ValueError, match=rf"block is {block}, .* power of two from 32 to 4096"):
        PayloadLayout(8, block)


def test_int8_by_hand() -> None:
    values = torch.tensor([127.0, -127.0, 0.5, 1.5, -2.5, 0.0] + [0.0] * 26 + [254.0])
    expected = bytes([127, 129, 0, 2, 254]) + bytes(27) + bytes([127]) + bytes(15) + struct.pack("<4f", 1, 2, 0, 0)
    assert bytes(quantize(values, 1, 1, 8, 32)[0].tolist()) == expected


def test_int4_by_hand() -> None:
    values = torch.tensor([7.0, -7.0, 1.0, -1.0, 2.5])
    expected = bytes([0x97, 0xF1, 0x02]) + bytes(13) + struct.pack("<4f", 1, 0, 0, 0)
    assert bytes(quantize(values, 1, 1, 4, 32)[0].tolist()) == expected
