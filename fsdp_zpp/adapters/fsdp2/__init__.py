"""Adapter to torch's fully_shard: ``fully_shard(module, strategy=Strategy(...))``."""

from . import _needed  # noqa: F401  (first: it checks what the rest imports)
from .sharding import fully_shard, install

install()

__all__ = ["fully_shard"]
