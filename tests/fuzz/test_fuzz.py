"""Random programs train the same weights under stock FSDP and under ours.

By default a few programs, always the same ones. ``./run test -m fuzz`` runs many others:

    FSDP_ZPP_FUZZ=3000                how many (3000)
    FSDP_ZPP_FUZZ_SEED=7              which; by default others each time, whose seed a failure prints
    FSDP_ZPP_FUZZ_WITHOUT=SAM,fused   features (fuzz/features.py) that no program has
    FSDP_ZPP_FUZZ_ONLY=SAM            the only ones that programs may have
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Iterator

import pytest
from fuzz import compare
from fuzz.features import HAS_RESET, HAS_UNUSED_FLAG, choices, is_left_out
from fuzz.found import FOUND
from fuzz.program import Program, as_script
from fuzz.strategies import programs
from fuzz.workers import Workers
from harness.pool import WorkerError, device_type
from hypothesis import HealthCheck, Phase, given, reject, seed, settings

pytestmark = pytest.mark.skipif(device_type() != "cpu", reason="programs run on the CPU, where rounding is the same")

QUIET = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
KINDS = [
    *(
        (adapter, flavour, 4, whole * share)
        for adapter, whole in (("fsdp1", 5), ("fsdp1 flat", 2), ("fsdp2", 5))
        for flavour, share in (("plain", 12), ("codecs", 4), ("local", 2), ("hook", 1))
        if (flavour != "hook" or adapter != "fsdp2") and (flavour != "local" or adapter != "fsdp1 flat")
    ),
    *((adapter, "plain", world, 3) for world in (2, 3, 6, 8) for adapter in ("fsdp1", "fsdp2")),
    *((adapter, "codecs", 6, 2) for adapter in ("fsdp1", "fsdp2")),
    *((adapter, "local", world, 2) for world in (2, 6) for adapter in ("fsdp1", "fsdp2")),
]
"""An adapter, a flavour of strategies, the number of ranks, and the share of all programs."""
LEFT_OUT = {"local": "local steps", "hook": "comm hook", "codecs": "codecs"}
ALL_SHARES = sum(share for *_, share in KINDS)
FEW = 25
"""Programs of all kinds that run by default, but for kinds of which that would be none, and other worlds."""


def over_kinds(others: tuple[pytest.MarkDecorator, ...] = ()) -> pytest.MarkDecorator:
    """Parametrize with kinds of programs; ``others`` are marks of those of other worlds than four ranks."""
    rows = [
        pytest.param(
            *kind, id=f"{kind[0]} {kind[1]}{f' {kind[2]} ranks' * (kind[2] != 4)}", marks=others * (kind[2] != 4)
        )
        for kind in KINDS
        if not is_left_out(LEFT_OUT.get(kind[1], "")) and not (kind[2] != 4 and is_left_out("other worlds"))
    ]
    return pytest.mark.parametrize(("adapter", "flavour", "world", "share"), rows)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.stop()


def check(workers: Workers, program: Program) -> None:
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


def run_programs(workers: Workers, adapter: str, flavour: str, world: int, how: settings, which: int) -> None:
    """Check random programs, and print how often each feature was drawn."""
    drawn: Counter[str] = Counter()

    @seed(which)
    @how
    @given(programs(adapter, flavour, world))
    def equals_stock(program: Program) -> None:
        check(workers, program)
        drawn.update(["programs", *program.features])

    equals_stock()
    print({title: drawn[title] for title in ("programs", *(each.title for each in choices(adapter, flavour)))})


@pytest.mark.parametrize("program", FOUND.values(), ids=FOUND)
def test_programs_that_once_differed(workers: Workers, program: Program) -> None:
    if program.adapter == "fsdp2" and not HAS_RESET and any(getattr(op, "fails", None) for op in program.ops):
        pytest.skip("this torch does not come back from an exception in a backward")
    if program.zero_unused and not HAS_UNUSED_FLAG:
        pytest.skip("this torch does not reduce unused parameters")
    check(workers, program)


@over_kinds(others=(pytest.mark.wide,))
def test_random_programs_equal_stock(workers: Workers, adapter: str, flavour: str, world: int, share: int) -> None:
    few = settings(max_examples=max(1, FEW * share // ALL_SHARES), phases=[Phase.generate], **QUIET)
    run_programs(workers, adapter, flavour, world, few, which=1)


@pytest.mark.fuzz
@over_kinds()
def test_many_random_programs_equal_stock(workers: Workers, adapter: str, flavour: str, world: int, share: int) -> None:
    count = max(1, int(os.environ.get("FSDP_ZPP_FUZZ", "3000")) * share // ALL_SHARES)
    which = int(os.environ.get("FSDP_ZPP_FUZZ_SEED", secrets.randbelow(1 << 32)))
    print(f"{count} programs of FSDP_ZPP_FUZZ_SEED={which}")
    run_programs(workers, adapter, flavour, world, settings(max_examples=count, **QUIET), which)
