"""Trainings of a sharded net, the same for every way of sharding it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from fsdp_zpp import CodecState, Strategy

from . import models
from .adapter import Adapter, Case, original_name
from .pool import device_type


def train(
    adapter: Adapter,
    model: Any,
    case: Case,
    after_step: Callable[[int, Any], None] = lambda step, optimizer: None,
    optimizer: Any = None,
    first_step: int = 0,
) -> list[float]:
    """Train for ``case.steps`` steps; return the last micro-batch's loss of each."""
    optimizer = optimizer or models.make_optimizer(case.optimizer, model.parameters())
    scaler = make_scaler(growth_interval=2) if case.scaler else None
    losses = []
    for step in range(first_step, first_step + case.steps):
        for micro_batch in range(case.micro_batches):
            with adapter.micro_batch(model, micro_batch == case.micro_batches - 1, case.synced):
                loss = models.loss_of(model, models.batch(step, micro_batch)) / case.micro_batches
                (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.unscale_(optimizer)
        if case.clip is not None:
            adapter.clip(model, case.clip)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        after_step(step, optimizer)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained_weights(adapter: Adapter, case: Case, strategy: Strategy | None) -> dict[str, Tensor]:
    """In a worker: the weights after the last step."""
    model = adapter.make(case, strategy)
    train(adapter, model, case)
    return adapter.full_weights(model)


def without_gradient(model: Any) -> frozenset[str]:
    """In a worker: the names of parameters that have a gradient on no rank."""
    found: list[Any] = [None] * dist.get_world_size()
    here = {original_name(name) for name, parameter in model.named_parameters() if parameter.grad is None}
    dist.all_gather_object(found, here)
    return frozenset.intersection(*map(frozenset, found))


def differing_tensors(adapter: Adapter, model: Any) -> int:
    """In a worker: in how many tensors ranks hold different weights, each as its node does."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, adapter.full_weights(model))
    return sum(any(not torch.equal(each[name], found[0][name]) for each in found) for name in found[0])


def logits(model: Any) -> Tensor:
    """Logits of one batch that is the same on every rank."""
    model.eval()
    with torch.no_grad():
        out = model(models.batch(99, 0, rank=0)[:, :-1] % 61)
    model.train()
    return out.float().cpu()


def mean_loss(model: Any, step: int) -> float:
    """In evaluation, the mean over ranks."""
    model.eval()
    with torch.no_grad():
        loss = models.loss_of(model, models.batch(step, 0))
    model.train()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def make_scaler(enabled: bool = True, growth_interval: int = 1) -> ShardedGradScaler:
    """A scaler whose scale grows after so many steps, with every one unless said otherwise."""
    return ShardedGradScaler(device_type(), init_scale=2.0**10, growth_interval=growth_interval, enabled=enabled)


def scaled_steps(model: Any, optimizer: Any, scaler: Any, steps: Iterable[int]) -> None:
    """Train with a scaler; step -1 overflows."""
    for step in steps:
        loss = models.loss_of(model, models.batch(max(step, 0), 0))
        if step < 0 and dist.get_rank() == 0:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def save(model: Any, optimizer: Any, codecs: CodecState, path: str) -> None:
    """Save all that a training needs to go on."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state, "codecs": codecs}, checkpoint_id=path)


def load(model: Any, optimizer: Any, codecs: CodecState | None, path: str) -> None:
    """Go on from there."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state} | ({} if codecs is None else {"codecs": codecs})
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
