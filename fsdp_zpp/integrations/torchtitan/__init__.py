"""Strategies in torchtitan: its trainer, metrics and checkpointer, with one more key.

torchrun --nproc-per-node 8 -m torchtitan.train --module fsdp_zpp.integrations.torchtitan --config llama3_8b \
    --parallelism.strategy zeropp

``--parallelism.strategy`` is the name of a preset, or the mapping of ``Strategy.from_dict`` as JSON, such as
``'{"preset": "zeropp", "weights": "int4delta"}'``; ``None`` is torchtitan's own FSDP or HSDP. ``--config`` takes the
name of any configuration of torchtitan's models; :func:`with_strategy` makes one of a configuration of your own.
"""

from __future__ import annotations

from fsdp_zpp.integrations._common import require

require("torchtitan", "0.3")

from .config_registry import StrategyParallelism, StrategyTrainer, with_strategy

__all__ = ["StrategyParallelism", "StrategyTrainer", "with_strategy"]
