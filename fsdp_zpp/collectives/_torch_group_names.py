"""The private name of torch's by which process groups are named.

[Note: Names of groups]
Members that make a group among themselves meet in the job's store under the group's name. torch derives this name from
a count of groups that each member keeps: in torch 2.11 to 2.13, of those that it has been in, so that members whose
counts differ wait for each other forever (one more group that only some of them are in is enough, such as that of a
pipeline's first and last stage); from 2.14 on, of those that it has made, so that members of a group that only they
have made wait forever for the others when all ranks make the next one. So groups that not all ranks make are named by a
number that their members agree on, past torch's count. It grows with every agreement: a group that is made again does
not find what an older one has left in the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .devices import collective_device

_last_number = 0


def next_number(group: dist.ProcessGroup | None) -> int:
    """Return a number that is larger than any before, and the same on all ranks of ``group``. Collective over it.

    Args:
        group: The ranks; None means this rank alone.
    """
    global _last_number
    _last_number += 1
    if group is not None:
        number = torch.tensor(_last_number, dtype=torch.int64, device=collective_device(group))
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=group)
        _last_number = int(number)
    return _last_number


@contextmanager
def named_by(number: int) -> Iterator[None]:
    """Name the groups that are made in this context by their ranks and ``number``. See [Note: Names of groups]."""

    def name(ranks: Sequence[int], use_hashed_name: bool) -> Any:  # a str, which torch calls GroupName
        return f"fsdp_zpp {number} of {'_'.join(map(str, ranks))}"

    original = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = name
    try:
        yield
    finally:
        distributed_c10d._process_group_name = original
