"""What all strategies of a run train: a model, its data, and the ranks that share the work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Task:
    """Model and the data that all strategies of a run train on.

    Attributes:
        config: The model's configuration, one of transformers' for causal language models.
        nodes: Number of nodes.
        gpus_per_node: Ranks of each.
        lora: Rank of the adapters; 0 trains the whole model.
        micro_batch: Sequences a rank in a micro-batch.
        micro_batches: Micro-batches a step, all but the last without synchronization.
        sequence: Tokens a sequence.
        checkpointing: Whether the activations of each layer are recomputed.
        compile: Whether torch.compile compiles each layer.
        device: ``cuda``, or ``cpu`` to try things out.
    """

    config: Any
    nodes: int
    gpus_per_node: int
    lora: int = 0
    micro_batch: int = 1
    micro_batches: int = 1
    sequence: int = 1024
    checkpointing: bool = False
    compile: bool = False
    device: str = "cuda"

    @property
    def place(self) -> torch.device:
        """Return this rank's device."""
        return torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")

    def tokens(self, rank: int) -> torch.Tensor:
        """Return the tokens of ``rank``, [micro-batches, sequences, tokens], the same for every strategy."""
        shape = (self.micro_batches, self.micro_batch, self.sequence)
        vocabulary = self.config.get_text_config().vocab_size
        return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(rank)).to(self.place)
