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

A DeviceMesh knows its groups by name alone, but meshes are equal if their ranks are. torch caches the results of
operations on DTensors, meshes included, and finds them by equality. So a model may compute with the mesh of an earlier
one whose groups are gone, above all in the next job of a process. There the count begins again: groups that are made in
the same order have the same names, so that state dicts of an earlier job find their groups again. In another order they
have other names. So torch must forget what it has cached when the first unit over a group is made, and when groups end.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _redistribute

from fsdp_zpp.torch_internals import major_minor

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
    """Make torch forget its cached meshes: an equal one may have lost its groups, or have this process at another rank.

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
    if major_minor(torch.__version__) < (2, 13):
        _free_ended_groups()


def _free_ended_groups() -> None:
    """Take groups that have ended from all meshes, since their threads live as long as they do.

    Until torch 2.12, the cache that is cleared in C++ never lets go of the meshes in it.
    """
    for mesh in gc.get_objects():
        if type(mesh) is DeviceMesh:
            groups: dict[str, dist.ProcessGroup] = getattr(mesh, "_pg_registry", {})
            for name, group in list(groups.items()):
                if group not in distributed_c10d._world.pg_map:
                    del groups[name]
