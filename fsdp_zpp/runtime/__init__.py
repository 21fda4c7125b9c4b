"""Runtime that both adapters share: the units of a model, the events they react to, checkpoints, the log line."""

from . import _needed  # noqa: F401  (it checks what the rest imports)
