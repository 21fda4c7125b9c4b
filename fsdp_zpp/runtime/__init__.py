"""Code that FSDP1 and FSDP2 share: the units of a model, the events they react to, checkpoints, the log line."""
