"""Nets under fully_shard, torch's own or with a strategy, and a training loop for both."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from harness import models
from harness.models import Net
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from fsdp_zpp import Strategy
from fsdp_zpp.fsdp2 import fully_shard

STOCK = None
"""Stands for torch's own fully_shard where a strategy could be."""


@dataclass(frozen=True)
class Case:
    """How to shard and train a net; ``shard`` are torch's arguments."""

    model: tuple[tuple[str, Any], ...] = ()
    frozen: bool = False
    shard: tuple[tuple[str, Any], ...] = ()
    wrap_blocks: bool = True
    pairs: bool = False
    checkpointing: str = "none"
    tune: Callable[[Any], None] | None = None
    optimizer: str = "sgd"
    steps: int = 4
    micro_batches: int = 1
    sync_all: bool = False
    keep_unsharded: bool = False
    clip: float | None = 0.5


def shard(net: Net, strategy: Strategy | None, case: Case = Case()) -> Any:
    """Shard ``net`` bottom-up, in place."""
    one = torch_fully_shard if strategy is STOCK else functools.partial(fully_shard, strategy=strategy)
    arguments = dict(case.shard)
    if case.pairs:
        one([net.blocks[0], net.blocks[1]], **arguments)
        one(net.blocks[2], **arguments)
    elif case.wrap_blocks:
        for block in [*net.blocks, *([net.unused] if net.unused is not None else [])]:
            one(block, **arguments)
    one(net, **arguments)
    return net


def make(case: Case, strategy: Strategy | None) -> Any:
    """A sharded net."""
    net = models.make_net(frozen=case.frozen, **dict(case.model))
    policy = dict(case.shard).get("mp_policy")
    if policy is not None and policy.param_dtype is not None:  # fully_shard leaves the dtype of buffers to the user
        for module in net.modules():
            if isinstance(module, models.Block):
                module.shift = module.shift.to(policy.param_dtype)
    if case.checkpointing.startswith("inside"):
        models.checkpoint(net, case)  # type: ignore[arg-type]
    shard(net, strategy, case)
    if case.tune is not None:
        case.tune(net)
    return net


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer by name."""
    if name == "adamw-fused":
        return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, fused=True)
    return models.make_optimizer(name, model.parameters())


def train(
    model: Any,
    case: Case,
    after_step: Callable[[int], None] = lambda step: None,
    optimizer: Any = None,
    first_step: int = 0,
) -> list[float]:
    """Train for ``case.steps`` steps; return the last micro-batch's loss of each."""
    optimizer = optimizer or make_optimizer(case.optimizer, model)
    losses = []
    for step in range(first_step, first_step + case.steps):
        for micro_batch in range(case.micro_batches):
            last = micro_batch == case.micro_batches - 1
            model.set_requires_gradient_sync(last or case.sync_all)
            model.set_is_last_backward(last)
            model.set_reshard_after_backward(last or not case.keep_unsharded)
            loss = models.loss_of(model, models.batch(step, micro_batch)) / case.micro_batches
            loss.backward()
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        after_step(step)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """Full-precision weights on the CPU, by name."""
    return {
        name.replace("_checkpoint_wrapped_module.", ""): value.full_tensor().float().cpu().clone()
        for name, value in model.state_dict().items()
        if isinstance(value, DTensor)
    }


def weights_after_each_step(case: Case, strategy: Strategy | None) -> list[dict[str, Tensor]]:
    """In a worker: the weights after every step."""
    model = make(case, strategy)
    weights: list[dict[str, Tensor]] = []
    train(model, case, after_step=lambda step: weights.append(full_weights(model)))
    return weights


_stock_weights: dict[str, list[dict[str, Tensor]]] = {}


def stock_weights(case: Case) -> list[dict[str, Tensor]]:
    """In a worker: what torch's own fully_shard makes of a case, computed once."""
    if repr(case) not in _stock_weights:
        _stock_weights[repr(case)] = weights_after_each_step(case, STOCK)
    return _stock_weights[repr(case)]


def largest_distance(case: Case, strategy: Strategy) -> float:
    """In a worker: the largest distance from torch's own fully_shard after any step."""
    ours, theirs = weights_after_each_step(case, strategy), stock_weights(case)
    assert len(ours) == case.steps
    return max(map(models.distance, ours, theirs))


def logits(model: Any) -> Tensor:
    """Logits of one batch that is the same on every rank."""
    with torch.no_grad():
        return model(models.batch(99, 0, rank=0)[:, :-1] % 61).float().cpu()
