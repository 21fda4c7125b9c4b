"""The Triton backend: how calls are prepared, tiled and launched."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_zpp_kernels.reference import ALIGNMENT, MIN_BLOCK, PayloadLayout, levels_on

from .kernels import (
    add_delta_kernel,
    nf4_rows_kernel,
    quantize_delta_kernel,
    quantize_kernel,
    quantize_with_feedback_kernel,
    rows_kernel,
    sum_kernel,
    sum_quantize_kernel,
    sum_quantize_with_feedback_kernel,
)

# ---- launch
#
# Prepares recurring launches: all that is the same in each of them is computed once.
#
# For every call, Triton's JIT binds the arguments, inspects each for specialization, and looks up the compiled kernel,
# which takes more CPU time than the launch itself. A sharded model launches several kernels per unit in a step, and
# hundreds in all with a quantized base, from a thread that is busy already.


class Launch:
    """A prepared launch of a kernel; a call adds the tensors and factors, which are the kernel's first arguments.

    On NVIDIA GPUs, Triton compiles a kernel for each combination of its tensors' device, dtypes, and alignment to 16
    bytes. All calls of a launch must have the same combination. ``ops.py`` ensures this for tensors that callers pass;
    tensors that ops allocate are aligned.

    Args:
        kernel: A Triton kernel, compiled or interpreted. Each of its arguments besides tensors and factors must be in
            ``do_not_specialize`` or be a ``tl.constexpr``.
        grid: Programs along each axis.
        tiling: Warps of a program, and registers of a thread.
        payload: Shape of the payload that the launch allocates, passes as the second argument and returns; or None.
        fixed: The kernel's remaining arguments, by name; names that the kernel does not have are dropped.
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
        # Fusion is off: an FMA does not round the product before it adds, and the reference does.
        self._options: dict[str, object] = {"num_warps": tiling.num_warps, "enable_fp_fusion": False}
        if tiling.max_registers is not None:  # an option of NVIDIA GPUs alone
            self._options["maxnreg"] = tiling.max_registers
        # A compiled kernel takes its arguments only by position.
        self._fixed = tuple(fixed[name] for name in kernel.arg_names if name in fixed)
        self._compiled: Callable[..., None] | None = None
        self._device = -1  # get_device() of a CPU tensor; kernels are interpreted there

    def __call__(self, first: Tensor, *others: Tensor | float) -> Tensor | None:
        """Enqueue the kernel in the current stream of the tensors' device; return the payload, if this allocates one.

        Tensors are contiguous and come before the factors; uint8 tensors are payloads.
        """
        payload = None
        if self._payload is not None:
            # new_empty would take 1.5 times as long, since torch must choose among its overloads.
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
        """Compile the kernel, unless Triton has compiled it before, and launch it."""
        first = arguments[0]
        assert isinstance(first, Tensor)
        with torch.cuda.device_of(first):
            kernel = self._kernel[self._grid](*map(_as_specialized, arguments), *self._fixed, **self._options)
        if kernel is not None:  # the interpreter returns None and has nothing to keep
            self._device, self._compiled = first.get_device(), kernel[self._grid]


def _as_specialized(argument: Tensor | float) -> Tensor | float:
    """Return an argument with the type to compile for; a compiled kernel then takes any address or number."""
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
    layouts: Mapping[str, PayloadLayout | None],
    payload: PayloadLayout | None = None,
    **fixed: int | str,
) -> Callable[..., Any]:
    """Return a launch with one program for each tile of each chunk.

    ``layouts`` maps a prefix of argument names to the layout that these arguments describe: the prefix ``"out_"`` sets
    ``out_row_units`` and ``OUT_BITS``, for example. The layout None stands for fp32 errors. ``payload`` is the layout
    of the payload that the launch allocates and returns, a row for each chunk; None if it allocates none. If chunks are
    empty, the launch only allocates the payload.
    """
    shape = None if payload is None else (rows * cols, payload.nbytes(numel))
    if numel == 0:
        return functools.partial(_launch_nothing, shape)
    unit = align(numel)
    fixed |= {"numel": numel, "numel_units": numel // unit, "ALIGN": unit, "TILE": tiling.tile}
    for prefix, layout in layouts.items():
        fixed[f"{prefix}row_units"] = layout.nbytes(numel) // ALIGNMENT if layout else 0
        fixed[f"{prefix}zero"] = zero(layout.bits if layout else 8)
        fixed[f"{prefix}bits".upper()] = layout.bits if layout else 32
        fixed[f"{prefix}block".upper()] = layout.block if layout else 0
    # Tiles go first: CUDA limits that axis to 2**31 - 1 programs and the other two to 65535.
    tiles = -(-numel // tiling.tile)
    return Launch(kernel, (tiles, cols, rows), tiling, shape, **fixed)


def _launch_nothing(shape: tuple[int, int] | None, first: Tensor, *others: Tensor | float) -> Tensor | None:
    return None if shape is None else first.new_empty_strided(*_shape_and_strides(shape), dtype=torch.uint8)


def _shape_and_strides(shape: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    return shape, (max(shape[1], 1), 1)


# ---- tiling
#
# Tilings: values per thread, threads per program, and the facts about sizes that kernels are compiled for.
#
# The figures come from measurements on an H200 (``benchmarks/kernels/run.py``). A program of one warp finds the maximum
# over a block without shared memory, and its threads never wait for another warp. With more values per thread,
# computing addresses and a block's scale costs less per value; with fewer, a thread takes fewer registers, so more
# programs run at a time.

WARP = 32
_DELTAS_A_THREAD = 32
_CACHE_NBYTES = 2**26  # more than an H200's second-level cache holds


class Tiling(NamedTuple):
    """A division of a kernel's work into programs.

    Attributes:
        tile: Number of values that one program works on: whole blocks of every layout.
        max_registers: Registers that a thread may have at most; None leaves it to the compiler.
    """

    tile: int
    num_warps: int
    max_registers: int | None = None


def tiling(per_thread: int, threads: int, *layouts: PayloadLayout | None, max_registers: int | None = None) -> Tiling:
    """Return a tiling with ``per_thread`` values a thread and ``threads`` threads, or more for a larger block."""
    # All numbers are powers of two, so the larger are multiples of the smaller: a tile has whole blocks and warps.
    tile = max(per_thread * threads, *(layout.block for layout in layouts if layout is not None))
    return Tiling(tile, tile // per_thread // WARP, max_registers)


def quantize_tiling(layout: PayloadLayout) -> Tiling:
    # 32 values of 16 bits are four 16-byte loads in flight per thread.
    return tiling(32, 2 * WARP, layout)


def sum_tiling(peers: int, layout: PayloadLayout) -> Tiling:
    # Loads from all peers are in flight at once, up to 64 bytes per thread for few peers.
    return tiling(32 if peers * layout.bits <= 16 or layout.bits == 3 else 16, WARP, layout)


def sum_quantize_tiling(peers: int, layout: PayloadLayout, out_layout: PayloadLayout) -> Tiling:
    if layout.bits == out_layout.bits == 8:
        return tiling(16, WARP, layout, out_layout)  # a 16-byte access
    few, many = (4, 8) if layout.bits == 4 else (0, 4)
    if few < peers <= many:
        # Without a limit, the compiler starts all loads at once: they take so many registers that too few programs run.
        return tiling(32, WARP, layout, out_layout, max_registers=64)
    # 64 int4 codes are two 16-byte accesses and 16 int8 codes are one; see GROUP in ``dequantize_sum_quantize``.
    return tiling(64 if layout.bits == 4 else 16, WARP, layout, out_layout)


def feedback_tiling(layout: PayloadLayout, error_layout: PayloadLayout | None) -> Tiling:
    # Without a limit, the compiler takes so many registers for int4 and quantized errors that too few programs run.
    max_registers = 96 if layout.bits == 4 and error_layout is not None else None
    return tiling(32, WARP, layout, error_layout, max_registers=max_registers)


def sum_feedback_tiling(layout: PayloadLayout, out_layout: PayloadLayout, error_layout: PayloadLayout | None) -> Tiling:
    layouts = (layout, out_layout, error_layout)
    if error_layout is None:
        return tiling(16, WARP, *layouts, max_registers=64)
    return tiling(32, 2 * WARP, *layouts, max_registers=80)


def delta_tiling(*layouts: PayloadLayout) -> Tiling:
    # A multiprocessor runs 32 programs at most, and has registers for so many with 64 a thread.
    return tiling(_DELTAS_A_THREAD, WARP, *layouts, max_registers=64)


def align(numel: int) -> int:
    """Return the largest power of two that divides ``numel``, up to the 8 values of a 16-byte access.

    Kernels take ``numel`` in this unit, so Triton knows how chunks are aligned, and compiles at most four variants.
    """
    return min(numel & -numel, 8) or 8  # the lowest set bit; 0 has none, and any power divides it


def group(dtype: torch.dtype, layout: PayloadLayout) -> int:
    """Return how many neighbouring values a thread holds: a 16-byte access, or a word of codes if that is more."""
    # With fewer, several threads would have to write one word; int3's words have codes of 32.
    return max(16 // dtype.itemsize, 32 // math.gcd(32, layout.bits))


def zero(bits: int) -> int:
    """Return the bits of 2**23 plus the offset of codes, the float that code 0 becomes; see ``decode_sum``."""
    return 0x4B000000 + (1 << (bits - 1))


def eviction(nbytes: int) -> str:
    # An output larger than the cache is evicted before it is read, so it must not displace data that is still needed.
    return "evict_first" if nbytes > _CACHE_NBYTES else ""


# ---- triton backend
#
# Operations in Triton: one launch each, transposition and padding included, without temporaries.
#
# The functions rely on the checks of ``ops.py`` and prepare a call. Each has a twin in ``reference.py`` with the same
# name and signature and equal results, bit for bit. ``kernels.py`` builds the kernels from the parts in ``tiles.py``.


def quantize(numel: int, rows: int, cols: int, layout: PayloadLayout, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    cut, width = quantize_tiling(layout), group(dtype, layout)
    return launch_tiles(quantize_kernel, cut, numel, cols, rows, layouts={"": layout}, payload=layout, GROUP=width)


def dequantize_sum(
    peers: int, numel: int, rows: int, cols: int, layout: PayloadLayout, dtype: torch.dtype
) -> Callable[[Tensor, Tensor, float], None]:
    return launch_tiles(
        sum_kernel,
        sum_tiling(peers, layout),
        numel,
        cols,
        rows,
        layouts={"": layout},
        PEERS=peers,
        GROUP=group(dtype, layout),
        EVICTION=eviction(rows * cols * numel * dtype.itemsize),
    )


def dequantize_sum_quantize(
    peers: int, numel: int, rows: int, cols: int, layout: PayloadLayout, out_layout: PayloadLayout
) -> Callable[[Tensor, float], Tensor]:
    return launch_tiles(
        sum_quantize_kernel,
        sum_quantize_tiling(peers, layout, out_layout),
        numel,
        cols,
        rows,
        layouts={"": layout, "out_": out_layout},
        payload=out_layout,
        PEERS=peers,
        # This kernel reads and writes only codes. So a group is a 16-byte access of codes, but at most the smallest
        # block, since a group has one scale.
        GROUP=min(128 // layout.bits, MIN_BLOCK),
    )


def quantize_with_feedback(
    numel: int, rows: int, cols: int, layout: PayloadLayout, error_layout: PayloadLayout | None, dtype: torch.dtype
) -> Callable[[Tensor, Tensor, float], Tensor]:
    launch = launch_tiles(
        quantize_with_feedback_kernel,
        feedback_tiling(layout, error_layout),
        numel,
        cols,
        rows,
        layouts={"": layout, "error_": error_layout},
        payload=layout,
        GROUP=group(dtype, layout),
    )
    # Compute 1 - beta in fp64, as the reference does: with an fp32 beta in a kernel, the last bit could differ.
    return lambda values, errors, beta: launch(values, errors, beta, 1 - beta)


def dequantize_sum_quantize_with_feedback(
    peers: int,
    numel: int,
    chunks: int,
    layout: PayloadLayout,
    out_layout: PayloadLayout,
    error_layout: PayloadLayout | None,
) -> Callable[[Tensor, Tensor, float, float], Tensor]:
    launch = launch_tiles(
        sum_quantize_with_feedback_kernel,
        sum_feedback_tiling(layout, out_layout, error_layout),
        numel,
        chunks,
        1,
        layouts={"": layout, "out_": out_layout, "error_": error_layout},
        payload=out_layout,
        PEERS=peers,
    )
    return lambda payload, errors, scale, beta: launch(payload, errors, scale, beta, 1 - beta)


def quantize_delta(
    chunks: int, numel: int, base_layout: PayloadLayout, layout: PayloadLayout, dtype: torch.dtype
) -> Callable[[Tensor, Tensor], Tensor]:
    # Whatever the group, int3 comes in words of 32.
    width = min(max(group(dtype, base_layout), group(dtype, layout)), 16)
    return _launch_delta(quantize_delta_kernel, width, chunks, numel, base_layout, layout, layout)


def add_delta(
    chunks: int, numel: int, base_layout: PayloadLayout, layout: PayloadLayout
) -> Callable[[Tensor, Tensor], Tensor]:
    # The group is an access of int8 codes, and a word of int2 codes.
    return _launch_delta(add_delta_kernel, 16, chunks, numel, base_layout, layout, base_layout)


def _launch_delta(
    kernel: Any, width: int, chunks: int, numel: int, base: PayloadLayout, layout: PayloadLayout, payload: PayloadLayout
) -> Callable[..., Any]:
    cut, layouts, parts = delta_tiling(base, layout), {"base_": base, "": layout}, _DELTAS_A_THREAD // width
    return launch_tiles(kernel, cut, numel, chunks, 1, layouts=layouts, payload=payload, GROUP=width, PARTS=parts)


def dequantize_rows(
    chunks: int, numel: int, stride: int, layout: PayloadLayout, dtype: torch.dtype
) -> Callable[[Tensor, Tensor], None]:
    return _launch_rows(rows_kernel, chunks, numel, stride, layout, dtype)


def dequantize_nf4_rows(
    chunks: int, numel: int, stride: int, layout: PayloadLayout, dtype: torch.dtype
) -> Callable[[Tensor, Tensor], None]:
    launch = _launch_rows(nf4_rows_kernel, chunks, numel, stride, layout, dtype)
    return lambda payload, out: launch(payload, out, levels_on(payload.device))


def _launch_rows(
    kernel: Any, chunks: int, numel: int, stride: int, layout: PayloadLayout, dtype: torch.dtype
) -> Callable[..., Any]:
    return launch_tiles(
        kernel,
        sum_tiling(1, layout),
        numel,
        1,
        chunks,
        layouts={},  # rows lie ``stride`` bytes apart, whatever their length
        stride_units=stride // ALIGNMENT,
        zero=zero(layout.bits),
        BITS=layout.bits,
        BLOCK=layout.block,
        GROUP=group(dtype, layout),
    )
