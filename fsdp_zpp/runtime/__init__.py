"""Runtime that both adapters share: the units of a model, the events they react to, checkpoints, the log line."""

from fsdp_zpp._torch_compat import check_folder

check_folder("runtime")  # before the modules that use them are imported
