"""Everything that can be measured, by name: torch's strategies, ours and peers."""

from __future__ import annotations

import torch
from models import Task
from peers import PEERS, peer
from strategies import INT_RESHARD, STRATEGIES
from torch_fsdp import TorchFSDP
from training import Training

FSDP2_ONLY = (f"fsdp2:{INT_RESHARD}",)


def is_known(name: str) -> bool:
    """Whether there is a contender of this name."""
    return name.removeprefix("fsdp2:") in STRATEGIES or name in FSDP2_ONLY or name in PEERS


def names() -> str:
    """All names, for help and errors."""
    return ", ".join([*STRATEGIES, *FSDP2_ONLY, *PEERS])


def training_under(task: Task, name: str) -> Training:
    """Build the model of ``task`` under the contender of this name. Collective.

    Raises:
        ModuleNotFoundError: For a peer that is not installed.
    """
    if task.compile:
        # What the contenders before have compiled would count toward the number of graphs that a function may have.
        torch._dynamo.reset()
    return peer(task, name) if name in PEERS else TorchFSDP(task, name)
