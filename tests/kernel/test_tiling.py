"""How work is cut: a program has whole blocks of every payload that it touches, and as many threads as it may."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from fsdp_zpp.kernels import PayloadLayout
from fsdp_zpp.kernels.triton_backend.tiling import (
    Tiling,
    align,
    delta_tiling,
    eviction,
    feedback_tiling,
    group,
    quantize_tiling,
    sum_feedback_tiling,
    sum_quantize_tiling,
    sum_tiling,
)

MAX_WARPS = 32  # of a program, on any GPU
REGISTERS = 2**16  # of a multiprocessor, likewise
layouts = st.builds(PayloadLayout, st.sampled_from([4, 8]), st.integers(5, 12).map(lambda power: 2**power))


@given(layouts, layouts, st.integers(1, 64))
def test_a_tile_is_whole_blocks_and_whole_warps(one: PayloadLayout, other: PayloadLayout, peers: int) -> None:
    of_values, of_codes = group(torch.bfloat16, one), 128 // one.bits
    cut: list[tuple[Tiling, list[PayloadLayout], int]] = [
        (quantize_tiling(one), [one], of_values),
        (sum_tiling(peers, one), [one], of_values),
        (sum_quantize_tiling(peers, one, other), [one, other], of_codes),
        (feedback_tiling(one, other), [one, other], of_values),
        (sum_feedback_tiling(one, other, None), [one, other], 16),
        (sum_feedback_tiling(one, other, one), [one, other], 16),
        (delta_tiling(one, other), [one, other], 16),
    ]
    for tiling, touched, grouped in cut:
        assert 1 <= tiling.num_warps <= MAX_WARPS
        threads = tiling.num_warps * 32
        assert tiling.tile % threads == 0
        assert all(tiling.tile % layout.block == 0 for layout in touched)
        assert tiling.tile // threads >= grouped  # or threads would hold the same group
        assert tiling.max_registers is None or threads * tiling.max_registers <= REGISTERS


@pytest.mark.parametrize(("numel", "aligned"), [(1, 1), (6, 2), (20, 4), (24, 8), (4096, 8), (4097, 1)])
def test_alignment_is_of_16_bytes_at_most(numel: int, aligned: int) -> None:
    assert align(numel) == aligned


def test_only_what_no_cache_holds_is_let_go_of() -> None:
    assert eviction(2**26) == ""
    assert eviction(2**26 + 2) == "evict_first"
