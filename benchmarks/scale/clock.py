"""Clock that tells a program's time and calls in some of its functions from those around them."""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any


class Clock:
    """Counts CPU time and calls of the functions that it wraps; a call from one to another counts once."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._inside = False

    def reset(self) -> None:
        """Start from zero."""
        self.seconds.clear()
        self.calls.clear()

    def wrap(self, owner: Any, name: str, kind: str) -> None:
        """Replace ``owner.name`` by itself, timed as a part of ``kind``."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return original(*args, **kwargs)
            self._inside = True
            self.calls[kind] += 1
            start = time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds[kind] += time.thread_time() - start
                self._inside = False

        setattr(owner, name, timed)

    def calls_outside(self, function: Callable[[], object]) -> int:
        """Count the functions, of Python and of C, that ``function`` calls outside of the wrapped functions."""
        count = 0

        def profile(frame: FrameType, event: str, arg: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call") and not self._inside

        sys.setprofile(profile)
        try:
            function()
        finally:
            sys.setprofile(None)
        return count
