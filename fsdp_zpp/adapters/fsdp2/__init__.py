"""Adapter to torch's fully_shard: ``fully_shard(module, strategy=Strategy(...))``."""

from fsdp_zpp.torch_internals import check_torch_version

check_torch_version("fully_shard")

from .sharding import fully_shard, install  # noqa: E402  (after the check: an unknown torch may lack what it imports)

install()

__all__ = ["fully_shard"]
