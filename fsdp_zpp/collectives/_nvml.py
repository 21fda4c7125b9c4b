"""NVIDIA's management library, which comes with the driver: which GPUs of this machine NVLink joins.

It sees all GPUs of the machine. CUDA sees those that CUDA_VISIBLE_DEVICES leaves to a process, often one alone.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

_LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0
_P2P_OVER_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK
_P2P_WORKS = 0  # NVML_P2P_STATUS_OK
_P2P_UNKNOWN = 6  # NVML_P2P_STATUS_UNKNOWN; those between deny it, each with a reason
_UUID_NBYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE


class NvlinkPeers(NamedTuple):
    """GPUs by UUID, as seen from one of them.

    Attributes:
        gpu: That one; for an instance of MIG, the whole GPU.
        joined: GPUs to which it has NVLink, directly or through switches.
        apart: GPUs to which it has none. Those in neither are unknown.
    """

    gpu: str
    joined: frozenset[str]
    apart: frozenset[str]


def nvlink_peers(uuid: str) -> NvlinkPeers | None:
    """Return the GPUs that NVLink joins to the one with this UUID; None if the library does not say.

    Args:
        uuid: The UUID as CUDA shows it, without "GPU-" or "MIG-".
    """
    try:
        library = _load()
        if library.nvmlInit_v2() != _SUCCESS:
            return None
        try:
            return _peers(library, uuid)
        finally:
            library.nvmlShutdown()
    except (OSError, AttributeError):  # there is no such library, or it is a stub without these functions
        return None


def _load() -> Any:
    return ctypes.CDLL(_LIBRARY)


def _peers(library: Any, uuid: str) -> NvlinkPeers | None:
    own = _whole_gpu(library, uuid)
    if own is None or (gpu := _uuid(library, own)) is None:
        return None
    count = ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != _SUCCESS:
        return None
    joined: set[str] = set()
    apart: set[str] = set()
    for index in range(count.value):
        peer, status = ctypes.c_void_p(), ctypes.c_int()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(peer)) != _SUCCESS:
            continue
        name = _uuid(library, peer)
        if name is None or name == gpu:
            continue
        if library.nvmlDeviceGetP2PStatus(own, peer, _P2P_OVER_NVLINK, ctypes.byref(status)) == _SUCCESS:
            if status.value == _P2P_WORKS:
                joined.add(name)
            elif status.value < _P2P_UNKNOWN:
                apart.add(name)
    return NvlinkPeers(gpu, frozenset(joined), frozenset(apart))


def _whole_gpu(library: Any, uuid: str) -> ctypes.c_void_p | None:
    handle = ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)) == _SUCCESS:
        return handle
    if library.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}".encode(), ctypes.byref(handle)) != _SUCCESS:
        return None
    whole = ctypes.c_void_p()
    found = library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle, ctypes.byref(whole))
    return whole if found == _SUCCESS else None


def _uuid(library: Any, handle: ctypes.c_void_p) -> str | None:
    text = ctypes.create_string_buffer(_UUID_NBYTES)
    return text.value.decode() if library.nvmlDeviceGetUUID(handle, text, _UUID_NBYTES) == _SUCCESS else None
