"""Interface of the reference, Triton and fake backends: a function for each op, which prepares a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .payload import PayloadLayout


class Backend(Protocol):
    """A module that runs ops: each function takes checked arguments, and returns a function that runs the op."""

    def quantize(
        self, numel: int, rows: int, cols: int, layout: PayloadLayout, dtype: torch.dtype
    ) -> Callable[[Tensor], Tensor]:
        """See ``fsdp_zpp_kernels.quantize``."""

    def dequantize_sum(
        self, peers: int, numel: int, rows: int, cols: int, layout: PayloadLayout, dtype: torch.dtype
    ) -> Callable[[Tensor, Tensor, float], None]:
        """See ``fsdp_zpp_kernels.dequantize_sum``."""

    def dequantize_sum_quantize(
        self, peers: int, numel: int, rows: int, cols: int, layout: PayloadLayout, out_layout: PayloadLayout
    ) -> Callable[[Tensor, float], Tensor]:
        """See ``fsdp_zpp_kernels.dequantize_sum_quantize``."""

    def quantize_with_feedback(
        self,
        numel: int,
        rows: int,
        cols: int,
        layout: PayloadLayout,
        error_layout: PayloadLayout | None,
        dtype: torch.dtype,
    ) -> Callable[[Tensor, Tensor, float], Tensor]:
        """See ``fsdp_zpp_kernels.quantize_with_feedback``."""

    def dequantize_sum_quantize_with_feedback(
        self,
        peers: int,
        numel: int,
        chunks: int,
        layout: PayloadLayout,
        out_layout: PayloadLayout,
        error_layout: PayloadLayout | None,
    ) -> Callable[[Tensor, Tensor, float, float], Tensor]:
        """See ``fsdp_zpp_kernels.dequantize_sum_quantize_with_feedback``."""

    def quantize_delta(
        self, chunks: int, numel: int, base_layout: PayloadLayout, layout: PayloadLayout, dtype: torch.dtype
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """See ``fsdp_zpp_kernels.quantize_delta``."""

    def add_delta(
        self, chunks: int, numel: int, base_layout: PayloadLayout, layout: PayloadLayout
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """See ``fsdp_zpp_kernels.add_delta``."""

    def dequantize_rows(
        self, chunks: int, numel: int, stride: int, layout: PayloadLayout, dtype: torch.dtype
    ) -> Callable[[Tensor, Tensor], None]:
        """See ``fsdp_zpp_kernels.dequantize_rows``."""

    def dequantize_nf4_rows(
        self, chunks: int, numel: int, stride: int, layout: PayloadLayout, dtype: torch.dtype
    ) -> Callable[[Tensor, Tensor], None]:
        """See ``fsdp_zpp_kernels.dequantize_nf4_rows``."""
