"""Values that are hard to quantize, and helpers to compare what became of them."""

import numpy as np
import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EXPONENTS = {torch.float32: (-149, 120), torch.bfloat16: (-133, 120), torch.float16: (-24, 12)}


def spread(numel: int, dtype: torch.dtype, seed: int = 0, piece: int = 37) -> Tensor:
    """Make values whose magnitude jumps every ``piece`` values, over all of the dtype's range, with zeros between."""
    rng = np.random.default_rng(seed)
    low, high = EXPONENTS[dtype]
    exponents = rng.integers(low, high, size=numel // piece + 1).repeat(piece)[:numel]
    values = rng.standard_normal(numel) * 2.0**exponents
    values[rng.random(numel) < 0.05] = 0
    return torch.from_numpy(values).to(dtype)


def normal(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Make values that look like weights."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def peers(count: int, numel: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Make one tensor of values for each peer."""
    return [normal(numel, dtype, seed) for seed in range(count)]


def same(actual: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors are equal, with NaN equal to NaN: its bits differ between processors."""
    return bool(
        torch.equal(actual.isnan(), expected.isnan()) and torch.equal(actual.nan_to_num(), expected.nan_to_num())
    )
