"""A training with all that keeps something from step to step."""

from __future__ import annotations

import random
from typing import Any

import torch
from harness import lora, models
from harness.adapter import Adapter, Case
from harness.pool import device_type
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from fsdp_zpp import Int4, Int4Delta, Int8, LoCo, Strategy

STRATEGY = Strategy(
    "IGG",
    weights=Int4Delta(64),
    gradients=Int4(64),
    error_feedback=LoCo(reset_every=50),
    frozen=Int8(64),
    gpus_per_node=1,
)
"""With all that keeps something from step to step: a secondary shard, errors, a quantized base."""


class Training:
    """A net, one block of which is a frozen base with detours, on which two optimizers take turns, with a scaler."""

    def __init__(self, adapter: Adapter, strategy: Strategy, seed: int) -> None:
        self.adapter, self.strategy = adapter, strategy
        self.model = self.make()
        self.random = random.Random(seed)  # the same on all ranks
        self.scaler = ShardedGradScaler(device=device_type(), init_scale=2.0**10, growth_interval=5)
        self.renew_optimizers()
        self.steps = 0

    def make(self) -> Any:
        """The sharded net; with a row of each weight for each of four ranks, or FSDP1 can't load its checkpoints."""
        net = models.make_net(blocks=2, width=66, hidden=91)
        for name in ("up", "down"):
            detour = lora.LowRank(getattr(net.blocks[0], name).requires_grad_(False), rank=4)
            setattr(net.blocks[0], name, detour.to(models.device()))
        return self.adapter.shard(net, Case(), self.strategy)

    @property
    def block(self) -> nn.Module:
        """The one without a frozen base."""
        return self.model.blocks[1]

    def renew_optimizers(self) -> None:
        """Give the parameters to other optimizers."""
        in_block = set(self.block.parameters())
        parts = [
            [p for p in self.model.parameters() if p.requires_grad and (p in in_block) == here]
            for here in (False, True)
        ]
        self.optimizers = [torch.optim.AdamW(part, lr=1e-3, foreach=False) for part in parts]

    def step(self, overflows: bool = False, micro_batches: int = 1) -> None:
        """One step of all optimizers, which the scaler skips if a gradient overflows."""
        for micro_batch in range(micro_batches):
            last = micro_batch == micro_batches - 1
            with self.adapter.micro_batch(self.model, last, False):
                loss = models.loss_of(self.model, models.batch(self.steps, micro_batch))
                loss = loss * torch.inf if overflows and last else loss
                self.scaler.scale(loss).backward()
        for optimizer in self.optimizers:
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                self.scaler.step(optimizer)
        self.scaler.update()
        self.zero_grad()
        self.steps += 1

    def zero_grad(self) -> None:
        """Clear all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
