"""Local steps (DiLoCo): nodes train by themselves for some steps, and then exchange what they have changed."""

from fsdp_zpp._torch_compat import check_folder

check_folder("local_steps")  # before what uses them is imported
