"""Profiles name every phase of every unit, under either adapter; without a profiler nothing is recorded."""

from __future__ import annotations

import re
from collections.abc import Callable

from harness.adapter import Adapter, Case
from harness.covering import over_adapters
from harness.pool import Pool
from harness.training import train
from torch.profiler import ProfilerActivity, profile, record_function

from fsdp_zpp import Strategy
from fsdp_zpp.collectives.hops import labelled

BLOCKS = {f"blocks.{i}" for i in range(3)}
OF_EVERY_UNIT = (
    "encode",
    "intra_all_gather",
    "decode",
    "intra_all_to_all",
    "decode_sum_encode",
    "inter_all_to_all",
    "decode_sum",
)


def names_in_a_profile(adapter: Adapter) -> set[str]:
    """In a worker: what a step is made of, as a profiler sees it."""
    model = adapter.make(Case(), Strategy.zeropp(gpus_per_node=2))
    train(adapter, model, Case(steps=1, clip=None))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train(adapter, model, Case(steps=1, clip=None))
    return {event.name for event in profiler.events() if event.name.startswith("fsdp_zpp::")}


@over_adapters
def test_every_phase_of_every_unit_has_a_name(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for names in pool(4).run(names_in_a_profile, adapter):
        for phase in OF_EVERY_UNIT:
            assert names >= {f"fsdp_zpp::{phase} ({block})" for block in BLOCKS}
        # Units as small as these are prefetched together, in a hop that is named after the first and the last.
        assert any(re.fullmatch(r"fsdp_zpp::inter_all_gather \(.* to blocks\.2\)", name) for name in names)


def test_nothing_is_recorded_without_a_profiler() -> None:
    with profile(activities=[ProfilerActivity.CPU]):
        assert isinstance(labelled("phase", "unit"), record_function)
    assert not isinstance(labelled("phase", "unit"), record_function)
