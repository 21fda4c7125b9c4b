"""Node size as launched: what torchrun, or Slurm's srun where it starts the ranks itself, says in the environment.

srun sets ``SLURM_STEP_TASKS_PER_NODE`` for every task. ``SLURM_NTASKS_PER_NODE`` is not used: it is there only if its
option was given, and may be that of the job and not of this step.
"""

from __future__ import annotations

import os
import re

import torch.distributed as dist

_COUNTS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
"""A part of srun's list: ``8(x2)`` are two nodes of 8 tasks."""


def tells_node_size() -> bool:
    """Return whether the launcher says how many ranks share a node. Needs the default process group."""
    return "LOCAL_WORLD_SIZE" in os.environ or bool(_tasks_on_each_node())


def launched_on_each_node() -> int:
    """Return how many ranks the launcher has started on this node and on each other. Needs the default process group.

    Raises:
        ValueError: If it does not say, if what it says is not a number, or if nodes are of different sizes; on some
            ranks alone if ranks differ in that, or if srun has not put consecutive ranks on a node.
    """
    if "LOCAL_WORLD_SIZE" in os.environ:
        return _by_torchrun()
    tasks = _tasks_on_each_node()
    if not tasks:
        raise ValueError(
            "gpus_per_node was not given and LOCAL_WORLD_SIZE is not set (torchrun sets it); "
            "pass gpus_per_node, the number of ranks that share a node"
        )
    if len(set(tasks)) > 1:
        raise _unequal(len(tasks), tasks[int(os.environ["SLURM_NODEID"])])
    if _place_by_srun(tasks[0]) != dist.get_rank():
        raise ValueError(
            f"srun has not put consecutive ranks on a node: {_place_on_nodes()} has rank {dist.get_rank()}; start it "
            "with srun --distribution=block and RANK=$SLURM_PROCID"
        )
    return tasks[0]


def described() -> str:
    """Describe what the launcher says where it gives no layout of a group, for a comparison between ranks."""
    tasks = _tasks_on_each_node()
    if "LOCAL_WORLD_SIZE" in os.environ or not tasks:
        return f"LOCAL_WORLD_SIZE={os.environ.get('LOCAL_WORLD_SIZE')}"
    out_of_order = len(set(tasks)) == 1 and _place_by_srun(tasks[0]) != dist.get_rank()
    return f"{_place_on_nodes()} (srun has put other ranks between)" if out_of_order else f"srun's {tasks}"


def _by_torchrun() -> int:
    local_world, nodes = _positive("LOCAL_WORLD_SIZE"), _positive("GROUP_WORLD_SIZE")
    if nodes and nodes * local_world != dist.get_world_size():
        # A rank knows its own node's size alone, but where sizes differ hardly any node has the average's.
        raise _unequal(nodes, local_world)
    return local_world


def _unequal(nodes: int, on_this_one: int) -> ValueError:
    return ValueError(
        f"the nodes are of different sizes: {dist.get_world_size()} ranks on {nodes} nodes, {on_this_one} of them on "
        "this one; start the same number on each node, or pass gpus_per_node"
    )


def _positive(name: str) -> int:
    """Return the positive number in a variable that torchrun sets; 0 if it is not set.

    Raises:
        ValueError: If it is anything else.
    """
    value = os.environ.get(name)
    if value is None:
        return 0
    if not value.isdecimal() or int(value) == 0:
        raise ValueError(
            f"{name}={value!r} in the environment is not a positive number, as torchrun sets it; set it as torchrun "
            "does, or pass gpus_per_node, the number of ranks that share a node"
        )
    return int(value)


def _tasks_on_each_node() -> list[int]:
    """Return the numbers of srun's tasks on its nodes; empty if tasks are not ranks, as under mpirun in a Slurm job."""
    parts = [_COUNTS.fullmatch(part) for part in os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(",")]
    if None in parts or not {"SLURM_NODEID", "SLURM_LOCALID"} <= os.environ.keys():
        return []
    tasks = [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]
    return tasks if sum(tasks) == dist.get_world_size() else []


def _place_by_srun(tasks_a_node: int) -> int:
    """Return the rank that this task has if nodes have consecutive ones."""
    return int(os.environ["SLURM_NODEID"]) * tasks_a_node + int(os.environ["SLURM_LOCALID"])


def _place_on_nodes() -> str:
    return f"SLURM_NODEID={os.environ['SLURM_NODEID']}, SLURM_LOCALID={os.environ['SLURM_LOCALID']}"
