"""Private names of torch's fully_shard: unsharded gradients, and the flat tensor in which it reduces them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    _get_gradient_divide_factors,
    foreach_reduce_scatter_copy_in,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import _get_dim0_padded_size
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def has_gradient(param: FSDPParam) -> bool:
    """Return whether a parameter that was unsharded has an unsharded gradient, of its last backward or accumulated."""
    return param._unsharded_param.grad is not None or param.unsharded_accumulated_grad is not None


def take_gradient(param: FSDPParam) -> Tensor | None:
    """Take from a parameter the unsharded gradient of its last backward, or if there is none, the accumulated one."""
    gradient: Tensor | None = None
    if param.unsharded_param.grad is not None:
        gradient, param.unsharded_param.grad = param.unsharded_grad_data, None
    elif param.unsharded_accumulated_grad is not None:
        gradient, param.unsharded_accumulated_grad = param.unsharded_accumulated_grad_data, None
    return gradient


def divided_by(group: FSDPParamGroup, dtype: torch.dtype) -> float:
    """Return what torch has divided a gradient by before its reduction, as it does in fp16; 1 if by nothing.

    Args:
        group: The group of the gradient.
        dtype: The dtype in which it is reduced.
    """
    ranks, factor = group._reduce_scatter_process_group, group.gradient_divide_factor
    before, *_ = _get_gradient_divide_factors(
        ranks, None, dtype, group.device.type, factor, group.force_sum_reduction_for_comms
    )
    # With nothing to scatter, torch divides by the whole factor in place of reducing.
    instead = factor if factor is not None and ranks.size() == 1 else 1.0
    return float(before or 1) * instead


def flatten_gradients(group: FSDPParamGroup, params: Sequence[FSDPParam], gradients: Sequence[Tensor | None]) -> Tensor:
    """Return unsharded gradients in one flat tensor, in the layout and dtype in which torch reduces them.

    Args:
        group: The group of the parameters.
        params: The parameters, in the order in which torch reduces them.
        gradients: The gradient of each; None counts as zeros.

    Returns:
        Flat [world * numel], chunk i for rank i.
    """
    world = group._reduce_scatter_process_group.size()
    dtype = _gradient_dtype(group, params)
    parts: list[Tensor] = []
    for param, gradient in zip(params, gradients, strict=True):
        if gradient is None:
            gradient = param._get_grad_inner_tensor(torch.zeros_like(param.unsharded_param, dtype=dtype))
        if param.fsdp_placement.dim != 0 and world > 1:
            # The copy below cuts along dimension 0, so the shards along another one are put there.
            gradient = torch.cat(gradient.chunk(world, dim=param.fsdp_placement.dim), dim=0)
        parts.append(gradient.to(dtype))
    numel = sum(_get_dim0_padded_size(part.size(), world).numel() for part in parts)
    flat = torch.empty(numel, dtype=dtype, device=group.device)
    foreach_reduce_scatter_copy_in(parts, flat, world)
    return flat


def _gradient_dtype(group: FSDPParamGroup, params: Sequence[FSDPParam]) -> torch.dtype:
    """Return the dtype in which torch reduces; the same on all ranks, whichever gradients they have."""
    if group._reduce_dtype is not None:
        return group._reduce_dtype
    # From torch 2.14 on, gradients may have another dtype than the unsharded parameters.
    dtypes = [getattr(param, "unsharded_grad_dtype", None) or param.unsharded_param.dtype for param in params]
    return functools.reduce(torch.promote_types, dtypes)
