"""Check that ranks that hold the same part of a model hold the same values.

Averaged gradients keep replicas equal only if they start equal. Ranks that were seeded differently would each train a
model of their own, and nothing but the loss would show it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from .devices import for_collectives
from .fingerprint import BITS, plain_parts
from .mesh import ProcessMesh


def check_replicas(held: Iterable[Tensor], mesh: ProcessMesh, scope: str, model: str) -> None:
    """Raise on every rank of ``mesh`` if what its replicas hold differs. Collective over ``mesh``.

    Args:
        held: What this rank holds of the model.
        mesh: The ranks.
        scope: ``I`` if the nodes are replicas of each other, ``N`` if all ranks are; nothing is to be checked for
            ``G``.
        model: The model's name in the error.

    Raises:
        ValueError: If they differ.
    """
    if not replicas_are_equal(held, mesh, scope):
        who = "nodes" if scope == "I" else "ranks"
        raise ValueError(
            f"{model}: under optimizer scope {scope} the {who} are replicas of each other, but they hold different "
            "weights: before the first forward, seed all ranks alike, load the same checkpoint on all of them, or "
            "broadcast rank 0's weights (sync_module_states=True, broadcast_from_rank0)"
        )


def replicas_are_equal(held: Iterable[Tensor], mesh: ProcessMesh, scope: str) -> bool:
    """Return on every rank whether all replicas hold the same; for arguments see :func:`check_replicas`. Collective."""
    if scope == "G":
        return True
    # Sums of bits, not of values: integer sums do not depend on the order in which a device adds.
    plain = [part for tensor in held for part in plain_parts(tensor.detach())]
    sums = [tensor.view(BITS[tensor.itemsize]).sum(dtype=torch.int64) for tensor in plain]
    if not sums:
        return True
    total = torch.stack(sums).sum()
    bounds = torch.stack([total, -total])
    group = mesh.inter if mesh.inter is not None else mesh.intra
    if group is not None:
        bounds = for_collectives(bounds, group)  # parameters may be offloaded
    if mesh.inter is not None:
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=mesh.inter)
    if scope == "I":  # other ranks of the node hold other parts, but are to learn of it, too
        bounds = torch.stack([(bounds[0] != -bounds[1]).long(), bounds.new_zeros(())])
    if mesh.intra is not None:
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=mesh.intra)
    return bool(bounds[0].item() == -bounds[1].item())
