"""Strategies in torchtitan: its trainer, metrics and checkpointer, with one more key.

torchrun --nproc-per-node 8 -m torchtitan.train --module fsdp_zpp.integrations.torchtitan --config llama3_8b \
    --parallelism.strategy zeropp

``--parallelism.strategy`` is the name of a preset, or the mapping of ``Strategy.from_dict`` as JSON, such as
``'{"preset": "zeropp", "weights": "int4delta"}'``; ``None`` is torchtitan's own FSDP or HSDP. The configurations of
``--config`` are those of ``config_registry.py``; :func:`with_strategy` makes one of any configuration for Llama 3.
"""

from __future__ import annotations

from fsdp_zpp.integrations._requirement import require

require("torchtitan", "0.3")

from .config_registry import with_strategy
from .parallelism import StrategyParallelism
from .sharding import parallelize_llama
from .trainer import StrategyTrainer

__all__ = ["StrategyParallelism", "StrategyTrainer", "parallelize_llama", "with_strategy"]
