"""Launches: how work is cut into programs, and what recurring launches ask of Triton's JIT and pass on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from fsdp_zpp.kernels import PayloadLayout
from fsdp_zpp.kernels.triton_backend.launch import Launch, launch_tiles
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


class Kernel:
    """A kernel of two tensors, a factor and two fixed arguments that notes how it is launched."""

    arg_names = ("payload_ptr", "out_ptr", "factor", "numel", "BLOCK")

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., dict[tuple[int, int, int], Any]]:
        def compile_and_launch(*args: Any, **options: Any) -> Any:
            assert options == {"num_warps": 2, "maxnreg": 64, "enable_fp_fusion": False}
            self.compiled.append(args)
            return {grid: lambda *args: self.launched.append(args)}

        return compile_and_launch


def test_registers_are_limited_only_if_asked() -> None:
    options: list[dict[str, Any]] = []

    class Noting(Kernel):
        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
            return lambda *args, **given: options.append(given)

    Launch(Noting(), (1, 1, 1), Tiling(64, 2), BLOCK=64, numel=10)(torch.zeros(8), torch.zeros(8), 0.5)
    assert options == [{"num_warps": 2, "enable_fp_fusion": False}]


def make(kernel: Kernel) -> Launch:
    return Launch(kernel, (3, 2, 1), Tiling(64, 2, 64), BLOCK=64, numel=10)


def test_the_jit_is_asked_once() -> None:
    kernel = Kernel()
    launch = make(kernel)
    payload, out = torch.zeros(16, dtype=torch.uint8), torch.zeros(8)
    for factor in (1, 0.5, 2.0):
        launch(payload, out, factor)
    ((words, first_out, factor, *fixed),) = kernel.compiled
    assert (words.dtype, words.data_ptr()) == (torch.int32, payload.data_ptr())
    assert first_out is out
    assert (factor, type(factor)) == (1, float)
    assert fixed == [10, 64]
    assert kernel.launched == [(payload, out, factor, 10, 64) for factor in (0.5, 2.0)]


def test_what_is_interpreted_is_never_taken_for_compiled() -> None:
    calls = []

    class Interpreted(Kernel):
        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
            return lambda *args, **options: calls.append(args)

    launch = make(Interpreted())
    for _ in range(2):
        launch(torch.zeros(8), torch.zeros(8), 0.5)
    assert len(calls) == 2


def test_chunks_without_values_launch_nothing() -> None:
    kernel = Kernel()
    launch_tiles(kernel, Tiling(64, 2), 0, 1, 1, BLOCK=64, numel=0)(torch.zeros(0), torch.zeros(0))
    assert not kernel.compiled


def test_only_another_device_than_the_current_one_is_made_current(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, entered = Kernel(), []
    launch, tensor = make(kernel), torch.zeros(8)
    launch(tensor, tensor, 0.5)
    launch._device = 1  # that of the tensors, on a machine with two GPUs
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext(entered.append(index)))
    for current in (0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        launch(tensor, tensor, 0.5)
        assert entered == [1]
    assert len(kernel.launched) == 2


def test_arguments_must_be_the_kernel_s_last() -> None:
    with pytest.raises(KeyError, match="numel"):
        Launch(Kernel(), (1, 1, 1), Tiling(64, 2), payload_ptr=0, BLOCK=64)


# ---- how work is cut

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
