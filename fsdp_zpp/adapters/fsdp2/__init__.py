"""Adapter to torch's fully_shard: ``fully_shard(module, strategy=Strategy(...))``."""

from . import _needed  # noqa: F401  (first: it checks what the rest imports)
from .gradient_norm import clip_grad_norm_
from .sharding import fully_shard, install

install()

__all__ = ["clip_grad_norm_", "fully_shard"]
