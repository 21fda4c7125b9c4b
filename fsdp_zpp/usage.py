"""Whether any rank has used a parameter: all ranks reduce the same parameters, used or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from .agreement import device_for
from .topology import ProcessMesh


def used_by_any(used: Sequence[bool], mesh: ProcessMesh) -> Callable[[], list[bool]]:
    """Exchange which parameters each rank has used. Collective over ``mesh``.

    Args:
        used: For each parameter, whether this rank has used it. All ranks pass equally many.
        mesh: The ranks.

    Returns:
        A function that waits for the device and returns, for each parameter, whether any rank has used it. A caller
        that has used all of them knows the answer and need not call it.
    """
    if mesh.group is None or mesh.topology.world == 1:
        return lambda: list(used)
    flags = torch.tensor(used, dtype=torch.uint8, device=device_for(mesh.group))
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=mesh.group)
    return lambda: [bool(flag) for flag in flags.tolist()]
