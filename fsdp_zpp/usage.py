"""Which parameters some rank has used: others have nothing to reduce, but must reduce the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from .accelerator import accelerator
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
    groups = [group for group in (mesh.intra, mesh.inter) if group is not None]
    found = accelerator()
    on_cpu = found is None or any("gloo" in dist.get_backend(group) for group in groups)
    flags = torch.tensor(used, dtype=torch.uint8, device="cpu" if on_cpu else found)
    for group in groups:
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return lambda: [bool(flag) for flag in flags.tolist()]
