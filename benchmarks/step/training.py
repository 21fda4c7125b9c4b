"""What is measured of every contender: a training, step by step."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class Training(ABC):
    """One way to train a task's model, ready for its first step once constructed."""

    @abstractmethod
    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """One optimizer step over tokens [micro-batches, sequences, length]; returns the last micro-batch's loss."""

    def sent(self) -> dict[str, int] | None:
        """Bytes that this rank has sent so far, by kind and hop; None where nobody counts."""
        return None

    def generate(self, prompt: torch.Tensor, tokens: int) -> torch.Tensor | None:
        """``prompt`` [1, length] continued greedily by so many tokens; None if this can't."""
        return None

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give up what is held outside of the object. It can't train any more."""
