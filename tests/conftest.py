"""Pools of worker processes, shared by all tests of a session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton's interpreter runs the kernels where there is no GPU. It must be chosen before Triton is imported, whose own
# functions are defined then, and so before fsdp_zpp is.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from harness.pool import Pool, too_few_gpus


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Pool]]:
    """Return ``pool(world)``: that many workers in one process group; skips if there are too few GPUs for them."""
    pools: dict[int, Pool] = {}

    def get(world: int) -> Pool:
        if reason := too_few_gpus(world):
            pytest.skip(reason)
        return pools.setdefault(world, Pool(world))

    yield get
    for each in pools.values():
        each.stop()
