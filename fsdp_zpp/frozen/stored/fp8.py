"""fp8 with scales: DeepSeek's blocks (``weight_scale_inv``), and scales for each row, group or all of a weight.

``value = code * scale`` in fp32, rounded once. Names and values are those of transformers'
``integrations/finegrained_fp8.py``. Scales in e8m0, powers of two in a byte, are kept as fp32.

The configuration says which rows and columns share a scale (:func:`stated_block`):

=====================================================  ==============================
``weight_block_size`` of ``fp8``, strategy ``block``   these rows and columns
strategy ``group``                                     a row, ``group_size`` columns
strategy ``channel``, ``fbgemm_fp8``                   a row, or a column of a stack
strategy ``tensor``                                    a matrix, or all of a stack
=====================================================  ==============================

Shapes only have to fit that. If the configuration says nothing, shapes decide, and are refused if they leave it open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from .compressed_config import Scheme, as_stated
from .format import Parts, StoredFormat, StoredTensors, refuse_misfit
from .headers import refuse_zero_points
from .records import Field, RecordLayout
from .settings import Known, block_size, refuse_setting, setting

CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
_E8M0 = (torch.float8_e8m0fnu, torch.uint8)
"""Dtypes of scales that are powers of two. A uint8 has the bits of an e8m0."""
_SCALES = (torch.float32, torch.bfloat16, torch.float16, *_E8M0)
_SUFFIXES = ("_scale_inv", "_scale")
_UNBLOCKED = 128
"""Rows in a group where blocks don't say it."""
_CODE_NAMES = {
    **dict.fromkeys(("e4m3", "e4m3fn", "float8_e4m3", "float8_e4m3fn"), CODES[0]),
    **dict.fromkeys(("e5m2", "float8_e5m2"), CODES[1]),
}

_LAYERS: Known = dict.fromkeys(("modules_to_not_convert", "modules_to_convert", "ignored_layers", "ignore"))
_ACTIVATIONS: Known = dict.fromkeys(("activation_scheme", "activation_scale_ub", "kv_cache_scheme"))
SETTINGS: Known = {
    **_LAYERS,
    **_ACTIVATIONS,
    "quant_method": None,
    "dequantize": None,
    "weight_block_size": None,
    "fmt": tuple(_CODE_NAMES),
    "scale_fmt": ("float", "ue8m0"),
    "expert_dtype": ("fp8",),
}
"""The known settings of ``fp8``, as DeepSeek, transformers and AutoFP8 write them."""
FBGEMM_SETTINGS: Known = {**_LAYERS, **_ACTIVATIONS, "quant_method": None, "dequantize": None}

Block = tuple[int | None, int | None]
"""Rows and columns that share a scale; None for all that a matrix has."""


@dataclass(frozen=True, eq=False)
class Fp8(StoredFormat):
    """A matrix, or a stack of matrices, in fp8.

    Attributes:
        code_dtype: The dtype of the codes.
        block: Rows and columns that share a scale.
    """

    name: ClassVar[str] = "fp8"

    code_dtype: torch.dtype
    block: tuple[int, int]

    @classmethod
    def find(cls, tensors: StoredTensors, config: Mapping[str, Any]) -> dict[str, StoredFormat]:
        found: dict[str, StoredFormat] = {}
        for key in tensors:
            dtype = tensors.dtype(key)
            # The scales of some formats are in fp8, too, such as those of nvfp4.
            if dtype not in CODES or len(tensors.shape(key)) < 2 or key.endswith(_SUFFIXES):
                continue
            assert isinstance(dtype, torch.dtype)
            found[key] = as_stated(config, key, "float", partial(cls._of, key, dtype, tensors, config))
        return found

    @classmethod
    def _of(
        cls,
        key: str,
        dtype: torch.dtype,
        tensors: StoredTensors,
        config: Mapping[str, Any],
        scheme: Scheme | None,
    ) -> Fp8:
        shape = torch.Size(tensors.shape(key))
        scale = _scale_of(key, dtype, tensors)
        _check_dtypes(key, dtype, scale, tensors, config)
        keys = {"codes": key, "scales": scale}
        if (zeros := f"{key}_zero_point") in tensors:  # as some versions of compressed-tensors wrote them, all 0
            refuse_zero_points(zeros, tensors)
            keys["zero_point"] = zeros
        elif scheme is not None and not scheme.symmetric:
            refuse_misfit(zeros, "missing", f"zero points, since config.json says that {key} is not symmetric")
        if config.get("quant_method") == "fbgemm_fp8" and len(shape) == 3 and tensors.shape(scale)[-1:] == (1,):
            # transformers has one shape for scales of rows, and of columns.
            refuse_misfit(scale, f"a tensor of shape {tensors.shape(scale)}", "a scale for each column of a stack")
        block = block_of(shape, tensors.shape(scale), stated_block(config, scheme), scale)
        return cls(shape, torch.bfloat16, keys, dtype, block)

    @property
    def description(self) -> str:
        kind = str(self.code_dtype).removeprefix("torch.float8_")
        return f"{self.name} {kind} in blocks of {self.block[0]}x{self.block[1]}, {self.shape[-1]} columns"

    @cached_property
    def _rows(self) -> int:
        """Return how many rows of matrices that are put one below the other are in a group."""
        height, rows = self.block[0], self.shape[-2]
        # No block spans two matrices of a stack, so if a matrix ends within a block, a group is a matrix.
        return height if len(self.shape) == 2 or rows % height == 0 else rows

    @cached_property
    def layout(self) -> RecordLayout:
        height, width = self.block
        columns, rows = self.shape[-1], self._rows
        scales = (-(-rows // height), -(-columns // width))
        codes = Field("codes", torch.uint8, (rows, columns))
        return RecordLayout((codes, Field("scales", torch.float32, scales)))

    @property
    def group_numel(self) -> int:
        return self._rows * self.shape[-1]

    def pack(self, parts: Parts, first: int, last: int) -> Tensor:
        if len(self.shape) == 2:
            codes = parts["codes"][first * self._rows : last * self._rows]
            scales = self._of_matrix(parts["scales"], first, last)
        else:
            codes, scales = self._of_stack(parts, first * self._rows, last * self._rows)
        return self.layout.pack(last - first, codes=codes.contiguous().view(torch.uint8), scales=scales)

    def _of_matrix(self, scales: Any, first: int, last: int) -> Tensor:
        """Return the scales of groups of a matrix, fp32 [groups, columns of blocks]."""
        if self._is_single(scales):
            return _fp32(scales[...]).reshape(1, 1).expand(last - first, 1)
        return _fp32(scales[first:last])

    def _of_stack(self, parts: Parts, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return the codes and scales of some rows, counted through all matrices of a stack."""
        height, rows = self.block[0], self.shape[-2]
        matrices = slice(first // rows, -(-last // rows))
        codes = parts["codes"][matrices].reshape(-1, self.shape[-1])
        count = len(codes) // rows
        all_scales = parts["scales"]
        if self._is_single(all_scales):
            scales = _fp32(all_scales[...]).reshape(1, 1, 1).expand(count, 1, 1)
        else:
            scales = _fp32(all_scales[matrices])
        of_matrix = -(-rows // height)
        scales = scales.reshape(count * of_matrix, -1)
        begin = first - matrices.start * rows
        begin_scale = begin // height
        end_scale = begin_scale + (last - first) // self._rows * -(-self._rows // height)
        return codes[begin : begin + last - first], scales[begin_scale:end_scale]

    @staticmethod
    def _is_single(scales: Any) -> bool:
        shape = scales.shape if isinstance(scales, Tensor) else scales.get_shape()
        return torch.Size(shape).numel() == 1

    def decode(self, records: Tensor) -> Tensor:
        height, width = self.block
        codes = self.layout.get(records, "codes").view(self.code_dtype).float()
        scales = self.layout.get(records, "scales")
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(height, dim=1)[:, : codes.shape[1]]
        if scales.shape[2] > 1:
            scales = scales.repeat_interleave(width, dim=2)[:, :, : codes.shape[2]]
        return codes.mul_(scales).flatten(1)


def stated_block(config: Mapping[str, Any], scheme: Scheme | None) -> Block | None:
    """Return the rows and columns that share a scale by the configuration; None if it does not say it.

    Args:
        config: ``quantization_config``.
        scheme: The weight's scheme by compressed-tensors' ``config_groups``, if they have one.

    Raises:
        ValueError: If scales of that kind can't be read.
    """
    if scheme is None:
        return (1, None) if config.get("quant_method") == "fbgemm_fp8" else block_size(config, "weight_block_size")
    if scheme.bits != 8:
        refuse_setting(Fp8.name, "num_bits", scheme.bits, "8 alone")
    strategies: dict[str, Block] = {
        "tensor": (None, None),
        "channel": (1, None),
        "group": (1, scheme.group_size),
        "block": scheme.block or (0, 0),
    }
    if scheme.strategy not in strategies:
        refuse_setting(Fp8.name, "strategy", scheme.strategy, ", ".join(strategies))
    return strategies[scheme.strategy]


def block_of(shape: torch.Size, scales: tuple[int, ...], stated: Block | None, key: str) -> tuple[int, int]:
    """Return the rows and columns that share a scale.

    Args:
        shape: The shape of the weight.
        scales: The shape of the scales.
        stated: The rows and columns by the configuration; None if it says nothing.
        key: The name of the scales.

    Raises:
        ValueError: If the scales don't fit the weight or what the configuration states, or nothing says which they are.
    """
    rows, columns = shape[-2:]
    single = torch.Size(scales).numel() == 1
    grid = (1, 1) if single else _grid(shape, scales)
    if grid is None or len(shape) > 3:
        refuse_misfit(key, f"a tensor of shape {scales}", f"scales for a weight of shape {tuple(shape)}")
    if stated is None:
        block = _only_block(shape, scales, grid, key)
    else:
        choices = [stated, (None, 1)] if stated == (1, None) and len(shape) == 3 else [stated]
        fitting = [each for each in choices if _grid_of(each, rows, columns) == grid]
        if not fitting or (single and shape[:-2].numel() > 1 and stated != (None, None)):
            what = " x ".join("all" if size is None else str(size) for size in stated)
            needed = f"a scale for each {what} of {tuple(shape)} values, as its configuration states"
            refuse_misfit(key, f"a tensor of shape {scales}", needed)
        block = fitting[0]
    if grid == (1, 1) and None in block:
        return (_UNBLOCKED if len(shape) == 2 else rows, columns)
    return block[0] or rows, block[1] or columns


def _grid(shape: torch.Size, scales: tuple[int, ...]) -> tuple[int, int] | None:
    """Return how many scales a matrix has below and beside each other; None if they are of another weight."""
    matrices = len(shape) - 2
    if scales[:matrices] != shape[:-2] or not matrices <= len(scales) <= len(shape):
        return None
    down, across = (*scales[matrices:], 1, 1)[:2]
    return down, across


def _grid_of(block: Block, rows: int, columns: int) -> tuple[int, int]:
    """Return how many blocks a matrix has; those at its ends may be smaller."""
    height, width = block[0] or rows, block[1] or columns
    return -(-rows // height), -(-columns // width)


def _only_block(shape: torch.Size, scales: tuple[int, ...], grid: tuple[int, int], key: str) -> Block:
    """Return the block, if shapes allow only one."""
    rows, columns = shape[-2:]
    heights, widths = _sizes(rows, grid[0]), _sizes(columns, grid[1])
    if not heights or not widths:
        refuse_misfit(key, f"a tensor of shape {scales}", f"scales for a weight of shape {tuple(shape)}")
    # A vector has a scale for each row, or for each column if there are as many.
    is_open = len(scales) == len(shape) - 1 and grid[0] > 1 and (rows == columns or grid[0] != rows)
    is_open |= len(heights) > 1 or len(widths) > 1
    if is_open:
        raise ValueError(
            f"nothing says which values share one of the scales of {key}, {scales} for a weight of shape "
            f"{tuple(shape)}: blocks could have {_span(heights)} rows and {_span(widths)} columns; put the config.json "
            "of the model beside the checkpoint, or add weight_block_size to its quantization_config"
        )
    return (heights[0] if grid[0] > 1 else None, widths[0] if grid[1] > 1 else None)


def _sizes(length: int, parts: int) -> range:
    """Return the sizes of blocks that divide ``length`` into ``parts``, the last of which may be smaller."""
    if parts == 1:
        return range(length, length + 1)
    if not 1 < parts <= length:
        return range(0)
    return range(-(-length // parts), -(-length // (parts - 1)))


def _span(sizes: range) -> str:
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"


def _scale_of(key: str, dtype: torch.dtype, tensors: StoredTensors) -> str:
    """Return the name of a weight's scales."""
    names = [key + suffix for suffix in _SUFFIXES]
    if key.endswith(".weight"):
        names.append(key.removesuffix("weight") + "scale")
    found = [name for name in names if name in tensors]
    if not found:
        refuse_misfit(key, f"{dtype} without a scale", f"{names[0]}, which is missing")
    if len(found) > 1:
        refuse_misfit(key, f"{dtype} with {' and '.join(found)}", "one of them")
    return found[0]


def _check_dtypes(key: str, dtype: torch.dtype, scale: str, tensors: StoredTensors, config: Mapping[str, Any]) -> None:
    """Raise if codes or scales have another dtype than can be read, or than the configuration states."""
    code_name, scale_name = setting(config, "fmt", str), setting(config, "scale_fmt", str)
    if code_name is not None and _CODE_NAMES.get(code_name.lower()) != dtype:
        refuse_misfit(key, dtype, f"{code_name}, as config.json says in fmt")
    if (scales := tensors.dtype(scale)) not in _SCALES:
        refuse_misfit(scale, scales, "fp32, bf16, fp16 or e8m0")
    # compressed-tensors has formats of its own for e8m0, and takes bytes in others for numbers.
    if scales in _E8M0 and (config.get("quant_method") not in (None, "fp8") or scale_name == "float"):
        refuse_misfit(scale, scales, "fp32, bf16 or fp16, by config.json")


def _fp32(scales: Tensor) -> Tensor:
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()
