"""Checksums of weights: which changes they tell, and on what they do not depend."""

from __future__ import annotations

import pytest
import torch
from harness.pool import device_type
from torch import Tensor

from fsdp_zpp.collectives.fingerprint import checksums

VALUES = torch.randn(200_003, generator=torch.Generator().manual_seed(0))


def of(tensor: Tensor) -> tuple[str, int]:
    return checksums({"weight": tensor})["weight"]


def changed(place: int, value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    values = VALUES.to(dtype, copy=True)
    values[place] = value
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("place", [0, 70_000, 200_002])
def test_one_value_makes_a_difference(dtype: torch.dtype, place: int) -> None:
    last_bit = torch.nextafter(VALUES[place].to(dtype), torch.tensor(9.0, dtype=dtype)).item()
    assert of(changed(place, last_bit, dtype)) != of(VALUES.to(dtype))


def test_the_order_makes_a_difference() -> None:
    assert of(VALUES.flip(0)) != of(VALUES)
    assert of(VALUES.roll(1 << 16)) != of(VALUES)


def test_neither_shape_nor_strides_nor_the_sign_of_zero_does() -> None:
    even = VALUES[:200_000]
    assert of(even.view(400, 500)) == of(even.view(400, 500).t().contiguous().t()) == of(even)
    assert of(changed(3, -0.0)) == of(changed(3, 0.0))
    assert checksums({"nothing": torch.empty(0)}) == {"nothing": ("torch.float32", 0)}
    assert checksums({}) == {}


def test_a_device_computes_what_the_cpu_does() -> None:
    assert of(VALUES.to(device_type())) == of(VALUES)
