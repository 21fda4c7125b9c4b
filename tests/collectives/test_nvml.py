"""What the driver's library says of NVLink, and what is made of a library that says nothing."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_zpp.collectives import _nvml
from fsdp_zpp.collectives._nvml import nvlink_peers

NOT_FOUND = 6
OVER_NVLINK, NOT_SUPPORTED, UNKNOWN = 2, 5, 6


def library_of(uuids: Sequence[str], joined: Collection[frozenset[int]], instances: Collection[str]) -> SimpleNamespace:
    """A library that knows these GPUs, of which NVLink joins some pairs; instances of MIG are of the last one."""
    users: list[int] = []

    def set_to(reference: Any, value: int | None) -> int:
        reference._obj.value = value
        return 0 if value is not None else NOT_FOUND

    def by_uuid(uuid: bytes, handle: Any) -> int:
        known = dict(zip(uuids, range(1, len(uuids) + 1), strict=True)) | dict.fromkeys(instances, 99)
        return set_to(handle, known.get(uuid.decode()))

    def uuid_of(handle: ctypes.c_void_p, text: Any, size: int) -> int:
        text.value = uuids[(handle.value or 0) - 1].encode()
        assert len(text) == size
        return 0

    statuses = {True: 0, False: NOT_SUPPORTED}

    def p2p_status(one: ctypes.c_void_p, other: ctypes.c_void_p, what: int, status: Any) -> int:
        assert what == OVER_NVLINK
        pair = frozenset(((one.value or 0) - 1, (other.value or 0) - 1))
        return set_to(status, statuses[pair in joined])

    return SimpleNamespace(
        users=users,
        statuses=statuses,
        nvmlInit_v2=lambda: users.append(1) or 0,
        nvmlShutdown=lambda: users.pop() and 0,
        nvmlDeviceGetCount_v2=lambda count: set_to(count, len(uuids)),
        nvmlDeviceGetHandleByIndex_v2=lambda index, handle: set_to(handle, index + 1),
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetDeviceHandleFromMigDeviceHandle=lambda instance, whole: set_to(whole, len(uuids)),
        nvmlDeviceGetUUID=uuid_of,
        nvmlDeviceGetP2PStatus=p2p_status,
    )


Install = Callable[[SimpleNamespace], SimpleNamespace]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that puts a library in the place of the driver's."""

    def put(library: SimpleNamespace) -> SimpleNamespace:
        monkeypatch.setattr(_nvml, "_load", lambda: library)
        return library

    return put


def test_nvml_tells_which_gpus_nvlink_joins(install: Install) -> None:
    library = install(library_of(["GPU-a", "GPU-b", "GPU-c"], {frozenset((0, 1))}, ["MIG-one", "MIG-two"]))
    assert nvlink_peers("a") == ("GPU-a", {"GPU-b"}, {"GPU-c"})
    assert nvlink_peers("c") == ("GPU-c", frozenset(), {"GPU-a", "GPU-b"})
    assert nvlink_peers("one") == nvlink_peers("two") == nvlink_peers("c")
    assert nvlink_peers("of another machine") is None
    assert library.users == []


def test_a_status_of_unknown_is_no_denial(install: Install) -> None:
    library = install(library_of(["GPU-a", "GPU-b", "GPU-c"], {frozenset((0, 1))}, []))
    library.statuses[False] = UNKNOWN
    assert nvlink_peers("a") == ("GPU-a", {"GPU-b"}, frozenset())


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ("nvmlInit_v2", None),
        ("nvmlDeviceGetCount_v2", None),
        ("nvmlDeviceGetUUID", None),
        ("nvmlDeviceGetHandleByUUID", None),
        ("nvmlDeviceGetP2PStatus", ("GPU-a", frozenset(), frozenset())),
        ("nvmlDeviceGetHandleByIndex_v2", ("GPU-a", frozenset(), frozenset())),
    ],
)
def test_what_nvml_does_not_tell_is_not_known(install: Install, broken: str, expected: Any) -> None:
    library = install(library_of(["GPU-a", "GPU-b"], {frozenset((0, 1))}, []))
    setattr(library, broken, lambda *arguments: 999)
    assert nvlink_peers("a") == expected


def test_a_machine_without_the_drivers_library_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_nvml, "_LIBRARY", "libnothing-of-that-name.so.1")
    assert nvlink_peers("a") is None


def test_a_stub_to_link_with_is_not_known(install: Install) -> None:
    install(SimpleNamespace())
    assert nvlink_peers("a") is None
