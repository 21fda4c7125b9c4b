"""Ranks, shared by all tests of a session: pools of processes, and threads of this one; and which tests run."""

from __future__ import annotations

import argparse
import os
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton's interpreter runs the kernels where there is no GPU. It must be chosen before Triton is imported, whose own
# functions are defined then, and so before fsdp_zpp is.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from harness.benchmarks import load
from harness.pool import Pool, too_few_gpus

settings.register_profile("few", deadline=None, max_examples=30)
settings.load_profile("few")


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


@pytest.fixture(scope="session")
def on_ranks() -> Callable[..., list[Any]]:
    """Return ``on_ranks(nodes, gpus_per_node, function, *args)``: what the function returns, by rank.

    The ranks of several nodes are in this process, for laws that need no others.
    """
    run: Callable[..., list[Any]] = load("common", "loopback").on_ranks
    return run


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options by which more or fewer tests run."""
    parser.addoption("--wide", action="store_true", help="run the grids, too: five minutes more")
    parser.addoption("--wide-part", metavar="K/N", type=_part, help="run one part in N of the grids, with K from 0")
    parser.addoption("--shard", metavar="K/N", type=_part, help="run one part in N of the tests alone, with K from 0")


def _part(written: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", written)
    if not found or int(found[1]) >= int(found[2]):
        raise argparse.ArgumentTypeError(f"must be K/N with K below N, such as 0/6, got {written!r}")
    return int(found[1]), int(found[2])


def _is_in(part: tuple[int, int] | None, name: str) -> bool:
    return part is None or zlib.crc32(name.encode()) % part[1] == part[0]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of other shards, and wide ones unless they are asked for."""
    shard, part = config.getoption("--shard"), config.getoption("--wide-part")
    asked = config.getoption("--wide") or part is not None
    chosen, others = [], []
    for item in items:
        is_wide = item.get_closest_marker("wide") is not None
        runs = (asked and _is_in(part, item.nodeid)) if is_wide else True
        # All rows of a function stay together, since they may share trainings.
        runs = runs and _is_in(shard, item.nodeid.partition("[")[0])
        (chosen if runs else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = chosen
