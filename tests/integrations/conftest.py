"""Worker processes that torchtitan's tests share.

Other tests have others: torchtitan changes the garbage collector and timeouts of a process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torchtitan_on_cpu
from harness.pool import Pool, too_few_gpus


@pytest.fixture(scope="session")
def torchtitan() -> Iterator[Callable[..., list[Any]]]:
    """Return ``torchtitan(name, *args)``: a function of torchtitan_training on four ranks; results by rank."""
    if reason := too_few_gpus(4):
        pytest.skip(reason)
    pool = Pool(4)
    yield lambda name, *args: pool.run(torchtitan_on_cpu.call, name, *args)
    pool.stop()


@pytest.fixture(scope="session")
def stock(torchtitan: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return ``stock(config, *options)``: the results of torchtitan's own FSDP on the last rank, kept for others."""

    @cache
    def train(config: str, *options: str) -> Any:
        return torchtitan("train", f"own_{config}", tmp_path_factory.mktemp("own"), *options)[-1]

    return train
