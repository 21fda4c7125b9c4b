"""Adapter to torch's FullyShardedDataParallel: ``FullyShardedDataParallel(..., sharding_strategy=Strategy(...))``."""

from . import wrapping

wrapping.install()
