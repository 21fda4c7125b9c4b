"""Flags of small trainings with torchtitan, for its tests."""

from __future__ import annotations

import json
from typing import Any

TWO_STEPS = ["--training.steps", "2"]
TP = ["--parallelism.tensor_parallel_degree", "2"]
PP = ["--parallelism.pipeline_parallel_degree", "2"]
INTERLEAVED = [*PP, "--parallelism.pipeline_parallel_schedule", "Interleaved1F1B"]
EP = ["--parallelism.expert_parallel_degree", "2"]
HSDP = ["--parallelism.data_parallel_replicate_degree", "2"]
FULL_DTENSOR = ["--parallelism.spmd_backend", "full_dtensor"]


def flag(strategy: str | None = None, **arguments: Any) -> list[str]:
    """Return the flag of a strategy, on nodes of two unless it says otherwise."""
    preset = {} if strategy is None else {"preset": strategy}
    return ["--parallelism.strategy", json.dumps(preset | {"gpus_per_node": 2} | arguments)]
