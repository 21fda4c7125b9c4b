"""Links among the ranks of a machine: NVML says which of their GPUs NVLink joins."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fsdp_zpp.comm.agreement import from_each_rank
from fsdp_zpp.comm.mesh import named_ranks, topology_of
from fsdp_zpp.strategy.error_feedback import Topology

logger = logging.getLogger("fsdp_zpp")

# ---- NVML: which GPUs of this machine NVLink joins
#
# NVML sees all GPUs of the machine. CUDA sees only those that CUDA_VISIBLE_DEVICES leaves to a process, often just one.


@dataclass(frozen=True)
class GpuReport:
    """Report of a rank on the GPUs of its machine, by their UUIDs.

    NVLink joins ``gpu`` to the GPUs in ``joined``, directly or through switches. It is known not to join those in
    ``apart``. ``disabled`` says that NCCL was told to use no peer-to-peer access, and therefore no NVLink.
    """

    gpu: str | None  # for a MIG instance, the whole GPU; None if unknown
    joined: frozenset[str] = frozenset()
    apart: frozenset[str] = frozenset()
    disabled: bool = False


def nvml_report(uuid: str) -> GpuReport | None:
    """Return NVML's report on the GPU or MIG instance ``uuid``, without "GPU-" or "MIG-"; None if NVML can't tell."""
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        logger.warning("which GPUs NVLink joins is not known without pynvml: run pip install nvidia-ml-py")
        return None
    try:
        nvml.nvmlInit()
        try:
            return _query_nvml(nvml, uuid)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return None


def _query_nvml(nvml: Any, uuid: str) -> GpuReport:
    own = _whole_gpu(nvml, uuid)
    gpu = nvml.nvmlDeviceGetUUID(own)
    joined: set[str] = set()
    apart: set[str] = set()
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            peer = nvml.nvmlDeviceGetHandleByIndex(index)
            name = nvml.nvmlDeviceGetUUID(peer)
            status = nvml.nvmlDeviceGetP2PStatus(own, peer, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        except nvml.NVMLError:  # NVML has no status for a failed GPU, or between a GPU and itself
            continue
        if status == nvml.NVML_P2P_STATUS_OK:
            joined.add(name)
        elif status != nvml.NVML_P2P_STATUS_UNKNOWN:  # each other status says why there is no NVLink
            apart.add(name)
    return GpuReport(gpu, frozenset(joined - {gpu}), frozenset(apart - {gpu}))


def _whole_gpu(nvml: Any, uuid: str) -> Any:
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}"))


# ---- which ranks of a group have fast links to each other
#
# Fast links are NVLink, directly or through switches, and links among ranks on one GPU. All others are slow:
# peer-to-peer access over PCIe, copies through the host's memory, and NVLink that NCCL was told not to use. Each rank
# asks NVML about its own GPU, and ranks exchange the answers once per group, so that all get the same result. If it is
# unknown for two ranks of a node whether fast links join them (on CPUs, or among accelerators other than NVIDIA's), all
# links of the group are unknown.


@dataclass(frozen=True)
class Links:
    """Fast links among the ranks of a group."""

    launched: Topology
    sets: tuple[tuple[int, ...], ...]  # sorted ranks that fast links join; each set is within a node of ``launched``
    shares_gpus: bool = False
    disabled: bool = False

    @property
    def node_size(self) -> int | None:
        """Return the number of consecutive ranks in each set; None if sets are unequal or in another order."""
        size = len(self.sets[0])
        consecutive = all(ranks == tuple(range(ranks[0], ranks[0] + size)) for ranks in self.sets)
        return size if consecutive else None

    @property
    def are_slow(self) -> bool:
        """Return whether a launched node has ranks without fast links to each other."""
        return len(self.sets) > self.launched.nodes

    def __str__(self) -> str:
        what = "ranks" if self.shares_gpus else "GPUs"
        ranks = f"{self.launched.gpus_per_node} {what}{' a node' * (self.launched.nodes > 1)}"
        fast = "fast links" if self.shares_gpus else "NVLink"
        if not self.are_slow:
            return f"{ranks} with {fast}"
        if len(self.sets) == self.launched.world:
            return f"{ranks} without {'peer-to-peer access (NCCL_P2P_DISABLE)' if self.disabled else fast}"
        if self.node_size is not None:
            return f"{ranks} with {fast} in sets of {self.node_size}"
        joined = ", ".join(named_ranks(list(ranks)) for ranks in self.sets if len(ranks) > 1)
        return f"{ranks} with {fast} among {joined} alone"


# None if the links of a group are unknown.
_links: WeakKeyDictionary[dist.ProcessGroup, Links | None] = WeakKeyDictionary()


def find_links(group: dist.ProcessGroup, device: torch.device | None = None) -> Links | None:
    """Return the links of ``group``, or None if they are unknown. Collective at the first call for a group."""
    if group not in _links:
        _links[group] = _exchanged(group, device) if supports_link_query(group) else None
    return _links[group]


def known_links(group: dist.ProcessGroup | None) -> Links | None:
    """Return the result of :func:`find_links`, without communication; None also if it was never called."""
    return None if group is None else _links.get(group)


def links_from(reports: Sequence[GpuReport], launched: Topology) -> Links | None:
    """Return the fast links that ``reports`` of all ranks, in rank order, show; None if links are unknown."""
    sets: list[tuple[int, ...]] = []
    for ranks in launched.intra_partition():
        found = _joined_sets({rank: reports[rank] for rank in ranks})
        if found is None:
            return None
        sets += found
    gpus_of_nodes = ([reports[rank].gpu for rank in ranks] for ranks in launched.intra_partition())
    shares_gpus = any(len({*gpus}) < len(gpus) for gpus in gpus_of_nodes)
    return Links(launched, tuple(sets), shares_gpus, any(report.disabled for report in reports))


def _joined_sets(reports: dict[int, GpuReport]) -> list[tuple[int, ...]] | None:
    # GPUs that are joined only through others are one set, too: NCCL's rings run along links, and many pairs among
    # eight V100s have no direct link.
    sets: list[set[int]] = []
    for rank, report in reports.items():
        near = [part for part in sets if any(_are_joined(report, reports[other]) for other in part)]
        sets = [part for part in sets if part not in near] + [{rank}.union(*near)]
    for part in sets:
        others = [reports[rank] for rank in reports.keys() - part]
        if not all(_are_known_apart(reports[rank], other) for rank in part for other in others):
            return None
    return sorted(tuple(sorted(part)) for part in sets)


def _are_joined(one: GpuReport, other: GpuReport) -> bool:
    if one.gpu is None or other.gpu is None:
        return False
    linked = one.gpu in other.joined and other.gpu in one.joined and not (one.disabled or other.disabled)
    return one.gpu == other.gpu or linked


def _are_known_apart(one: GpuReport, other: GpuReport) -> bool:
    if one.gpu is None or other.gpu is None:
        return False
    return one.disabled or other.disabled or one.gpu in other.apart or other.gpu in one.apart


def supports_link_query(group: dist.ProcessGroup) -> bool:
    """Return whether :func:`find_links` asks ranks about GPUs; the same on all ranks, whatever GPU each has."""
    return dist.get_world_size(group) > 1 and "nccl" in dist.get_backend_config(group)


def _exchanged(group: dist.ProcessGroup, device: torch.device | None) -> Links | None:
    try:
        report = own_report(group, device)
    except Exception as error:  # any error: without this rank, the others would hang in the exchange
        logger.debug("links of this rank's GPU are not known: %s: %s", type(error).__name__, error)
        report = GpuReport(None)
    reports = from_each_rank(report, group, device)
    try:
        launched = topology_of(group)
    except ValueError:  # the launcher gives no valid layout; callers that need one raise this error themselves
        return None
    return links_from(reports, launched)


def own_report(group: dist.ProcessGroup, device: torch.device | None) -> GpuReport:
    if not torch.cuda.is_available():
        return GpuReport(None)
    given = (device, getattr(group, "bound_device_id", None), torch.device("cuda", torch.cuda.current_device()))
    own = next(each.index for each in given if each is not None and each.type == "cuda" and each.index is not None)
    uuid = str(torch.cuda.get_device_properties(own).uuid)
    report = nvml_report(uuid) or _cuda_report(uuid, own)
    return replace(report, disabled=_p2p_is_disabled())


def _cuda_report(uuid: str, own: int) -> GpuReport:
    """Return a report by CUDA: only visible GPUs that this one can't access are apart; other links are unknown."""
    others = (index for index in range(torch.cuda.device_count()) if index != own)
    apart = (index for index in others if not torch.cuda.can_device_access_peer(own, index))
    uuids = frozenset(str(torch.cuda.get_device_properties(index).uuid) for index in apart)
    return GpuReport(uuid, frozenset(), uuids)


def _p2p_is_disabled() -> bool:
    return os.environ.get("NCCL_P2P_DISABLE", "0") != "0" or os.environ.get("NCCL_P2P_LEVEL") in ("LOC", "0")
