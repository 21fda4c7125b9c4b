"""All contenders by name: torch's strategies, those of fsdp_zpp, and peers."""

from __future__ import annotations

import torch
from expert_parallel import ExpertParallel
from float8 import Float8
from peers import PEERS, peer

from fsdp_zpp.bench.contenders import NAMES, TorchFSDP, Training, contender
from fsdp_zpp.bench.results import Task

EXPERTS = "fsdp2:ep2-"
FLOAT8 = "fsdp2:float8-"


def is_known(name: str) -> bool:
    """Return whether there is a contender of this name."""
    return _own_name(name) in NAMES or name in PEERS


def names() -> str:
    """Return all names, for help and errors."""
    others = f"{EXPERTS}... for experts spread over two ranks", f"and {FLOAT8}... for layers in float8"
    return ", ".join([*NAMES, *PEERS, *others])


def _own_name(name: str) -> str:
    """Return a contender's name without what stands before it."""
    return name.removeprefix(EXPERTS).removeprefix(FLOAT8).removeprefix("fsdp2:")


def training_under(task: Task, name: str) -> Training:
    """Build the model of ``task`` under the contender of this name, with ``fsdp2:`` before it under fully_shard.

    Collective.

    Raises:
        ModuleNotFoundError: For a peer that is not installed.
    """
    if name in PEERS:
        if task.compile:
            # Graphs of earlier contenders would count toward the number that a function may have.
            torch._dynamo.reset()
        return peer(task, name)
    make = ExpertParallel if name.startswith(EXPERTS) else Float8 if name.startswith(FLOAT8) else TorchFSDP
    return make(task, contender(_own_name(name), fsdp2=name.startswith("fsdp2:"), called=name))
