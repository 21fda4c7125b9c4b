"""Adapter to torch's fully_shard: ``fully_shard(module, strategy=Strategy(...))``."""

from fsdp_zpp._torch_compat import check_folder, check_torch_version

check_torch_version("fully_shard")
check_folder("fsdp2")  # before the modules that use them are imported

from .fully_shard import clip_grad_norm_, fully_shard, install

install()

__all__ = ["clip_grad_norm_", "fully_shard"]
