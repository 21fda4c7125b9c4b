"""Parameters that are offloaded, by torch's CPUOffload or by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import models
from harness.adapter import STOCK, Case
from harness.fsdp1 import Fsdp1
from harness.pool import Pool, device_type
from harness.training import logits, train, trained_weights
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel as FSDP

from fsdp_zpp import Strategy

TWO: Any = {"gpus_per_node": 2}


def offload() -> None:
    """In a worker: parameters offloaded to the CPU train as with stock, or are refused at construction."""
    adapter, case = Fsdp1(arguments=(("cpu_offload", CPUOffload(offload_params=True)),)), Case(clip=None)
    if device_type() == "cpu":
        with pytest.raises(ValueError, match="needs an accelerator"):
            adapter.make(case, Strategy(**TWO))
        return
    weights = [trained_weights(adapter, case, strategy) for strategy in (Strategy("IGG", **TWO), STOCK)]
    assert models.distance(*weights) <= 1e-6
    train(adapter, adapter.make(case, Strategy.zeropp(**TWO)), case)


def test_cpu_offload_trains_as_stock_and_needs_an_accelerator(pool: Callable[[int], Pool]) -> None:
    pool(4).run(offload)


def offloaded_by_hand() -> tuple[bool, bool]:
    """In a worker: flat parameters moved by their handles, as some trainers for reinforcement learning do it.

    Returns:
        Whether the weights are used that were there after that, once as they were, once changed meanwhile.
    """
    model = Fsdp1().make(Case(), Strategy("IGG", **TWO))
    found = [logits(model)]
    for factor in (1.0, 1.5):
        for module in FSDP.fsdp_modules(model):
            flat: Any = module._handle.flat_param  # torch's own, which those trainers reach for
            module._handle.flat_param_to(dtype=torch.float64)  # stands for the CPU
            flat.data.mul_(factor)
            module._handle.flat_param_to(dtype=torch.float32)
            flat._local_shard = flat.data
        found.append(logits(model))
    return torch.equal(found[0], found[1]), not torch.equal(found[1], found[2])


def test_weights_moved_by_their_handles_are_the_ones_that_are_used(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(offloaded_by_hand) == [(True, True)] * 4
