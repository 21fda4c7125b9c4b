"""Arguments of codecs: blocks are powers of two from 32 to 4096."""

from __future__ import annotations

import pytest

from fsdp_zpp import NF4, Codec, Int4, Int4Delta, Int8


@pytest.mark.parametrize("codec", [Int8, Int4])
@pytest.mark.parametrize("block", [0, 16, 48, 100, 8192, -256])
def test_blocks_are_powers_of_two_from_32_to_4096(codec: type[Codec], block: int) -> None:
    with pytest.raises(ValueError, match=f"{block}.*power of two"):
        codec(block)


@pytest.mark.parametrize("block", [32.0, "256", True, None])
def test_blocks_are_ints(block: object) -> None:
    with pytest.raises(TypeError, match="must be an int"):
        Int8(block)


def test_parts_of_a_difference_codec_are_checked() -> None:
    with pytest.raises(ValueError, match="block is 33"):
        Int4Delta(33)
    with pytest.raises(TypeError, match="whole must be an Int8"):
        Int4Delta(whole=Int4(128))  # type: ignore[arg-type]


@pytest.mark.parametrize("block", [32, 100, 8192])
def test_nf4_blocks_are_powers_of_two_from_64_to_4096(block: int) -> None:
    with pytest.raises(ValueError, match="block"):
        NF4(block)


@pytest.mark.parametrize("block", [True, 64.0, "64"])
def test_nf4_blocks_are_ints(block: object) -> None:
    with pytest.raises(TypeError, match="NF4's block must be an int, got"):
        NF4(block)  # type: ignore[arg-type]
