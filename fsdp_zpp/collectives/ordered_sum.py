"""Sums of numbers over ranks, whose bits do not depend on how a collective adds."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from .devices import collective_device


def ordered_sum(values: Tensor, groups: Iterable[dist.ProcessGroup]) -> list[float]:
    """Return numbers summed over the ranks of ``groups``, one after the other, in fp64. Collective.

    All ranks add the same numbers in the same order and get the same bits, also in groups that hold copies of each
    other. So a sum over all axes of a mesh, one after the other, is the same on the whole mesh.

    Args:
        values: Numbers of this rank, 1-D; as many on all ranks.
        groups: The groups. Ranks of torch's fake backend are taken to have the same values.
    """
    for group in groups:
        if dist.get_backend(group) == "fake":
            continue
        # Each number is added to zeros alone, which is exact in any order.
        of_all = torch.zeros(group.size(), len(values), dtype=torch.float64, device=collective_device(group))
        of_all[dist.get_rank(group)] = values
        dist.all_reduce(of_all, group=group)
        values = of_all.cpu().sum(0)
    sums: list[float] = values.tolist()
    return sums
