"""Runtime that both adapters share: the units of a model, the events they react to, checkpoints, the log line."""
