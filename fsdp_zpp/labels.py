"""Names in profiles: what a stretch of time is spent on, and for which unit."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler
from torch.profiler import record_function

_NOTHING = nullcontext()


def profiled() -> bool:
    """Whether a profiler is there to see names; where torch does not tell, it may be."""
    return bool(getattr(profiler, "_is_profiler_enabled", True))  # private to torch


def labelled(phase: str, unit: str) -> AbstractContextManager[Any]:
    """Name what is done in it ``fsdp_zpp::<phase> (<unit>)``, if a profiler is there to see it.

    Without one, ``record_function`` still takes microseconds, and a unit would enter a dozen of them a step.
    """
    if profiled():
        return record_function(f"fsdp_zpp::{phase} ({unit})")
    return _NOTHING
