"""Adapter to torch's FullyShardedDataParallel: ``FullyShardedDataParallel(..., sharding_strategy=Strategy(...))``."""

from fsdp_zpp.torch_internals import check_torch_version

check_torch_version("FullyShardedDataParallel")

from . import wrapping  # noqa: E402  (after the check: an unknown torch may lack what it imports)

wrapping.install()
