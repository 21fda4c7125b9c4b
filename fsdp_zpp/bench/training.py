"""One interface to every contender: a training, step by step."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class Training(ABC):
    """One way to train a task's model, ready for its first step once constructed."""

    @abstractmethod
    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Make an optimizer step over tokens [micro-batches, sequences, length]; return the last micro-batch's loss."""

    def sent(self) -> dict[str, int] | None:
        """Return the bytes that this rank has sent so far, by kind and hop; None where nobody counts."""
        return None

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release the state that is held outside of the object, which cannot train any more."""
