"""The private names of torch's by which process groups are named, and of the caches that keep these names.

[Note: Names of groups]
Members that make a group among themselves meet in the job's store under the group's name. torch derives this name from
a count of groups that each member keeps: in torch 2.11 to 2.13, of those that it has been in, so that members whose
counts differ wait for each other forever (one more group that only some of them are in is enough, such as that of a
pipeline's first and last stage); from 2.14 on, of those that it has made, so that members of a group that only they
have made wait forever for the others when all ranks make the next one. So our groups are named by their ranks, and by
how many groups of these very ranks the job has had before. All members have made those, so they agree on the number
without asking; it grows with every group, so that a group that is made again does not find in the store what an older
one has left there.

A name is also what a DeviceMesh keeps of its groups, while meshes are equal if their ranks are. torch caches what
operations on DTensors return, with the meshes, by equality: a model computes with the mesh of an earlier one, whose
groups may be gone by now, in the next job of a process above all. There the count begins again, so that what is made
in the same order has the same names: state dicts that a user has kept find their groups again. Where the order differs
the names do, and so torch forgets what it has cached when the first unit over a group is made, or when groups end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor, _redistribute

# By default group: how many groups of the same ranks were made in the job, for as long as it lasts.
_made: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()


@contextmanager
def named_by_ranks() -> Iterator[None]:
    """Name the groups that are made in this context by their ranks. See [Note: Names of groups]."""
    world = dist.group.WORLD
    assert world is not None
    made = _made.setdefault(world, Counter())

    def name(ranks: Sequence[int], use_hashed_name: bool) -> Any:  # a str, which torch calls GroupName
        number = made[tuple(ranks)]
        made[tuple(ranks)] += 1
        return f"fsdp_zpp {number} of {'_'.join(map(str, ranks))}"

    original = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = name
    try:
        yield
    finally:
        distributed_c10d._process_group_name = original


def forget_equal_meshes() -> None:
    """Have torch forget the meshes that it has cached: of one that is equal, groups may be gone, or this rank another.

    Threads have caches of their own; those of other threads stay.
    """
    propagate: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    plan: Any = getattr(_redistribute, "_gen_transform_infos", None)
    clears = (
        propagate.cache_clear,
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None),
        getattr(plan, "cache_clear", None),
        getattr(_redistribute, "clear_redistribute_planner_cache", None),
    )
    for clear in clears:
        if clear is not None:  # not every torch has each of these caches
            clear()
