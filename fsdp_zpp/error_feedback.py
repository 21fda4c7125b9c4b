"""Configuration of error feedback on quantized gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .codecs import Codec


@dataclass(frozen=True)
class LoCo:
    """LoCo's error feedback: the gradient sent is ``h = g + e``, then ``e = beta*e + (1-beta)*(h - deq(Q(h)))``.

    Source: LoCo, arXiv 2407.04480. ``beta`` weighs the old error, so 0 is classical error feedback.

    Args:
        beta: Weight of the old error, in [0, 1).
        reset_every: Optimizer steps after which all errors are reset to zero; 0 never resets.
        hops: Where errors are kept: ``"inter"`` (parameters / gpus_per_node values) or ``"both"``.
        dtype: Codec of the stored errors; None keeps them in fp32.

    Raises:
        ValueError: If a value is outside of its range.
        TypeError: If ``dtype`` is not a codec.
    """

    beta: float = 0.8
    reset_every: int = 1024
    hops: Literal["inter", "both"] = "inter"
    dtype: Codec | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta must be in [0, 1), got {self.beta!r}")
        if not isinstance(self.reset_every, int) or self.reset_every < 0:
            raise ValueError(f"reset_every must be an int of 0 or more optimizer steps, got {self.reset_every!r}")
        if self.hops not in ("inter", "both"):
            raise ValueError(f"hops must be 'inter' or 'both', got {self.hops!r}")
        if self.dtype is not None and not isinstance(self.dtype, Codec):
            raise TypeError(f"dtype must be a codec such as Int8(256) or None, got {self.dtype!r}")
