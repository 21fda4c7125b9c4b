"""Two-hop collectives, what they keep from step to step, and what ranks must agree on; without modules or FSDP."""

from fsdp_zpp._torch_compat import check_folder

check_folder("comm")  # before what uses them is imported
