"""Random programs train the same weights under stock FSDP and under ours.

By default a few programs, always the same ones. ``./run test -m fuzz`` runs many others:

    FSDP_ZPP_FUZZ=3000           how many (3000)
    FSDP_ZPP_FUZZ_SEED=7         which; by default others each time, whose seed a failure prints
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fuzz import compare
from fuzz.draft import HAS_RESET, HAS_UNUSED_FLAG
from fuzz.found import FOUND
from fuzz.program import Program, as_script
from fuzz.strategies import programs, strategies_with_codecs, strategies_without_codecs
from harness.impatient_pool import ImpatientPool
from harness.pool import WorkerError, device_type
from hypothesis import HealthCheck, Phase, given, reject, seed, settings

pytestmark = pytest.mark.skipif(device_type() != "cpu", reason="programs run on the CPU, where rounding is the same")

QUIET = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
KINDS = [
    (adapter, codecs, share)
    for adapter, whole in (("fsdp1", 5), ("fsdp1 flat", 2), ("fsdp2", 5))
    for codecs, share in ((False, whole * 3), (True, whole))
]
"""An adapter, whether there are codecs, and the share of all programs."""
SHARES = sum(share for _, _, share in KINDS)
over_kinds = pytest.mark.parametrize(
    ("adapter", "codecs", "share"), KINDS, ids=[f"{adapter}{' codecs' * codecs}" for adapter, codecs, _ in KINDS]
)


@pytest.fixture(scope="module")
def workers() -> Iterator[ImpatientPool]:
    """A pool for programs."""
    pool = ImpatientPool(4)
    yield pool
    pool.stop(kill=True)


def check(workers: ImpatientPool, program: Program) -> None:
    """Fail unless ours does what stock does."""
    try:
        if any(workers.run(compare.run_stock, program)):
            reject()  # torch refuses it
    except WorkerError:
        reject()
    try:
        differences = workers.run(compare.run_ours, program)
    except WorkerError as error:
        differences = [f"{error}"]
    for rank, difference in enumerate(differences):
        assert difference is None, f"rank {rank}: {difference}\n\n{as_script(program)}"


def property_of(workers: ImpatientPool, adapter: str, codecs: bool) -> Callable[[], Any]:
    """The property, for hypothesis."""

    @given(programs(adapter, strategies_with_codecs() if codecs else strategies_without_codecs()))
    def equals_stock(program: Program) -> None:
        check(workers, program)

    return equals_stock


@pytest.mark.parametrize("program", FOUND.values(), ids=FOUND)
def test_programs_that_once_differed(workers: ImpatientPool, program: Program) -> None:
    if program.adapter == "fsdp2" and not HAS_RESET and any(getattr(op, "fails", None) for op in program.ops):
        pytest.skip("this torch does not come back from an exception in a backward")
    if program.zero_unused and not HAS_UNUSED_FLAG:
        pytest.skip("this torch does not reduce unused parameters")
    check(workers, program)


@over_kinds
def test_random_programs_equal_stock(workers: ImpatientPool, adapter: str, codecs: bool, share: int) -> None:
    few = settings(max_examples=200 * share // SHARES, derandomize=True, phases=[Phase.generate], **QUIET)
    few(property_of(workers, adapter, codecs))()


@pytest.mark.fuzz
@over_kinds
def test_many_random_programs_equal_stock(workers: ImpatientPool, adapter: str, codecs: bool, share: int) -> None:
    count = int(os.environ.get("FSDP_ZPP_FUZZ", "3000")) * share // SHARES
    which = int(os.environ.get("FSDP_ZPP_FUZZ_SEED", secrets.randbelow(1 << 32)))
    print(f"{count} programs of FSDP_ZPP_FUZZ_SEED={which}")
    many = settings(max_examples=count, **QUIET)
    seed(which)(many(property_of(workers, adapter, codecs)))()
