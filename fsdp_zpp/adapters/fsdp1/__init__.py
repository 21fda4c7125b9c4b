"""Adapter to torch's FullyShardedDataParallel: ``FullyShardedDataParallel(..., sharding_strategy=Strategy(...))``."""

from . import _needed, wrapping  # noqa: F401  (in this order: what the rest imports is checked first)

wrapping.install()
