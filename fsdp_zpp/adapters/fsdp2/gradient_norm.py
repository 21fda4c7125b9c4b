"""Clipping of gradients by their norm, where parameters are sharded over different meshes.

torch adds norms up as DTensors, which must be on one mesh. Here each rank adds up what it holds, and ranks then add
these sums up along the dimensions of a mesh that shard parameters. Copies are counted once, since nothing is added up
along a dimension that replicates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from fsdp_zpp.frozen._torch_sharded import is_flattened

Groups = tuple[dist.ProcessGroup, ...]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    pp_mesh: DeviceMesh | None = None,
) -> Tensor:
    """Clip the gradients of ``parameters``, in place, by their norm over all ranks that shard them. Collective.

    What ``torch.nn.utils.clip_grad_norm_`` does, also where parameters are sharded over different meshes, which torch
    refuses: modules with different optimizer scopes, experts on a mesh of their own, tensor parallelism for some of
    the parameters. Ranks must pass the same parameters in the same order, whether or not each has a gradient for all.
    Ranks that are not in the mesh of a parameter count as holding copies: experts must be DTensors over the axis along
    which ranks hold different ones.

    Args:
        parameters: Parameters of ``fully_shard``, with a strategy or torch's own, and plain ones, whose gradients count
            as they are.
        max_norm: The norm that gradients have at most afterwards.
        norm_type: The order of the norm, above 0; ``math.inf`` is the largest absolute value.
        error_if_nonfinite: Whether a norm that is NaN or infinite raises.
        foreach: As torch's.
        pp_mesh: The 1-D mesh of pipeline stages. With it the norm is that of the whole model, of which a rank has the
            parameters of its own stages only.

    Returns:
        The norm before clipping: a tensor of no dimensions, the same on all ranks.

    Raises:
        ValueError: If ``norm_type`` is not above 0, or a parameter belongs to ``FullyShardedDataParallel``.
        RuntimeError: If the norm is not finite and that is an error.

    Examples:
        >>> fsdp_zpp.clip_grad_norm_(model.parameters(), 1.0)
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm_type = float(norm_type)
    _check(parameters, norm_type)
    norms = [
        _reduced(_norm_of_own(members, norm_type, foreach), norm_type, groups)
        for groups, members in _by_groups(parameters).items()
    ]
    total = _combined(norms, norm_type)
    if pp_mesh is not None:
        total = _reduced(total.to(pp_mesh.device_type), norm_type, (pp_mesh.get_group(),))
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of the gradients is {total.item()}, so they can't be clipped; find what made them so, or pass "
            "error_if_nonfinite=False"
        )
    clip_grads_with_norm_([_with_own(p.grad) for p in parameters if p.grad is not None], max_norm, total, foreach)
    return total


def _check(parameters: Sequence[Tensor], norm_type: float) -> None:
    if not norm_type > 0:
        raise ValueError(f"norm_type must be above 0, got {norm_type}; 2.0 and math.inf are the usual ones")
    for parameter in parameters:
        if isinstance(parameter, FlatParameter) or is_flattened(parameter):
            raise ValueError(
                "clip_grad_norm_ got a parameter of FullyShardedDataParallel, which does not show over which ranks it "
                "is sharded; call model.clip_grad_norm_(max_norm) of the outermost FullyShardedDataParallel"
            )


def _by_groups(parameters: Iterable[Tensor]) -> dict[Groups, list[Tensor]]:
    """Sort parameters by the ranks that their norms are added up over, in an order that all ranks share."""
    found: dict[Groups, list[Tensor]] = {}
    for parameter in parameters:
        groups: Groups = ()
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            dims = [dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate()]
            groups = tuple(map(mesh.get_group, dims))
        found.setdefault(groups, []).append(parameter)
    return found


def _norm_of_own(parameters: Sequence[Tensor], norm_type: float, foreach: bool | None) -> Tensor:
    """Return the norm of the gradients that this rank holds, on the device that ranks communicate on."""
    shards = [_own_gradient(parameter) for parameter in parameters if parameter.grad is not None]
    shards = [shard for shard in shards if shard.numel()]  # of which torch has no largest value
    first = parameters[0]
    device = first.device_mesh.device_type if isinstance(first, DTensor) else first.device
    norm = get_total_norm(shards, norm_type, foreach=foreach) if shards else torch.zeros(())
    return norm.to(device, torch.float32)


def _own_gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(parameter, DTensor)
    if gradient.placements != parameter.placements:  # sums that tensor parallelism has left to be reduced
        gradient = gradient.redistribute(placements=parameter.placements)
    return gradient.to_local()


def _with_own(gradient: Tensor) -> Tensor:
    """Return a tensor whose gradient is the part of ``gradient`` that this rank holds.

    Scaled alone, since torch can't scale DTensors of different meshes together, and torch 2.11 scales a copy of those
    that are left to be reduced.
    """
    own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    holder = own.detach()
    holder.grad = own
    return holder


def _reduced(norm: Tensor, norm_type: float, groups: Groups) -> Tensor:
    """Return the norm over all ranks of ``groups``, one dimension of a mesh after the other."""
    for group in groups:
        if math.isinf(norm_type):
            norm = torch.where(norm.isnan(), math.inf, norm)  # of which a maximum may lose sight
            dist.all_reduce(norm, dist.ReduceOp.MAX, group)
        else:
            norm = norm.pow(norm_type)
            dist.all_reduce(norm, dist.ReduceOp.SUM, group)
            norm = norm.pow(1.0 / norm_type)
    return norm


def _combined(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of all gradients, from the norms of parts of them."""
    if not norms:
        return torch.zeros(())
    device = norms[0].device
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), norm_type)
