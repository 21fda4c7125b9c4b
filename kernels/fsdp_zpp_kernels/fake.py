"""Operations for tracing: the shape and dtype of each result, without values."""

from collections.abc import Callable

import torch
from torch import Tensor

from .payload import PayloadLayout


class Fake:
    """The backend of tensors without values."""

    @staticmethod
    def quantize(
        numel: int, rows: int, cols: int, layout: PayloadLayout, dtype: torch.dtype
    ) -> Callable[[Tensor], Tensor]:
        """See ``fsdp_zpp_kernels.quantize``."""
        return _payload(rows * cols, numel, layout)

    @staticmethod
    def dequantize_sum(
        peers: int, numel: int, rows: int, cols: int, layout: PayloadLayout, dtype: torch.dtype
    ) -> Callable[[Tensor, Tensor, float], None]:
        """See ``fsdp_zpp_kernels.dequantize_sum``."""
        return _nothing

    @staticmethod
    def dequantize_sum_quantize(
        peers: int, numel: int, rows: int, cols: int, layout: PayloadLayout, out_layout: PayloadLayout
    ) -> Callable[[Tensor, float], Tensor]:
        """See ``fsdp_zpp_kernels.dequantize_sum_quantize``."""
        return _payload(rows * cols, numel, out_layout)

    @staticmethod
    def quantize_with_feedback(
        numel: int, rows: int, cols: int, layout: PayloadLayout, error_layout: PayloadLayout | None, dtype: torch.dtype
    ) -> Callable[[Tensor, Tensor, float], Tensor]:
        """See ``fsdp_zpp_kernels.quantize_with_feedback``."""
        return _payload(rows * cols, numel, layout)

    @staticmethod
    def dequantize_sum_quantize_with_feedback(
        peers: int,
        numel: int,
        chunks: int,
        layout: PayloadLayout,
        out_layout: PayloadLayout,
        error_layout: PayloadLayout | None,
    ) -> Callable[[Tensor, Tensor, float, float], Tensor]:
        """See ``fsdp_zpp_kernels.dequantize_sum_quantize_with_feedback``."""
        return _payload(chunks, numel, out_layout)

    @staticmethod
    def quantize_delta(
        chunks: int, numel: int, base_layout: PayloadLayout, layout: PayloadLayout, dtype: torch.dtype
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """See ``fsdp_zpp_kernels.quantize_delta``."""
        return _payload(chunks, numel, layout)

    @staticmethod
    def add_delta(
        chunks: int, numel: int, base_layout: PayloadLayout, layout: PayloadLayout
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """See ``fsdp_zpp_kernels.add_delta``."""
        return _payload(chunks, numel, base_layout)

    @staticmethod
    def dequantize_rows(
        chunks: int, numel: int, stride: int, layout: PayloadLayout, dtype: torch.dtype
    ) -> Callable[[Tensor, Tensor], None]:
        """See ``fsdp_zpp_kernels.dequantize_rows``."""
        return _nothing

    @staticmethod
    def dequantize_nf4_rows(
        chunks: int, numel: int, stride: int, layout: PayloadLayout, dtype: torch.dtype
    ) -> Callable[[Tensor, Tensor], None]:
        """See ``fsdp_zpp_kernels.dequantize_nf4_rows``."""
        return _nothing


def _payload(chunks: int, numel: int, layout: PayloadLayout) -> Callable[..., Tensor]:
    """Return a call that returns a payload, on the device of its first tensor."""
    shape = (chunks, layout.nbytes(numel))
    return lambda tensor, *_: tensor.new_empty(shape, dtype=torch.uint8)


def _nothing(*_: Tensor | float) -> None:
    """Return nothing, as a call that only writes does."""


FAKE = Fake()
