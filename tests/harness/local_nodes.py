"""Helpers of tests whose nodes train on their own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from harness.adapter import Adapter, Case, original_name
from harness.training import train
from torch import nn

from fsdp_zpp import LocalSteps, Strategy

LAYOUTS = [("III", 1), ("III", 2), ("INI", 2), ("NNI", 1), ("NNI", 2)]
"""Letters, and how many GPUs a node has."""
A, B, HEAD = "blocks.0.up.weight", "blocks.0.down.weight", "head.weight"
"""Parameters of the net of ``ONE_BLOCK``, the first two in one unit."""
ONE_BLOCK = Case(model=(("blocks", 1),), clip=None)
TRAINED: dict[str, list[Collection[str]]] = {
    "a, then b": [(A, HEAD)] * 3 + [(B, HEAD)] * 6,
    "a, then nothing of the block": [(A, HEAD)] * 3 + [(HEAD,)] * 6,
    "a, then both": [(A, HEAD)] * 3 + [(A, B, HEAD)] * 6,
    "both, then b": [(A, B, HEAD)] * 4 + [(B, HEAD)] * 5,
    "a and again": [(A, HEAD)] * 2 + [(HEAD,)] * 3 + [(A, HEAD)] * 4,
    "turns": [(A, HEAD), (B, HEAD)] * 5,
    "a block that thaws": [(HEAD,)] * 3 + [(A, B, HEAD)] * 6,
    "a on one node": [(A, B, HEAD)] * 9,
}
"""The parameters that are trained in each step."""
ON_OTHER_NODES: dict[str, list[Collection[str]]] = {"a on one node": [(A, B, HEAD)] + [(B, HEAD)] * 8}


def strategy_of(levels: str, gpus_per_node: int, **local_steps: Any) -> Strategy:
    """A strategy with local steps."""
    return Strategy(levels, local_steps=LocalSteps(**local_steps), gpus_per_node=gpus_per_node)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Without momentum, which nodes would keep apart."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train_parts(
    adapter: Adapter, model: Any, optimizer: Any, trained: Sequence[Collection[str]], first_step: int = 0
) -> None:
    """Make a step for each collection of names, in which these parameters alone are trained."""
    for step, names in enumerate(trained, first_step):
        set_trained(model, names)
        train(adapter, model, replace(ONE_BLOCK, steps=1), optimizer=optimizer, first_step=step)


def set_trained(model: nn.Module, names: Collection[str]) -> None:
    """Freeze all other parameters."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(original_name(name) in names)


@contextmanager
def this_node(gpus_per_node: int) -> Iterator[dist.ProcessGroup]:
    """The ranks of this rank's node as a group."""
    group, made = dist.new_subgroups(gpus_per_node)
    yield group
    for each in made:
        if each is group:
            dist.destroy_process_group(each)
