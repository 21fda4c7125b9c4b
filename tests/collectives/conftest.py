"""Ranks of several nodes in this process, for laws that need no processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness.benchmarks import load


@pytest.fixture(scope="session")
def on_ranks() -> Callable[..., list[Any]]:
    """Return ``on_ranks(nodes, gpus_per_node, function, *args)``: what the function returns, by rank."""
    run: Callable[..., list[Any]] = load("common", "loopback").on_ranks
    return run
