"""Checks of the headers of packed weights, and reading of their records, for the formats that pack codes into words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .compressed_config import Scheme
from .format import REMEDY, Parts, StoredTensors, refuse_misfit
from .records import RecordLayout
from .settings import refuse_setting

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of scales."""


def matrix(
    tensors: StoredTensors, key: str, *dtypes: torch.dtype, shape: tuple[int | None, int | None] = (None, None)
) -> tuple[int, int]:
    """Return the shape of a stored matrix.

    Args:
        tensors: The checkpoint's tensors.
        key: The name of the matrix.
        *dtypes: The dtypes that it may have.
        shape: The shape that it must have; None for any size.

    Raises:
        ValueError: If the checkpoint lacks it, or it has another shape or dtype.
    """
    if key not in tensors:
        raise lacking(key)
    found, dtype = tensors.shape(key), tensors.dtype(key)
    if dtype not in dtypes:
        refuse_misfit(key, dtype, " or ".join(map(str, dtypes)))
    if len(found) != 2 or any(want not in (None, size) for size, want in zip(found, shape, strict=True)):
        expected = tuple("any" if size is None else size for size in shape)
        refuse_misfit(key, f"a tensor of shape {found}", f"shape {expected}")
    return found[0], found[1]


def lacking(key: str) -> ValueError:
    """Return the error about a tensor that is missing."""
    return ValueError(f"the checkpoint has no {key}, though it has other tensors of the same weight; {REMEDY}")


def float_dtype(tensors: StoredTensors, key: str) -> torch.dtype:
    """Return the dtype of scales that :func:`matrix` has checked."""
    dtype = tensors.dtype(key)
    assert isinstance(dtype, torch.dtype)
    return dtype


def columns_of(parts: Parts, layout: RecordLayout, first: int, last: int) -> dict[str, Tensor]:
    """Read the columns of groups ``first`` to ``last - 1`` of matrices [rows, columns] whose columns are the outputs.

    Returns:
        For each field of ``layout``, of shape [rows, columns of a group]: [groups, rows, columns of a group].
    """
    values = {}
    for field in layout.fields:
        width = field.shape[1]
        some: Tensor = parts[field.name][:, first * width : last * width]
        values[field.name] = some.unflatten(1, (last - first, width)).transpose(0, 1)
    return values


def scale_groups(key: str, rows: int, columns: int, tensors: StoredTensors, scheme: Scheme | None = None) -> int:
    """Return how many groups of columns have a scale of their own; 1 if there is one for each row, or for all.

    Args:
        key: The name of the scales.
        rows: The rows of the weight.
        columns: The columns of the weight.
        tensors: The checkpoint's tensors.
        scheme: The weight's scheme by the configuration, if it has one.

    Raises:
        ValueError: If the scales are missing, or don't fit the weight or what the configuration says.
    """
    if scheme is not None and scheme.strategy not in (strategies := ("tensor", "channel", "group")):
        refuse_setting("compressed-tensors", "strategy", scheme.strategy, f"{', '.join(strategies)} of integers")
    if key in tensors and tensors.shape(key) in ((), (1,)) and tensors.dtype(key) in FLOATS:
        groups, single = 1, True
    else:
        groups, single = matrix(tensors, key, *FLOATS, shape=(rows, None))[1], rows == 1
    if groups == 0:
        refuse_misfit(key, f"{groups} groups", f"groups of {columns} columns")
    if scheme is not None and (
        groups != scheme.groups(columns) or (not single if scheme.strategy == "tensor" else single and rows > 1)
    ):
        stated = f"{scheme.strategy} with group_size {scheme.group_size}"
        refuse_misfit(key, f"a tensor of shape {tensors.shape(key)}", f"scales by the strategy {stated} of config.json")
    return groups


def refuse_other_groups(key: str, inputs: int, groups: int, size: int) -> None:
    """Raise unless neighbouring inputs are in groups of ``size``, the last perhaps smaller; all in one if it is -1.

    Raises:
        ValueError: It names the tensor.
    """
    if groups != (-(-inputs // size) if size > 0 else 1):
        refuse_misfit(key, f"{groups} groups of {inputs} inputs", f"groups of {size}, the group_size of config.json")


def rows_of(part: Any, first: int, last: int) -> Tensor:
    """Read rows ``first`` to ``last - 1`` of a matrix; of one number for all rows, that number for each."""
    shape = tuple(part.shape if isinstance(part, Tensor) else part.get_shape())
    if len(shape) > 1:
        rows: Tensor = part[first:last]
    else:
        rows = (part[...] if isinstance(part, Tensor) or not shape else part[:]).reshape(1).expand(last - first)
    return rows.clone(memory_format=torch.contiguous_format)


def refuse_zero_points(key: str, tensors: StoredTensors, zero: int = 0) -> None:
    """Raise unless all zero points of a weight are ``zero``, as those of symmetric weights are.

    Raises:
        ValueError: It names the tensor.
    """
    if (tensors.read(key).float() != zero).any():
        refuse_misfit(key, f"zero points other than {zero}", "none, since it is symmetric")
