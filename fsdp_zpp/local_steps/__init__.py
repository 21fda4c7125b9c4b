"""Local steps (DiLoCo): nodes train by themselves for some steps, and then exchange the changes of their weights."""

from fsdp_zpp._torch_compat import check_folder

check_folder("local_steps")  # before the modules that use them are imported
