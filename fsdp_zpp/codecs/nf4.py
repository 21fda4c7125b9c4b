"""NF4, the 4-bit code for normally distributed weights of QLoRA (arXiv 2305.14314, section 3).

bitsandbytes encodes, so that weights round exactly as they do there. The library's own kernel decodes, to the same
values, because it reads codes and scales where a gather has left them; bitsandbytes would need copies of both.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_zpp.extras import how_to_install
from fsdp_zpp.suggestions import explains_keywords
from fsdp_zpp_kernels import PayloadLayout, dequantize_nf4_rows
from fsdp_zpp_kernels.nf4 import levels_on

from .base import Place, check_block
from .blocks import BlockCodec, blocks_of_layout

MIN_BLOCK = 64
"""Smallest block for which bitsandbytes has kernels on all devices."""


@explains_keywords
@dataclass(frozen=True)
class NF4(BlockCodec):
    """16 levels from -1 to 1, dense around 0, times the absmax of a block; 0.5 + 4 / block bytes per value.

    For frozen weights. A block with a NaN or an infinity decodes to NaN. Codes and scales lie where those of
    ``Int4`` do.

    Args:
        block: Number of values that share one fp32 scale, a power of two from 64 to 4096.

    Raises:
        TypeError: If ``block`` is not an int.
        ValueError: If ``block`` is not a power of two in that range.
        ModuleNotFoundError: If bitsandbytes is not installed.
    """

    block: int = 64
    places: ClassVar[tuple[Place, ...]] = ("frozen",)

    def __post_init__(self) -> None:
        check_block(self, self.block)
        if self.block < MIN_BLOCK:
            raise ValueError(f"NF4's block must be a power of two from {MIN_BLOCK} to 4096, got {self.block}")
        _ = self.layout  # raises if the block is no power of two or too large
        # Looked up, not imported: that takes seconds, and a strategy may be made only for a plan.
        if importlib.util.find_spec("bitsandbytes") is None:
            raise ModuleNotFoundError(f"NF4 needs bitsandbytes: {how_to_install('nf4')}", name="bitsandbytes")

    def __str__(self) -> str:
        return f"nf4({self.block})"

    @cached_property
    def layout(self) -> PayloadLayout:
        """Return where codes and scales lie in a payload of whole blocks."""
        return PayloadLayout(4, self.block)

    def nbytes(self, numel: int) -> int:
        return self.layout.nbytes(self._padded(numel))

    def blocks(self, payload: Tensor, numel: int) -> tuple[Tensor, ...]:
        return blocks_of_layout(self.layout, payload, numel)

    def encode(self, values: Tensor, rows: int, cols: int) -> Tensor:
        chunks, numel = rows * cols, values.numel() // (rows * cols)
        padded, layout = self._padded(numel), self.layout
        payload = values.new_zeros((chunks, self.nbytes(numel)), dtype=torch.uint8)
        if numel == 0:
            return payload
        grid = values.view(rows, cols, numel).transpose(0, 1).reshape(chunks, numel)
        # Zeros complete the last block without changing its absmax.
        codes, scales = self._quantize(F.pad(grid, (0, padded - numel)).view(-1))
        layout.codes(payload, padded).copy_(codes.view(chunks, -1))
        layout.scales(payload, padded).copy_(scales.view(chunks, -1))
        return payload

    def _quantize(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and scales of whole blocks; the scale of a block that is not finite is NaN."""
        import bitsandbytes.functional  # on use, since that takes seconds

        # bitsandbytes quantizes in CUDA's default stream, whichever stream is current. So that stream waits for the
        # values, and the current one for the result.
        current = torch.cuda.current_stream(flat.device) if flat.is_cuda else None
        if current is not None:
            torch.cuda.default_stream(flat.device).wait_stream(current)
        codes, state = bitsandbytes.functional.quantize_4bit(flat, blocksize=self.block, quant_type="nf4")
        if current is not None:
            current.wait_stream(torch.cuda.default_stream(flat.device))
        finite = flat.view(-1, self.block).isfinite().all(dim=1)
        return codes, state.absmax.masked_fill(~finite, torch.nan)

    def decode(self, payload: Tensor, out: Tensor, rows: int, cols: int) -> None:
        numel = out.numel() // (rows * cols)
        padded = self._padded(numel)
        if numel == padded and (rows == 1 or cols == 1):  # nothing changes places
            self.decode_rows(payload, out)
            return
        values = out.new_empty(rows * cols, padded)
        self.decode_rows(payload, values)
        out.view(cols, rows, numel).copy_(values.view(rows, cols, padded)[..., :numel].transpose(0, 1))

    def prepare_decode(self, device: torch.device) -> None:
        levels_on(device)

    def decode_rows(self, payload: Tensor, out: Tensor) -> None:
        dequantize_nf4_rows(payload, out, self.block)

    def decode_sum(self, payload: Tensor, out: Tensor, rows: int, cols: int, scale: float) -> None:
        raise NotImplementedError("NF4 can't sum payloads: it encodes frozen weights, which no reduction carries")

    def _padded(self, numel: int) -> int:
        """Round ``numel`` up to whole blocks: bitsandbytes takes all chunks at once, and no block may span two."""
        return -(-numel // self.block) * self.block
