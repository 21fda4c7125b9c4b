"""Which parameters some rank has used: others have nothing to reduce, but must reduce the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from .agreement import device_for
from .topology import ProcessMesh


def used_by_any(used: Sequence[bool], mesh: ProcessMesh) -> Callable[[], list[bool]]:
    """Tell all ranks of ``mesh`` what this one has used. Collective over ``mesh``.

    Args:
        used: For each parameter, whether this rank has used it; as many on all ranks.
        mesh: The ranks.

    Returns:
        What waits for the answer, for each parameter whether any rank has used it. A rank that has used everything
        knows it without asking, so that its host need not wait for the device.
    """
    if mesh.group is None or mesh.topology.world == 1:
        return lambda: list(used)
    flags = torch.tensor(used, dtype=torch.uint8, device=device_for(mesh.group))
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=mesh.group)
    return lambda: [bool(flag) for flag in flags.tolist()]
