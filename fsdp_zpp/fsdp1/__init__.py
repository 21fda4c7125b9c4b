"""Adapter to torch's FullyShardedDataParallel: ``FullyShardedDataParallel(..., sharding_strategy=Strategy(...))``."""

from fsdp_zpp._torch_compat import check_folder, check_torch_version

check_torch_version("FullyShardedDataParallel")
check_folder("fsdp1")  # before the modules that use them are imported

from . import wrapping

wrapping.install()
