"""A rank of a world as large as one likes, alone: torch's fake process group, whose collectives send nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from .pool import start_method


def in_fake_world(world: int, gpus_per_node: int, function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` on rank 0 of ``world``, in a process of its own: a process has one world only."""
    with ProcessPoolExecutor(1, start_method(), _join, initargs=(world, gpus_per_node)) as executor:
        return executor.submit(function, *args).result()


def groups_of_this_rank() -> int:
    """Process groups that this rank is in."""
    return len(dist.distributed_c10d._world.pg_names)


def _join(world: int, gpus_per_node: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_WORLD_SIZE": str(gpus_per_node), "GROUP_WORLD_SIZE": str(world // gpus_per_node)}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
