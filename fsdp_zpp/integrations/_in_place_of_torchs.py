"""Frameworks' own functions that shard, in which ``fully_shard`` is fsdp_zpp's with a strategy.

Such functions import torch's ``fully_shard`` by name. While they run, every module that has that name has ours in its
place, so that no model needs a copy of what the framework does with it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_zpp.adapters.fsdp2 import fully_shard
from fsdp_zpp.config.strategy import Strategy


def sharding_by(strategy: Strategy, *, reshards_always: bool = False) -> Any:
    """Return a function that takes the arguments of torch's ``fully_shard`` and shards by a strategy.

    To reshard after the forward is what torch and frameworks do by default. As such it is left to the strategy, whose
    parameter scope may keep the parameters.

    Args:
        strategy: The strategy.
        reshards_always: Whether ``reshard_after_forward=True`` is no default, but was asked for.
    """

    @functools.wraps(torch_fully_shard)  # which also has its state under its name
    def fully_shard_by_strategy(module: Any, *, reshard_after_forward: Any = None, **arguments: Any) -> Any:
        if reshard_after_forward is True and not reshards_always:
            reshard_after_forward = None
        return fully_shard(module, strategy=strategy, reshard_after_forward=reshard_after_forward, **arguments)

    return fully_shard_by_strategy


@contextmanager
def in_place_of_torchs(replacement: Any) -> Iterator[None]:
    """Return a context in which whoever has imported torch's ``fully_shard``, or does it there, has another one."""
    holders = [
        module
        for name, module in list(sys.modules.items())
        # What some packages put there is no module.
        if getattr(module, "__dict__", {}).get("fully_shard") is torch_fully_shard and not name.startswith("fsdp_zpp.")
    ]
    for module in holders:
        vars(module)["fully_shard"] = replacement
    try:
        yield
    finally:
        for module in holders:
            vars(module)["fully_shard"] = torch_fully_shard
