"""A model trained by transformers' Trainer."""

from __future__ import annotations

from typing import Any

import torch
from harness.pool import device_type
from torch import nn
from transformers import Trainer, TrainingArguments

STEPS = 4
TOKENS = torch.arange(1, 13).view(1, -1)


def rows(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return a data set of tokens that are few."""
    tokens = torch.randint(0, 40, (count, 16), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in tokens]


def make_trainer(folder: str, model: nn.Module, cls: type[Trainer] = Trainer, **options: Any) -> Trainer:
    """Return a trainer of two micro-batches a step, with an evaluation every other step."""
    arguments = TrainingArguments(
        **{
            "output_dir": folder,
            "use_cpu": device_type() == "cpu",
            "max_steps": STEPS,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 2e-3,
            "max_grad_norm": 0.5,
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
        }
        | options
    )
    return cls(model, arguments, train_dataset=rows(4 * STEPS * 4, 0), eval_dataset=rows(16, 1))


def logged(trainer: Trainer, what: str) -> list[float]:
    """Return what it has logged under this name."""
    return [entry[what] for entry in trainer.state.log_history if what in entry]
