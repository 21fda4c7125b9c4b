"""Which ranks share fast links: concluded from what each reports, agreed between them, the same on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from harness.links import NONE, Sets, machine, reports_of
from harness.pool import Pool
from hypothesis import given, strategies as st

from fsdp_zpp.collectives import links
from fsdp_zpp.collectives.links import GpuReport, Links, find_links, known_links, links_from
from fsdp_zpp.config.topology import Topology

BOX = Topology(8, 8)
SWITCHED: Sets = [range(8)]
PAIRS: Sets = [(0, 1), (2, 3), (4, 5), (6, 7)]
# A mesh of cubes, as of V100s: each GPU is joined to four others, not to the remaining three.
CUBES: Sets = [(0, 1, 2, 3), (4, 5, 6, 7), (0, 4), (1, 5), (2, 6), (3, 7)]


def found(sets: Sets, launched: Topology = BOX) -> Links:
    links = links_from(reports_of(launched.world, sets), launched)
    assert links is not None
    return links


@pytest.mark.parametrize(
    ("sets", "size", "text"),
    [
        (SWITCHED, 8, "8 GPUs with NVLink"),
        (CUBES, 8, "8 GPUs with NVLink"),
        (PAIRS, 2, "8 GPUs with NVLink in sets of 2"),
        ([(0, 1, 2, 3), (4, 5, 6, 7)], 4, "8 GPUs with NVLink in sets of 4"),
        (NONE, 1, "8 GPUs without NVLink"),
        ([(0, 1)], None, "8 GPUs with NVLink among ranks 0-1 alone"),
        ([(0, 2), (1, 3), (4, 6), (5, 7)], None, "8 GPUs with NVLink among ranks 0, 2, ranks 1, 3, ranks 4, 6, "),
        ([(0, 1, 2), (3, 4, 5, 6, 7)], None, "8 GPUs with NVLink among ranks 0-2, ranks 3-7 alone"),
    ],
)
def test_nodes_are_equal_sets_of_consecutive_ranks_that_nvlink_joins(sets: Sets, size: int | None, text: str) -> None:
    links = found(sets)
    assert links.node_size == size
    assert str(links).startswith(text)
    assert links.are_slow == (size != 8)


@given(st.permutations(range(8)))
def test_the_order_of_gpus_decides_whether_pairs_are_neighbours(order: Sequence[int]) -> None:
    reports = reports_of(8, PAIRS)
    links = links_from([reports[gpu] for gpu in order], BOX)
    assert links is not None
    neighbours = all(order[rank] // 2 == order[rank + 1] // 2 for rank in range(0, 8, 2))
    assert links.node_size == (2 if neighbours else None)
    assert {frozenset(order[rank] for rank in ranks) for ranks in links.sets} == {frozenset(pair) for pair in PAIRS}


def test_a_group_counts_its_own_ranks_alone() -> None:
    reports = reports_of(8, PAIRS)
    assert links_from(reports[::2], Topology(4, 4)) == links_from(reports_of(4, NONE), Topology(4, 4))
    together = links_from(reports[:2], Topology(2, 2))
    assert together is not None
    assert not together.are_slow


def test_links_between_hosts_do_not_count() -> None:
    apart = found([range(8)], Topology(8, 4))
    assert (apart.node_size, apart.are_slow, str(apart)) == (4, False, "4 GPUs a node with NVLink")
    alike = found(NONE, Topology(8, 4))
    assert (alike.node_size, alike.are_slow, str(alike)) == (1, True, "4 GPUs a node without NVLink")
    one_of_two = found([range(4)], Topology(8, 4))
    assert (one_of_two.node_size, one_of_two.are_slow) == (None, True)
    # Hosts number their GPUs in the same way: these are four GPUs, not two that ranks share.
    twice = reports_of(2, NONE) * 2
    links = links_from(twice, Topology(4, 2))
    assert links is not None
    assert links.node_size == 1
    assert not links.shares_gpus


def test_ranks_on_one_gpu_share_a_fast_link() -> None:
    one, other = reports_of(2, NONE)
    links = links_from([one, one, other, other], Topology(4, 4))
    assert links is not None
    assert (links.node_size, str(links)) == (2, "4 ranks with fast links in sets of 2")
    links = links_from([one] * 4, Topology(4, 4))
    assert links is not None
    assert (links.node_size, links.are_slow) == (4, False)


def test_nvlink_that_any_rank_may_not_use_is_none() -> None:
    disabled = [replace(report, disabled=True) for report in reports_of(8, SWITCHED)]
    links = links_from(disabled, BOX)
    assert links is not None
    assert (links.node_size, str(links)) == (1, "8 GPUs without peer-to-peer access (NCCL_P2P_DISABLE)")
    links = links_from([*reports_of(8, SWITCHED)[:7], disabled[7]], BOX)
    assert links is not None
    assert links.sets == (tuple(range(7)), (7,))


@pytest.mark.parametrize("unknown", [GpuReport(None), GpuReport("GPU-3"), GpuReport("elsewhere")])
def test_nothing_is_concluded_from_what_is_not_known(unknown: GpuReport) -> None:
    reports = [GpuReport(f"GPU-{rank}") for rank in range(4)]
    assert links_from([*reports[:3], unknown], Topology(4, 4)) is None
    # Unless the others know: a GPU that is apart from all others may see none of them.
    reports = reports_of(4, NONE)
    known = links_from([*reports[:3], unknown], Topology(4, 4))
    assert (known is not None) == (unknown.gpu == "GPU-3")


@given(st.lists(st.sets(st.integers(0, 7), min_size=2), max_size=3), st.randoms())
def test_reports_that_contradict_each_other_make_a_link_slow(sets: Sets, random: Any) -> None:
    reports = reports_of(8, sets)
    one, other = random.sample(range(8), 2)
    gpu = reports[other].gpu
    denied = replace(reports[one], joined=reports[one].joined - {gpu}, apart=reports[one].apart | {gpu})
    whole = links_from([*reports[:one], denied, *reports[one + 1 :]], BOX)
    halved = {one: reports[one].joined - {gpu}, other: reports[other].joined - {reports[one].gpu}}
    expected = [replace(each, joined=halved.get(rank, each.joined)) for rank, each in enumerate(reports)]
    expected[one] = replace(expected[one], apart=denied.apart)
    assert whole == links_from(expected, BOX)


def agreed(sets: Sets) -> tuple[Any, ...]:
    """In a worker: what ranks find, before and after they ask, and how often they exchange."""
    exchanges: list[int] = []
    group = dist.group.WORLD
    with machine(sets):
        original = links.from_each_rank
        links.from_each_rank = lambda *arguments: exchanges.append(1) or original(*arguments)
        try:
            before, first, again = known_links(group), find_links(group), find_links(group)
        finally:
            links.from_each_rank = original
        return before, first, again is first, known_links(group) is first, len(exchanges)


def test_ranks_exchange_what_they_see_once_a_group(pool: Callable[[int], Pool]) -> None:
    pairs = links_from(reports_of(4, [(0, 1), (2, 3)]), Topology(4, 4))
    assert pool(4).run(agreed, [(0, 1), (2, 3)]) == [(None, pairs, True, True, 1)] * 4


def asked_where_a_driver_fails() -> tuple[bool, bool]:
    """In a worker: whether links are known if the driver of one rank fails, and whether that is logged."""
    group = dist.group.WORLD
    with machine([(0, 1, 2, 3)]), patch.object(links.logger, "debug") as debug:
        reported = links.own_report

        def own_report(*arguments: Any) -> GpuReport:
            if dist.get_rank() == 1:
                raise UnicodeDecodeError("utf-8", b"", 0, 1, "no name")
            return reported(*arguments)

        with patch.object(links, "own_report", own_report):
            found = find_links(group)
    return found is None, debug.called


def test_a_driver_that_fails_on_one_rank_leaves_links_unknown_on_all(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(asked_where_a_driver_fails) == [(True, rank == 1) for rank in range(4)]


def asked_on_cpus() -> Any:
    """In a worker: gloo between CPUs has no links to ask about."""
    return find_links(dist.group.WORLD) if "nccl" not in dist.get_backend() else None


def test_nothing_is_asked_where_nccl_does_not_communicate(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(asked_on_cpus) == [None] * 4


@pytest.mark.parametrize(
    ("variable", "value", "disabled"),
    [
        ("NCCL_P2P_DISABLE", "1", True),
        ("NCCL_P2P_DISABLE", "0", False),
        ("NCCL_P2P_LEVEL", "LOC", True),
        ("NCCL_P2P_LEVEL", "NVL", False),
    ],
)
def test_nccls_variables_disable_links(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, disabled: bool
) -> None:
    for name in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    assert links._p2p_is_disabled() == disabled
