"""Private names of torch's autograd engine: which backward is running, and its end."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import Variable


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have ``callback`` called at the end of the backward that runs, after what asked for it earlier."""
    Variable._execution_engine.queue_callback(callback)


def running_backward() -> int | None:
    """Return the number of the backward that has called this, in a hook or at its end; None outside of backwards.

    It is unique in this process. A backward within another one has its own, larger one.
    """
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number
