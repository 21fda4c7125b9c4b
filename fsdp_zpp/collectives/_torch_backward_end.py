"""Private names of torch's autograd engine: the end of a backward."""

from __future__ import annotations

from collections.abc import Callable

from torch.autograd import Variable


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have ``callback`` called at the end of the backward that runs, after what asked for it earlier."""
    Variable._execution_engine.queue_callback(callback)
