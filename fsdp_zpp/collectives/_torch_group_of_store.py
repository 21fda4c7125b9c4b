"""Process groups of processes that are in no common job: they meet in a store of their own.

torch's public functions make groups of the job's ranks alone. Its private helper makes the job's own group, too, and
given a store and a name it makes another one like it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def group_of_store(store: dist.Store, name: str, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Make a group with everybody who makes it on the same store. Collective over them.

    It is gloo's: communicators of GPUs can't be relied on to give up when a member is gone, but sockets can.

    Args:
        store: A store that all members reach; nobody else uses its keys.
        name: The group's name, other than those of this process's groups.
        rank: This member's rank.
        size: The number of members.
        timeout: The longest that making it, and any of its collectives, may take.

    Raises:
        RuntimeError: If a member is missing, or can't be reached.
    """
    # No ranks: a group of some of the job's ranks would have to have their numbers.
    make: Any = distributed_c10d._new_process_group_helper
    group, _ = make(size, rank, [], "gloo", store, name, timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    # By this, collectives tell what rank this process has in the group.
    distributed_c10d._world.pg_group_ranks[group] = {dist.get_rank(): rank}
    return group
