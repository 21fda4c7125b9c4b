"""Adapter to torch's fully_shard: ``fully_shard(module, strategy=Strategy(...))``."""

from .fully_shard import clip_grad_norm_, fully_shard, install

install()

__all__ = ["clip_grad_norm_", "fully_shard"]
