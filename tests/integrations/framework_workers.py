"""Ranks in processes of their own, for frameworks that patch much where they are imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness.pool import Pool, too_few_gpus


def framework_workers(import_framework: Callable[[], None]) -> Iterator[Callable[..., list[Any]]]:
    """Yield ``workers(function, *args)`` on four ranks that have imported a framework, for a fixture."""
    if reason := too_few_gpus(4):
        pytest.skip(reason)
    pool = Pool(4)
    pool.run(import_framework)  # which takes so long that it is no part of a training's time
    yield pool.run
    pool.stop()
