"""Adapter to torch's fully_shard: ``fully_shard(module, strategy=Strategy(...))``."""

from ..torch_version import check_torch_version

check_torch_version("fully_shard")

from .sharding import fully_shard  # noqa: E402  (after the check: an unknown torch may lack what it imports)

__all__ = ["fully_shard"]
