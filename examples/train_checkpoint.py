"""Sharded checkpoints through torch.distributed.checkpoint."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fsdp_zpp import CodecState


@dataclass
class History:
    """What a run has seen so far.

    Attributes:
        losses: Training loss of every step.
        validation: Pairs of steps done and validation loss.
    """

    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return len(self.losses)


@dataclass
class TrainingState(Stateful):
    """All that a run needs to go on exactly where it stopped."""

    model: nn.Module
    optimizer: Optimizer
    schedule: LambdaLR
    history: History
    codecs: CodecState | None = None

    def state_dict(self) -> dict[str, Any]:
        """Sharded state of model and optimizer, and the rest as JSON."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        rest = {"schedule": self.schedule.state_dict(), "history": asdict(self.history)}
        state = {"model": model, "optimizer": optimizer, "rest": json.dumps(rest)}
        return state if self.codecs is None else state | {"codecs": self.codecs.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set everything to ``state_dict``."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        if self.codecs is not None:
            self.codecs.load_state_dict(state_dict["codecs"])
        rest = json.loads(state_dict["rest"])
        self.schedule.load_state_dict(rest["schedule"])
        self.history.losses = rest["history"]["losses"]
        self.history.validation = [(step, loss) for step, loss in rest["history"]["validation"]]


def save(state: TrainingState, path: Path) -> None:
    """Write ``state`` to ``path``; if that fails, the last one is still there, or in ``path``.old. Collective."""
    partial, old = path.with_name(path.name + ".partial"), path.with_name(path.name + ".old")
    dcp.save({"training": state}, checkpoint_id=partial)
    if dist.get_rank() == 0:
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        partial.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    dist.barrier()


def load(state: TrainingState, path: Path) -> None:
    """Read the checkpoint at ``path`` into ``state``. Collective."""
    dcp.load({"training": state}, checkpoint_id=path)
