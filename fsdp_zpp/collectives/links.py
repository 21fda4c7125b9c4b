"""Links: which ranks of a group share fast ones, as the machine says.

Fast are NVLink, directly or through switches, and what ranks on one GPU share. All else is slow: peer-to-peer access
over PCIe, copies through the host's memory, and NVLink that NCCL was told not to use. Each rank asks NVML about its own
GPU; ranks exchange what they have found, once a group, so that all of them conclude the same. Where a link is not known
(on CPUs, or between other accelerators than NVIDIA's), nothing is concluded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fsdp_zpp.config.topology import Topology

from ._nvml import NvlinkPeers, nvlink_peers
from .agreement import from_each_rank
from .mesh import topology_of
from .rank_names import named_ranks

logger = logging.getLogger("fsdp_zpp")


@dataclass(frozen=True)
class GpuReport:
    """Report of a rank on the links of its GPU; GPUs are named by their UUIDs.

    Attributes:
        gpu: The rank's GPU; None if it has none.
        joined: GPUs of the machine to which it has fast links.
        apart: GPUs of the machine to which it has none. Those in neither are unknown.
        disabled: Whether NCCL was told to use no peer-to-peer access, and so no NVLink.
    """

    gpu: str | None
    joined: frozenset[str] = frozenset()
    apart: frozenset[str] = frozenset()
    disabled: bool = False


@dataclass(frozen=True)
class Links:
    """Fast links among the ranks of a group.

    Attributes:
        launched: The ranks on nodes as the launcher started them.
        sets: The sets of ranks that fast links join, each in order, by their first rank; none spans two launched nodes.
        shares_gpus: Whether ranks share a GPU.
        disabled: Whether NCCL was told to use no peer-to-peer access.
    """

    launched: Topology
    sets: tuple[tuple[int, ...], ...]
    shares_gpus: bool = False
    disabled: bool = False

    @property
    def node_size(self) -> int | None:
        """Return how many consecutive ranks are in each set; None if sets are unequal or ranks lie in another order."""
        size = len(self.sets[0])
        consecutive = all(ranks == tuple(range(ranks[0], ranks[0] + size)) for ranks in self.sets)
        return size if consecutive else None

    @property
    def are_slow(self) -> bool:
        """Return whether ranks of a launched node are without fast links to each other."""
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


# None for groups of which nothing is known.
_links: WeakKeyDictionary[dist.ProcessGroup, Links | None] = WeakKeyDictionary()


def find_links(group: dist.ProcessGroup, device: torch.device | None = None) -> Links | None:
    """Return the links of ``group``, or None if they are not known. Collective at the first call for a group.

    Args:
        group: The ranks.
        device: This rank's GPU. Default: the one that the group is bound to, or the current one.
    """
    if group not in _links:
        _links[group] = _exchanged(group, device) if may_be_known(group) else None
    return _links[group]


def known_links(group: dist.ProcessGroup | None) -> Links | None:
    """Return what :func:`find_links` has found, without communication; None also if it was never called."""
    return None if group is None else _links.get(group)


def links_from(reports: Sequence[GpuReport], launched: Topology) -> Links | None:
    """Conclude from the reports of all ranks, in their order, which of them share fast links; None if it is unknown."""
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
    """Return the sets of ranks of one machine that are joined, if through others; None if that is unknown."""
    # Through others, since NCCL's rings go where links are: an eight-GPU mesh of V100s has no links for many pairs.
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
    if one.gpu == other.gpu:
        return True
    return not (one.disabled or other.disabled) and one.gpu in other.joined and other.gpu in one.joined


def _are_known_apart(one: GpuReport, other: GpuReport) -> bool:
    """Return whether two ranks that are not joined are surely not."""
    if one.gpu is None or other.gpu is None:
        return False
    return one.disabled or other.disabled or one.gpu in other.apart or other.gpu in one.apart


def may_be_known(group: dist.ProcessGroup) -> bool:
    """Return whether :func:`find_links` asks ranks about GPUs; alike on all of them, whatever each has."""
    return dist.get_world_size(group) > 1 and "nccl" in dist.get_backend_config(group)


def _exchanged(group: dist.ProcessGroup, device: torch.device | None) -> Links | None:
    reports = from_each_rank(_own_report_or_none(group, device), group, device)
    try:
        launched = topology_of(group)
    except ValueError:  # the launcher does not say what shares a machine; whoever needs nodes raises it
        return None
    return links_from(reports, launched)


def _own_report_or_none(group: dist.ProcessGroup, device: torch.device | None) -> GpuReport:
    try:
        return own_report(group, device)
    except Exception as error:  # of any kind: the other ranks would hang in the exchange
        logger.debug("links of this rank's GPU are not known: %s: %s", type(error).__name__, error)
        return GpuReport(None)


def own_report(group: dist.ProcessGroup, device: torch.device | None) -> GpuReport:
    """Return this rank's report."""
    if not torch.cuda.is_available():
        return GpuReport(None)
    given = (device, getattr(group, "bound_device_id", None), torch.device("cuda", torch.cuda.current_device()))
    own = next(each.index for each in given if each is not None and each.type == "cuda" and each.index is not None)
    uuid = str(torch.cuda.get_device_properties(own).uuid)
    peers = nvlink_peers(uuid) or _peers_without_access(uuid, own)
    return GpuReport(*peers, disabled=_p2p_is_disabled())


def _peers_without_access(uuid: str, own: int) -> NvlinkPeers:
    """Return which visible GPUs this one can't access: they are apart, while others may have any link."""
    others = (index for index in range(torch.cuda.device_count()) if index != own)
    apart = (index for index in others if not torch.cuda.can_device_access_peer(own, index))
    uuids = frozenset(str(torch.cuda.get_device_properties(index).uuid) for index in apart)
    return NvlinkPeers(uuid, frozenset(), uuids)


def _p2p_is_disabled() -> bool:
    """Return whether the environment tells NCCL to use no peer-to-peer access."""
    return os.environ.get("NCCL_P2P_DISABLE", "0") != "0" or os.environ.get("NCCL_P2P_LEVEL") in ("LOC", "0")
