"""A Llama trained as accelerate's documentation has it, in a job of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import FullyShardedDataParallelPlugin
from harness import llama
from harness.pool import device_type
from hugging_face import choose_own_fsdp, new_job
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fsdp_zpp import Int4, Int4Delta, LocalSteps, LoCo, Strategy
from fsdp_zpp.integrations.accelerate import use_strategy

STEPS, MICRO_BATCHES = 4, 2
TOKENS = torch.arange(1, 13).view(1, -1)
PLAIN = Strategy("GGG", gpus_per_node=2)
ZEROPP = Strategy.zeropp(gpus_per_node=2)
STATEFUL = Strategy("IIG", weights=Int4Delta(64), gradients=Int4(64), error_feedback=LoCo(), gpus_per_node=2)
LOCAL = Strategy("III", local_steps=LocalSteps(3, codec=Int4(64)), gpus_per_node=2)
"""Strategy with all that codecs keep from step to step."""


@dataclass
class Training:
    """A prepared training: model, optimizer, scheduler and data."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    loader: Any
    scheduler: Any

    def train(self, first: int = 0, last: int = STEPS) -> list[float]:
        """Return the losses of all micro-batches of some steps, over all ranks."""
        batches = iter(skip_first_batches(self.loader, first * MICRO_BATCHES))
        return [self.micro_batch(*next(batches)) for _ in range((last - first) * MICRO_BATCHES)]

    def micro_batch(self, tokens: Tensor) -> float:
        """Train a micro-batch of some sequences."""
        return self.train_on(input_ids=tokens, labels=tokens)

    def train_on(self, **batch: Tensor) -> float:
        """Train a micro-batch as accelerate's documentation does."""
        with self.accelerator.accumulate(self.model):
            loss = self.model(**batch).loss
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return float(self.accelerator.reduce(loss.detach(), "mean"))


@contextmanager
def accelerators(**options: Any) -> Iterator[Accelerator]:
    """Return a context with an accelerator; accelerate keeps no state beyond it."""
    with new_job():
        accelerator = Accelerator(cpu=device_type() == "cpu", gradient_accumulation_steps=MICRO_BATCHES, **options)
        torch.backends.cuda.matmul.allow_tf32 = False  # accelerate allows it when it compiles: losses would differ
        yield accelerator


def plugin(**options: Any) -> FullyShardedDataParallelPlugin:
    """Return accelerate's own description of FSDP2."""
    return FullyShardedDataParallelPlugin(
        **{"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", "state_dict_type": "SHARDED_STATE_DICT"}
        | options
    )


def prepared(accelerator: Accelerator, model: nn.Module | None = None) -> Training:
    """Return a Llama and all that trains it."""
    model = llama.make_base() if model is None else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, STEPS)
    rows = STEPS * MICRO_BATCHES * dist.get_world_size() * 2
    tokens = torch.randint(0, 40, (rows, 16), generator=torch.Generator().manual_seed(3))
    loader = DataLoader(TensorDataset(tokens), batch_size=2)
    return Training(accelerator, *accelerator.prepare(model, optimizer, loader, scheduler))


def for_fsdp(accelerator: Accelerator, strategy: Strategy | None, own: FullyShardedDataParallelPlugin) -> Accelerator:
    """Return an accelerator that shards by a strategy, or by accelerate's own FSDP."""
    if strategy is not None:
        return use_strategy(accelerator, strategy, plugin=own)
    choose_own_fsdp(accelerator, own)
    return accelerator
