"""What tests of nodes that train on their own have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_zpp import LocalSteps, Strategy

LAYOUTS = [("III", 1), ("III", 2), ("INI", 2), ("NNI", 2), ("NNN", 2), ("NNN", 1)]
"""Letters, and how many GPUs a node has."""


def strategy_of(levels: str, gpus_per_node: int, **local_steps: Any) -> Strategy:
    """A strategy with local steps."""
    return Strategy(levels, local_steps=LocalSteps(**local_steps), gpus_per_node=gpus_per_node)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Without momentum, which nodes would keep apart."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


@contextmanager
def this_node(gpus_per_node: int) -> Iterator[dist.ProcessGroup]:
    """The ranks of this rank's node as a group."""
    group, made = dist.new_subgroups(gpus_per_node)
    yield group
    for each in made:
        if each is group:
            dist.destroy_process_group(each)
