"""What a recurring launch asks of Triton's JIT, and what it passes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fsdp_zpp.kernels.triton_backend.launch import Launch


class Kernel:
    """A kernel of two tensors, a factor and two fixed arguments that notes how it is launched."""

    arg_names = ("payload_ptr", "out_ptr", "factor", "numel", "BLOCK")

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., dict[tuple[int, int, int], Any]]:
        def compile_and_launch(*args: Any, num_warps: int, enable_fp_fusion: bool) -> Any:
            assert (num_warps, enable_fp_fusion) == (2, False)
            self.compiled.append(args)
            return {grid: lambda *args: self.launched.append(args)}

        return compile_and_launch


def make(kernel: Kernel) -> Launch:
    return Launch(kernel, (3, 2, 1), 2, BLOCK=64, numel=10)


def test_the_jit_is_asked_once() -> None:
    kernel = Kernel()
    launch = make(kernel)
    payload, out = torch.zeros(16, dtype=torch.uint8), torch.zeros(8)
    for factor in (1, 0.5, 2.0):
        launch(payload, out, factors=(factor,))
    ((words, first_out, factor, *fixed),) = kernel.compiled
    assert (words.dtype, words.data_ptr()) == (torch.int32, payload.data_ptr())
    assert first_out is out
    assert (factor, type(factor)) == (1, float)
    assert fixed == [10, 64]
    assert kernel.launched == [(payload, out, factor, 10, 64) for factor in (0.5, 2.0)]


@pytest.mark.parametrize("offsets", [(0, 1), (1, 0), (2, 1)])
def test_what_is_aligned_otherwise_is_compiled_otherwise(offsets: tuple[int, int]) -> None:
    kernel = Kernel()
    launch = make(kernel)
    tensors = [torch.zeros(32) for _ in range(2)]
    moved = [tensor[offset : offset + 16] for tensor, offset in zip(tensors, offsets, strict=True)]
    for _ in range(2):
        launch(*tensors, factors=(0.5,))
        launch(*moved, factors=(0.5,))
    assert len(kernel.compiled) == len(kernel.launched) == 2


def test_what_is_interpreted_is_never_taken_for_compiled() -> None:
    calls = []

    class Interpreted(Kernel):
        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
            return lambda *args, **options: calls.append(args)

    launch = make(Interpreted())
    for _ in range(2):
        launch(torch.zeros(8), torch.zeros(8), factors=(0.5,))
    assert len(calls) == 2


def test_arguments_must_be_the_kernel_s_last() -> None:
    with pytest.raises(KeyError, match="numel"):
        Launch(Kernel(), (1, 1, 1), 2, payload_ptr=0, BLOCK=64)
