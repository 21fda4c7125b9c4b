"""Launches that recur: whatever stays the same from one to the next is prepared once.

For every call, Triton's JIT binds the arguments, inspects each for specialization, and looks up the compiled kernel,
which takes more CPU time than the launch itself. A sharded model launches kernels several times per unit and step,
hundreds of times with a quantized base, from a thread that is busy already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..payload import ALIGNMENT
from .tiling import Tiling


class Launch:
    """A launch of a kernel that lacks only the tensors and factors, which are the kernel's first arguments.

    Args:
        kernel: A Triton kernel, compiled or interpreted. Each argument besides tensors and factors must be in its
            ``do_not_specialize`` or be a ``tl.constexpr``.
        grid: Programs along each axis.
        num_warps: Warps of a program.
        fixed: The kernel's remaining arguments, by name.

    Raises:
        KeyError: If ``fixed`` does not name the last arguments of the kernel.
    """

    def __init__(self, kernel: Any, grid: tuple[int, int, int], num_warps: int, **fixed: int | str) -> None:
        self._kernel, self._grid, self._num_warps = kernel, grid, num_warps
        # A compiled kernel takes its arguments by position alone.
        self._fixed = tuple(fixed[name] for name in kernel.arg_names[-len(fixed) :])
        self._compiled: dict[tuple[int, ...], Callable[..., None]] = {}

    def __call__(self, *tensors: Tensor, factors: tuple[float, ...] = ()) -> None:
        """Enqueue the kernel in the current stream of the tensors' device.

        Args:
            tensors: Contiguous tensors, of the same dtypes in every call; uint8 ones are payloads.
            factors: The arguments that the kernel takes after the tensors.
        """
        # On NVIDIA GPUs, Triton compiles another kernel for another device or pointer alignment. Nothing else that it
        # specializes for can change between calls of one Launch.
        variant = (tensors[0].get_device(), *[tensor.data_ptr() % ALIGNMENT for tensor in tensors])
        compiled = self._compiled.get(variant)
        # Triton launches on the current device, in its current stream; the tensors may be on another device.
        with torch.cuda.device_of(tensors[0]):
            if compiled is not None:
                compiled(*tensors, *factors, *self._fixed)
            else:
                self._compile(variant, tensors, factors)

    def _compile(self, variant: tuple[int, ...], tensors: tuple[Tensor, ...], factors: tuple[float, ...]) -> None:
        # Kernels handle payloads as words. Once compiled they take mere addresses, so later calls need no view.
        words = [tensor.view(torch.int32) if tensor.dtype == torch.uint8 else tensor for tensor in tensors]
        numbers = [float(factor) for factor in factors]  # Triton would specialize for an int
        # Without fusion: a product that is contracted into a sum is not rounded, as it is in the reference.
        kernel = self._kernel[self._grid](
            *words, *numbers, *self._fixed, num_warps=self._num_warps, enable_fp_fusion=False
        )
        if kernel is not None:  # the interpreter returns None and has nothing to keep
            self._compiled[variant] = kernel[self._grid]


def launch_tiles(kernel: Any, tiling: Tiling, numel: int, cols: int, rows: int, /, **fixed: int | str) -> Launch:
    """A launch with one program for each tile of each chunk.

    Args:
        kernel: As for :class:`Launch`, with an argument ``TILE``.
        tiling: The size of tiles and programs.
        numel: Number of values in a chunk.
        cols: Columns of the grid of chunks.
        rows: Rows of the grid of chunks.
        fixed: The kernel's remaining arguments, by name.
    """
    # Tiles go first: CUDA limits that axis to 2**31 - 1 programs and the other two to 65535.
    tiles = -(-numel // tiling.tile)
    return Launch(kernel, (tiles, cols, rows), tiling.num_warps, TILE=tiling.tile, **fixed)
