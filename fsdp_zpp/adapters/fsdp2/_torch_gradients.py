"""Private names of torch's fully_shard: unsharded gradients, and the flat tensor in which it reduces them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    _get_gradient_divide_factors,
    foreach_reduce_scatter_copy_in,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import _get_dim0_padded_size
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from fsdp_zpp.collectives.exact_places import sent_exactly
from fsdp_zpp.collectives.flat_layout import NO_PARAMETERS, FlatLayout, Piece
from fsdp_zpp.collectives.gradient_reduce import GradientReduce

from ._torch_trained import is_trained


def has_gradient(param: FSDPParam) -> bool:
    """Whether a parameter that was unsharded has an unsharded gradient, of its last backward or accumulated."""
    return param._unsharded_param.grad is not None or param.unsharded_accumulated_grad is not None


def with_gradient(params: list[FSDPParam]) -> list[FSDPParam]:
    """Those for which :func:`has_gradient` holds."""
    return [p for p in params if p._unsharded_param.grad is not None or p.unsharded_accumulated_grad is not None]


def small_parameters(group: FSDPParamGroup) -> frozenset[str]:
    """The FQNs of the parameters that codecs leave as they are. See [Note: Small parameters] in exact_places.py."""
    params = group.fsdp_params
    exact = sent_exactly([param._orig_size for param in params])
    return frozenset(p._param_fqn or "" for p, is_exact in zip(params, exact, strict=True) if is_exact)


def divided_by(group: FSDPParamGroup, dtype: torch.dtype) -> float:
    """What torch has divided a gradient by when it has it reduced: in fp16, a part of the number of ranks or more.

    Args:
        group: The group of the gradient.
        dtype: In which it is reduced.
    """
    ranks, factor = group._reduce_scatter_process_group, group.gradient_divide_factor
    before, *_ = _get_gradient_divide_factors(
        ranks, None, dtype, group.device.type, factor, group.force_sum_reduction_for_comms
    )
    # With nothing to scatter, torch divides by the whole factor in place of reducing.
    instead = factor if factor is not None and ranks.size() == 1 else 1.0
    return float(before or 1) * instead


def take_gradient(param: FSDPParam) -> Tensor | None:
    """Take from a parameter the unsharded gradient of its last backward, or if there is none, the accumulated one."""
    gradient: Tensor | None = None
    if param.unsharded_param.grad is not None:
        gradient, param.unsharded_param.grad = param.unsharded_grad_data, None
    elif param.unsharded_accumulated_grad is not None:
        gradient, param.unsharded_accumulated_grad = param.unsharded_accumulated_grad_data, None
    return gradient


def flatten_gradients(group: FSDPParamGroup, params: list[FSDPParam], gradients: list[Tensor | None]) -> Tensor:
    """Unsharded gradients in one flat tensor, in the layout and dtype in which torch reduces them.

    Args:
        group: The group of the parameters.
        params: Those that require gradients, in the order in which torch reduces them.
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


def _gradient_dtype(group: FSDPParamGroup, params: list[FSDPParam]) -> torch.dtype:
    """The dtype in which torch reduces; the same on all ranks, whichever gradients they have."""
    if group._reduce_dtype is not None:
        return group._reduce_dtype
    # From torch 2.14 on, gradients may have another dtype than the unsharded parameters.
    dtypes = [getattr(param, "unsharded_grad_dtype", None) or param.unsharded_param.dtype for param in params]
    return functools.reduce(torch.promote_types, dtypes)


class GradientGroup(FSDPParamGroup):
    """A parameter group that knows which gradients it reduces, and where they lie in the flat tensor that it reduces.

    Attributes:
        reduction: Reduces the gradients; None where torch does.
        step_layout: Where parameters lie in the gradient that torch is about to reduce.
    """

    reduction: GradientReduce | None
    step_layout: FlatLayout
    _layouts: dict[tuple[FSDPParam, ...], FlatLayout]

    def adopt(self) -> None:
        """Initialize the attributes of this class; torch reduces until ``reduction`` is set."""
        self.reduction, self.step_layout, self._layouts = None, NO_PARAMETERS, {}

    def reduced_params(self) -> list[FSDPParam]:
        """The parameters whose gradients a micro-batch reduces, in torch's order; the same on all ranks.

        These are those that require a gradient, and those that have one of an earlier micro-batch, which torch reduces
        whatever they require by now. A requirement counts whether it was set on the parameter that modules show while
        the group is sharded or on the other one.
        """
        params = self.fsdp_params
        if (order := getattr(self, "_reduce_scatter_param_indices", None)) is not None:  # from torch 2.14 on
            params = [params[index] for index in order]
        accumulated = frozenset() if self.reduction is None else self.reduction.accumulated.names
        return [
            param
            for param in params
            if hasattr(param, "_unsharded_param")
            and (is_trained(param) or has_gradient(param) or param._param_fqn in accumulated)
        ]

    def layout_of(self, params: list[FSDPParam]) -> FlatLayout:
        """Where ``params`` lie in a gradient that consists of theirs."""
        key = tuple(params)
        if key not in self._layouts:
            self._layouts[key] = self._layout_of(params)
        return self._layouts[key]

    def _layout_of(self, params: list[FSDPParam]) -> FlatLayout:
        order = getattr(self, "_reduce_scatter_param_indices", None) or range(len(self.fsdp_params))  # from 2.14 on
        places = {id(self.fsdp_params[index]): place for place, index in enumerate(order)}
        pieces = (Piece(places[id(p)], p._param_fqn or "", p._sharded_param_data.numel()) for p in params)
        return FlatLayout.dense(pieces, small_parameters(self))

    def reduced_by_torch(self, params: list[FSDPParam]) -> list[FSDPParam]:
        """Those of ``params`` of which torch reduces a gradient, or zeros in its place."""
        if not self.reduces_unused:
            return with_gradient(params)
        return [param for param in params if param._unsharded_param.requires_grad or has_gradient(param)]

    @property
    def reduces_unused(self) -> bool:
        """Whether torch was told to reduce zeros for parameters without gradients, which it knows from 2.13 on."""
        return getattr(self, "reduce_scatter_unused_params", False)
