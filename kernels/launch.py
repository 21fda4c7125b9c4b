"""Launches that recur: what does not change from one to the next is settled once.

To bind arguments, to look at each for what a kernel may be specialized for, and to find the compiled kernel costs
Triton's JIT more of a processor's time than a launch does. A sharded model launches kernels several times for each unit
and step, hundreds of times with a quantized base, in a thread that is busy as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .payload import ALIGNMENT
from .tiling import Tiling


class Launch:
    """A launch of a kernel, but for its tensors and factors, which are the first of its arguments.

    Args:
        kernel: A Triton kernel, compiled or interpreted. What it takes besides tensors and factors must be marked as
            not to be specialized for, or be a ``tl.constexpr``.
        grid: Programs along each axis.
        num_warps: Warps of a program.
        fixed: The kernel's other arguments, by name.
    """

    def __init__(self, kernel: Any, grid: tuple[int, int, int], num_warps: int, **fixed: int | str) -> None:
        self._kernel, self._grid, self._num_warps = kernel, grid, num_warps
        self._fixed = tuple(fixed[name] for name in kernel.arg_names[-len(fixed) :])
        self._compiled: dict[tuple[int, ...], Callable[..., None]] = {}

    def __call__(self, *tensors: Tensor, factors: tuple[float, ...] = ()) -> None:
        """Enqueue it in the current stream of the tensors' device.

        Args:
            tensors: Of the same dtypes in every call, contiguous; uint8 ones are payloads.
            factors: What the kernel takes after them.
        """
        # All that Triton compiles another kernel for, from one call to the next, on GPUs of NVIDIA's.
        variant = (tensors[0].get_device(), *[tensor.data_ptr() % ALIGNMENT for tensor in tensors])
        compiled = self._compiled.get(variant)
        with torch.cuda.device_of(tensors[0]):
            if compiled is not None:
                compiled(*tensors, *factors, *self._fixed)
            else:
                self._compile(variant, tensors, factors)

    def _compile(self, variant: tuple[int, ...], tensors: tuple[Tensor, ...], factors: tuple[float, ...]) -> None:
        words = [tensor.view(torch.int32) if tensor.dtype == torch.uint8 else tensor for tensor in tensors]
        numbers = [float(factor) for factor in factors]  # an int would be specialized for
        kernel = self._kernel[self._grid](
            *words, *numbers, *self._fixed, num_warps=self._num_warps, enable_fp_fusion=False
        )
        if kernel is not None:  # or it was interpreted
            self._compiled[variant] = kernel[self._grid]


def launch_tiles(kernel: Any, tiling: Tiling, numel: int, cols: int, rows: int, /, **fixed: int | str) -> Launch:
    """A launch with a program for each tile of each chunk.

    Args:
        kernel: As of :class:`Launch`, with an argument ``TILE``.
        tiling: How chunks are cut.
        numel: Values in a chunk.
        cols: Columns of the grid of chunks.
        rows: Rows of it.
        fixed: The kernel's other arguments, by name.
    """
    tiles = -(-numel // tiling.tile)
    return Launch(kernel, (tiles, cols, rows), tiling.num_warps, TILE=tiling.tile, **fixed)
