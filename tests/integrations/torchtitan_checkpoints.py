"""Checkpoints of torchtitan, as one more of those in checkpoint_ways.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torchtitan_on_cpu
from checkpoint_ways import InFolder

from fsdp_zpp import Strategy


class ByTorchtitan(InFolder):
    """Checkpoints of torchtitan, of which trainings that go on from the first save the second."""

    def save(self, strategy: Strategy, folder: Path, steps: int) -> None:
        again = ["--checkpoint.load_step", "2"] * (folder / "checkpoint").exists()
        self._train(strategy, folder, 4, "--training.max_norm", str(0.01 * steps), *again)

    def go_on(self, strategy: Strategy, folder: Path) -> list[float]:
        """Go on from the last checkpoint that torchtitan takes for whole."""
        return self._train(strategy, folder, 6, "--checkpoint.load_only")

    def checkpoint(self, folder: Path) -> Path:
        return folder / "checkpoint" / "step-4"

    def _train(self, strategy: Strategy, folder: Path, steps: int, *options: str) -> list[float]:
        every: list[Any] = ["--parallelism.strategy", json.dumps(strategy.to_dict()), "--training.steps", str(steps)]
        every += "--checkpoint.enable --checkpoint.interval 2 --checkpoint.no-last_save_model_only".split()
        losses: list[float] = torchtitan_on_cpu.call("train", "strategy", folder, *every, *options).losses
        return losses
