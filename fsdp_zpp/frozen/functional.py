"""Linear layers and embeddings with frozen weights, dequantized in the forward and again in the backward, not saved."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Frozen(Protocol):
    """A frozen weight or a view of one."""

    dtype: torch.dtype

    def dense(self, dtype: torch.dtype, device: torch.device) -> Tensor: ...


# Dynamo would trace into the gather, and take its buffers, and whether they hold the weight, for constants.
@torch.compiler.disable
def frozen_linear(x: Tensor, weight: Frozen, bias: Tensor | None) -> Tensor:
    """Apply ``F.linear`` with a frozen weight, in the dtype of ``x``, or autocast's.

    Args:
        x: [..., in] in any floating dtype.
        weight: [out, in].
        bias: [out] or None.

    Returns:
        [..., out].
    """
    dtype = compute_dtype(x)
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return _FrozenLinear.apply(x, bias, weight, dtype)
    return _linear(x, bias, weight, dtype)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer computes with an input: the input's, or autocast's."""
    # Autocast would choose in F.linear, but the weight is dequantized before that, into the dtype to compute in.
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype


@torch.compiler.disable
@torch.no_grad()
def frozen_embedding(tokens: Tensor, weight: Frozen) -> Tensor:
    """Apply ``F.embedding`` with a frozen weight, in the weight's own dtype: integer tokens imply none."""
    return F.embedding(tokens, weight.dense(weight.dtype, tokens.device))


def _linear(x: Tensor, bias: Tensor | None, weight: Frozen, dtype: torch.dtype) -> Tensor:
    return F.linear(x.to(dtype), weight.dense(dtype, x.device), None if bias is None else bias.to(dtype))


class _Context(Protocol):
    """What the forward leaves for the backward."""

    weight: Frozen
    dtype: torch.dtype
    input_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    needs_input_grad: tuple[bool, ...]


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, bias: Tensor | None, weight: Frozen, dtype: torch.dtype) -> Tensor:
        # The weight itself, not its dequantized values, which would stay in memory until the backward.
        ctx.weight, ctx.dtype, ctx.input_dtype = weight, dtype, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _linear(x, bias, weight, dtype)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (gradient,) = gradients
        for_x = for_bias = None
        if ctx.needs_input_grad[0]:
            # Collective, like the forward: the ranks of a base must run the same layers' backwards.
            dense = ctx.weight.dense(ctx.dtype, gradient.device)
            for_x = torch.matmul(gradient.to(ctx.dtype), dense).to(ctx.input_dtype)
        if ctx.needs_input_grad[1]:
            # Any number of leading dimensions, also none: the input may be a single vector.
            for_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0).to(ctx.bias_dtype)
        return for_x, for_bias, None, None
