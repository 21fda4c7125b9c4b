"""All contenders by name: torch's strategies, those of fsdp_zpp, and peers."""

from __future__ import annotations

import torch
from expert_parallel import ExpertParallel
from models import Task
from peers import PEERS, peer
from strategies import STRATEGIES
from torch_fsdp import TorchFSDP
from training import Training


def is_known(name: str) -> bool:
    """Return whether there is a contender of this name."""
    return name.removeprefix("fsdp2:").removeprefix("ep2-") in STRATEGIES or name in PEERS


def names() -> str:
    """Return all names, for help and errors."""
    return ", ".join([*STRATEGIES, *PEERS, "and ep2-... for experts spread over two ranks, under fsdp2:"])


def training_under(task: Task, name: str) -> Training:
    """Build the model of ``task`` under the contender of this name. Collective.

    Raises:
        ModuleNotFoundError: For a peer that is not installed.
    """
    if task.compile:
        # Graphs of earlier contenders would count toward the number that a function may have.
        torch._dynamo.reset()
    if name in PEERS:
        return peer(task, name)
    return ExpertParallel(task, name) if name.startswith("fsdp2:ep2-") else TorchFSDP(task, name)
