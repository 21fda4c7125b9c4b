"""Which ranks share fast links: concluded from what each reports of NVLink, agreed between them, the same on all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from harness.links import NONE, Sets, machine, reports_of
from harness.messages import collected

from fsdp_zpp.runtime import links
from fsdp_zpp.runtime.links import GpuReport, Links, find_links, known_links, links_from, nvml_report
from fsdp_zpp.strategy.error_feedback import Topology

BOX = Topology(8, 8)
SWITCHED: Sets = [range(8)]
PAIRS: Sets = [(0, 1), (2, 3), (4, 5), (6, 7)]
# A mesh of cubes, as of V100s: each GPU is joined to four others, not to the remaining three.
CUBES: Sets = [(0, 1, 2, 3), (4, 5, 6, 7), (0, 4), (1, 5), (2, 6), (3, 7)]


def concluded(reports: Sequence[GpuReport], launched: Topology = BOX) -> Links:
    links = links_from(reports, launched)
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
    ],
)
def test_nodes_are_equal_sets_of_consecutive_ranks_that_nvlink_joins(sets: Sets, size: int | None, text: str) -> None:
    links = concluded(reports_of(8, sets))
    assert links.node_size == size
    assert str(links).startswith(text)
    assert links.are_slow == (size != 8)


def test_only_links_within_a_host_and_a_group_count() -> None:
    reports = reports_of(8, PAIRS)
    assert links_from(reports[::2], Topology(4, 4)) == links_from(reports_of(4, NONE), Topology(4, 4))
    assert not concluded(reports[:2], Topology(2, 2)).are_slow
    for sets, size, are_slow, text in (
        ([range(8)], 4, False, "4 GPUs a node with NVLink"),
        (NONE, 1, True, "4 GPUs a node without NVLink"),
        ([range(4)], None, True, ""),
    ):
        links = concluded(reports_of(8, sets), Topology(8, 4))
        assert (links.node_size, links.are_slow) == (size, are_slow)
        assert str(links).startswith(text)


def test_ranks_on_one_gpu_share_a_fast_link() -> None:
    one, other = reports_of(2, NONE)
    links = concluded([one, one, other, other], Topology(4, 4))
    assert (links.node_size, str(links)) == (2, "4 ranks with fast links in sets of 2")
    links = concluded([one] * 4, Topology(4, 4))
    assert (links.node_size, links.are_slow) == (4, False)
    # Hosts number their GPUs in the same way: these are four GPUs, not two that ranks share.
    links = concluded([one, other] * 2, Topology(4, 2))
    assert (links.node_size, links.shares_gpus) == (1, False)


def test_nvlink_that_any_rank_may_not_use_is_none() -> None:
    disabled = [replace(report, disabled=True) for report in reports_of(8, SWITCHED)]
    links = concluded(disabled)
    assert (links.node_size, str(links)) == (1, "8 GPUs without peer-to-peer access (NCCL_P2P_DISABLE)")
    assert concluded([*reports_of(8, SWITCHED)[:7], disabled[7]]).sets == (tuple(range(7)), (7,))


@pytest.mark.parametrize("unknown", [GpuReport(None), GpuReport("GPU-3"), GpuReport("elsewhere")])
def test_nothing_is_concluded_from_what_is_not_known(unknown: GpuReport) -> None:
    reports = [GpuReport(f"GPU-{rank}") for rank in range(4)]
    assert links_from([*reports[:3], unknown], Topology(4, 4)) is None
    # Unless the others know: a GPU that is apart from all others may see none of them.
    reports = reports_of(4, NONE)
    known = links_from([*reports[:3], unknown], Topology(4, 4))
    assert (known is not None) == (unknown.gpu == "GPU-3")


# ---- between ranks


def test_ranks_exchange_what_they_see_once_a_group(on_ranks: Callable[..., list[Any]]) -> None:
    def agreed() -> tuple[Any, ...]:
        group = dist.group.WORLD
        before, first, again = known_links(group), find_links(group), find_links(group)
        return before, first, again is first, known_links(group) is first

    pairs = [(0, 1), (2, 3)]
    with (
        machine(pairs),
        patch.object(links, "from_each_rank", wraps=links.from_each_rank) as exchange,
    ):
        found = on_ranks(1, 4, agreed)
    assert found == [(None, links_from(reports_of(4, pairs), Topology(4, 4)), True, True)] * 4
    assert exchange.call_count == 4


def test_a_driver_that_fails_on_one_rank_leaves_links_unknown_on_all(on_ranks: Callable[..., list[Any]]) -> None:
    with machine([(0, 1, 2, 3)]), patch.object(links.logger, "debug") as debug:
        reported = links.own_report

        def own_report(*arguments: Any) -> GpuReport:
            if dist.get_rank() == 1:
                raise UnicodeDecodeError("utf-8", b"", 0, 1, "no name")
            return reported(*arguments)

        with patch.object(links, "own_report", own_report):
            assert on_ranks(1, 4, lambda: find_links(dist.group.WORLD)) == [None] * 4
    debug.assert_called_once()


def test_nothing_is_asked_where_nccl_does_not_communicate(on_ranks: Callable[..., list[Any]]) -> None:
    with patch.object(links, "own_report") as asked:
        assert on_ranks(1, 2, lambda: find_links(dist.group.WORLD)) == [None] * 2
    asked.assert_not_called()


def test_nccls_variables_disable_links(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value, disabled in (
        ("NCCL_P2P_DISABLE", "1", True),
        ("NCCL_P2P_DISABLE", "0", False),
        ("NCCL_P2P_LEVEL", "LOC", True),
        ("NCCL_P2P_LEVEL", "NVL", False),
    ):
        for name in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(variable, value)
        assert links._p2p_is_disabled() == disabled


# ---- NVML


class NVMLError(Exception):
    """As pynvml raises it."""


def library_of(uuids: Sequence[str], joined: Collection[frozenset[int]], instances: Collection[str]) -> SimpleNamespace:
    """A pynvml that knows these GPUs, of which NVLink joins some pairs; instances of MIG are of the last one."""
    users: list[int] = []
    handles = {uuid: index for index, uuid in enumerate(uuids)} | dict.fromkeys(instances, 99)

    def by_uuid(uuid: str) -> int:
        if uuid not in handles:
            raise NVMLError
        return handles[uuid]

    def p2p_status(one: int, other: int, what: int) -> int:
        assert what == 2
        return 0 if frozenset((one, other)) in joined else library.denial

    library = SimpleNamespace(
        users=users,
        denial=5,
        NVMLError=NVMLError,
        NVML_P2P_CAPS_INDEX_NVLINK=2,
        NVML_P2P_STATUS_OK=0,
        NVML_P2P_STATUS_UNKNOWN=6,
        nvmlInit=lambda: users.append(1),
        nvmlShutdown=users.pop,
        nvmlDeviceGetCount=lambda: len(uuids),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetDeviceHandleFromMigDeviceHandle=lambda instance: len(uuids) - 1,
        nvmlDeviceGetUUID=lambda handle: uuids[handle],
        nvmlDeviceGetP2PStatus=p2p_status,
    )
    return library


def test_nvml_tells_which_gpus_nvlink_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = ["GPU-a", "GPU-b", "GPU-c"]
    library = library_of(gpus, {frozenset((0, 1))}, ["MIG-one", "MIG-two"])
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert nvml_report("a") == GpuReport("GPU-a", frozenset({"GPU-b"}), frozenset({"GPU-c"}))
    assert nvml_report("c") == GpuReport("GPU-c", apart=frozenset({"GPU-a", "GPU-b"}))
    assert nvml_report("one") == nvml_report("two") == nvml_report("c")
    assert nvml_report("of another machine") is None
    assert library.users == []
    library.denial = library.NVML_P2P_STATUS_UNKNOWN  # which is no denial
    assert nvml_report("a") == GpuReport("GPU-a", frozenset({"GPU-b"}))


def test_what_nvml_does_not_tell_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise NVMLError

    for broken, expected in (
        ("nvmlInit", None),
        ("nvmlDeviceGetUUID", None),
        ("nvmlDeviceGetHandleByUUID", None),
        ("nvmlDeviceGetP2PStatus", GpuReport("GPU-a")),
    ):
        library = library_of(["GPU-a", "GPU-b"], {frozenset((0, 1))}, [])
        setattr(library, broken, fail)
        monkeypatch.setitem(sys.modules, "pynvml", library)
        assert nvml_report("a") == expected
        assert library.users == []


def test_without_pynvml_links_are_not_known_and_it_is_said_how_to_know_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with collected() as records:
        assert nvml_report("a") is None
    [(level, text)] = records
    assert (level, "pip install nvidia-ml-py" in text) == ("WARNING", True)
