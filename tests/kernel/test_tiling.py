"""How work is cut: a program has whole blocks of every payload that it touches, and as many threads as it may."""

from __future__ import annotations

import pytest
from fsdp_zpp.kernels import PayloadLayout
from fsdp_zpp.kernels.triton_backend.tiling import (
    Tiling,
    align,
    delta_tiling,
    eviction,
    feedback_tiling,
    quantize_tiling,
    sum_feedback_tiling,
    sum_quantize_tiling,
    sum_tiling,
)
from hypothesis import given, strategies as st

MAX_WARPS = 32  # of a program, on any GPU
layouts = st.builds(PayloadLayout, st.sampled_from([4, 8]), st.integers(5, 12).map(lambda power: 2**power))


@given(layouts, layouts, st.integers(1, 64))
def test_a_tile_is_whole_blocks_and_whole_warps(one: PayloadLayout, other: PayloadLayout, peers: int) -> None:
    cut: list[tuple[Tiling, list[PayloadLayout]]] = [
        (quantize_tiling(one), [one]),
        (sum_tiling(peers, one), [one]),
        (sum_quantize_tiling(peers, one, other), [one, other]),
        (feedback_tiling(one, other), [one, other]),
        (sum_feedback_tiling(one, other, None), [one, other]),
        (sum_feedback_tiling(one, other, one), [one, other]),
        (delta_tiling(one, other), [one, other]),
    ]
    for tiling, touched in cut:
        assert 1 <= tiling.num_warps <= MAX_WARPS
        threads = tiling.num_warps * 32
        assert tiling.tile % threads == 0
        # Groups of a word of codes, at the least, for each thread.
        assert all(
            tiling.tile % layout.block == 0 and tiling.tile // threads >= 32 // layout.bits for layout in touched
        )


@pytest.mark.parametrize(("numel", "aligned"), [(1, 1), (6, 2), (20, 4), (24, 8), (4096, 8), (4097, 1)])
def test_alignment_is_of_16_bytes_at_most(numel: int, aligned: int) -> None:
    assert align(numel) == aligned


def test_only_what_no_cache_holds_is_let_go_of() -> None:
    assert eviction(2**26) == ""
    assert eviction(2**26 + 2) == "evict_first"
