"""Launches that recur: whatever stays the same from one to the next is prepared once.

For every call, Triton's JIT binds the arguments, inspects each for specialization, and looks up the compiled kernel,
which takes more CPU time than the launch itself. A sharded model launches kernels several times per unit and step,
hundreds of times with a quantized base, from a thread that is busy already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..payload import PayloadLayout
from .tiling import Tiling


class Launch:
    """A launch of a kernel that lacks only the tensors and factors, which are the kernel's first arguments.

    A kernel that makes a payload takes it as its second argument, which the launch allocates and returns.

    On NVIDIA GPUs, Triton compiles another kernel for another device, dtype, or alignment of an address to 16 bytes. In
    all calls of one launch these must be the same for each tensor; ``dispatch.py`` ensures it for tensors that ops are
    given, and tensors that they allocate are aligned.

    Args:
        kernel: A Triton kernel, compiled or interpreted. Each argument besides tensors and factors must be in its
            ``do_not_specialize`` or be a ``tl.constexpr``.
        grid: Programs along each axis.
        tiling: Warps of a program, and registers of a thread.
        payload: Shape of the payload to allocate; None if there is none.
        fixed: The kernel's remaining arguments, by name.

    Raises:
        KeyError: If ``fixed`` does not name the last arguments of the kernel.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        tiling: Tiling,
        payload: tuple[int, int] | None = None,
        **fixed: int | str,
    ) -> None:
        self._kernel, self._grid = kernel, grid
        self._payload = None if payload is None else _shape_and_strides(payload)
        # Without fusion: a product that is contracted into a sum is not rounded, as it is in the reference.
        self._options: dict[str, object] = {"num_warps": tiling.num_warps, "enable_fp_fusion": False}
        if tiling.max_registers is not None:  # an option of NVIDIA GPUs alone
            self._options["maxnreg"] = tiling.max_registers
        # A compiled kernel takes its arguments by position alone.
        self._fixed = tuple(fixed[name] for name in kernel.arg_names[-len(fixed) :])
        self._compiled: Callable[..., None] | None = None
        self._device = -1  # of a CPU, where kernels are interpreted

    def __call__(self, first: Tensor, *others: Tensor | float) -> Tensor | None:
        """Enqueue the kernel in the current stream of the tensors' device.

        Args:
            first: The kernel's first argument.
            others: Those that follow it, without the payload that is allocated: contiguous tensors, of which uint8 ones
                are payloads, then the factors.

        Returns:
            The payload that is allocated, if there is one.
        """
        payload = None
        if self._payload is not None:
            # Not new_empty, which also has a form with names and takes half as long again to tell which is called.
            payload = first.new_empty_strided(*self._payload, dtype=torch.uint8)
            others = (payload, *others)
        if self._compiled is None:
            self._compile((first, *others))
        elif self._device < 0 or self._device == torch.cuda.current_device():
            self._compiled(first, *others, *self._fixed)
        else:
            # Triton launches on the current device, in its current stream.
            with torch.cuda.device(self._device):
                self._compiled(first, *others, *self._fixed)
        return payload

    def _compile(self, arguments: tuple[Tensor | float, ...]) -> None:
        """Compile the kernel, unless Triton has, and launch it."""
        first = arguments[0]
        assert isinstance(first, Tensor)
        with torch.cuda.device_of(first):
            kernel = self._kernel[self._grid](*map(_as_specialized, arguments), *self._fixed, **self._options)
        if kernel is not None:  # the interpreter returns None and has nothing to keep
            self._device, self._compiled = first.get_device(), kernel[self._grid]


def _as_specialized(argument: Tensor | float) -> Tensor | float:
    """Return an argument as kernels are compiled for it. Once compiled they take mere addresses and numbers."""
    if not isinstance(argument, Tensor):
        return float(argument)  # Triton would specialize for an int
    return argument.view(torch.int32) if argument.dtype == torch.uint8 else argument  # payloads are read as words


def launch_tiles(
    kernel: Any,
    tiling: Tiling,
    numel: int,
    cols: int,
    rows: int,
    /,
    payload: PayloadLayout | None = None,
    **fixed: int | str,
) -> Callable[..., Any]:
    """Return a launch with one program for each tile of each chunk.

    Args:
        kernel: As for :class:`Launch`, with an argument ``TILE``.
        tiling: How chunks are cut into programs.
        numel: Number of values in a chunk.
        cols: Columns of the grid of chunks.
        rows: Rows of the grid of chunks.
        payload: Layout of the payload that the launch allocates, a row for each chunk, and returns; None if it
            allocates none.
        fixed: The kernel's remaining arguments, by name.

    Returns:
        The launch; if chunks are empty, a function that does nothing but allocate the payload.
    """
    shape = None if payload is None else (rows * cols, payload.nbytes(numel))
    if numel == 0:
        return functools.partial(_launch_nothing, shape)
    # Tiles go first: CUDA limits that axis to 2**31 - 1 programs and the other two to 65535.
    tiles = -(-numel // tiling.tile)
    return Launch(kernel, (tiles, cols, rows), tiling, shape, TILE=tiling.tile, **fixed)


def _launch_nothing(shape: tuple[int, int] | None, first: Tensor, *others: Tensor | float) -> Tensor | None:
    return None if shape is None else first.new_empty_strided(*_shape_and_strides(shape), dtype=torch.uint8)


def _shape_and_strides(shape: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    return shape, (max(shape[1], 1), 1)
