"""Measures both bandwidths on the running job, with the collectives that strategies use."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from fsdp_zpp.collectives.hops import Hop, Traffic, hop_over
from fsdp_zpp.collectives.kinds import Level
from fsdp_zpp.collectives.links import find_links
from fsdp_zpp.collectives.mesh import process_mesh

from .config import positive, whole
from .hardware import SLOWEST_NVLINK

DEFAULT_MIB = 256
REPETITIONS = 7


@dataclass(frozen=True)
class Bandwidth:
    """Measured bandwidths, the same on every rank.

    Attributes:
        nodes: Number of nodes they were measured on.
        gpus_per_node: GPUs of each node.
        inter_gbps: Gbit/s of a whole node to the others; None if there is only one node.
        intra_gbps: Gbit/s of one GPU to the others of its node; None if it has only one GPU.
    """

    nodes: int
    gpus_per_node: int
    inter_gbps: float | None
    intra_gbps: float | None

    @property
    def slow_links(self) -> bool:
        """Return whether GPUs of a node are slower to each other than over any NVLink."""
        return self.intra_gbps is not None and self.intra_gbps < SLOWEST_NVLINK


def measure_bandwidth(
    group: dist.ProcessGroup,
    gpus_per_node: int | None = None,
    mib: float = DEFAULT_MIB,
    repetitions: int = REPETITIONS,
) -> Bandwidth:
    """Time all-gathers between nodes and inside them. Collective over ``group``.

    All ranks take part at once, so the inter-node figure is that of a node's whole network, not the share of one GPU.
    A repetition counts with the time of its slowest rank. The result is the median of all but the first, which warms
    up.

    Args:
        group: The ranks.
        gpus_per_node: Ranks of a node; None takes it from torchrun.
        mib: MiB that a rank holds after an all-gather, about as much as a large unit.
        repetitions: Number of timed all-gathers.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is out of range, or the layout is not possible.
    """
    nbytes = int(positive("mib", mib) * 2**20)
    repetitions = whole("repetitions", repetitions)
    mesh = process_mesh(group, gpus_per_node)
    topology = mesh.topology

    def gbps(subgroup: dist.ProcessGroup | None, level: Level, senders: int) -> float | None:
        traffic = Traffic()
        hop = hop_over(subgroup, "gather", level, traffic)
        if hop is None:
            return None
        # Every rank sends an equal part of the bytes that all hold in the end.
        seconds = _median_seconds(hop, group, max(1, nbytes // hop.size), repetitions)
        sent = traffic.sent["gather", level] / (repetitions + 1)  # the warm-up counts here
        return senders * sent * 8 / seconds / 1e9

    return Bandwidth(
        topology.nodes,
        topology.gpus_per_node,
        inter_gbps=gbps(mesh.inter, "inter", topology.gpus_per_node),
        intra_gbps=gbps(mesh.intra, "intra", 1),
    )


def links_are_slow(group: dist.ProcessGroup, measured: Bandwidth | None) -> bool | None:
    """Return whether the links inside a node are slow: as the machine says, which decides on nodes in training, too.

    Collective over ``group``.

    Args:
        group: The ranks.
        measured: What decides if the machine does not say; None if the links inside nodes were not measured.

    Returns:
        None if neither says it.
    """
    links = find_links(group)
    if links is not None:
        return links.are_slow
    return None if measured is None else measured.slow_links


def world() -> dist.ProcessGroup:
    """Return the group of all ranks.

    Raises:
        ValueError: If no process group is initialized.
    """
    if dist.group.WORLD is None:
        raise ValueError("no process group is initialized; call torch.distributed.init_process_group first")
    return dist.group.WORLD


def _median_seconds(hop: Hop, group: dist.ProcessGroup, nbytes: int, repetitions: int) -> float:
    """Return the median over repetitions of the slowest rank's seconds for an all-gather of ``nbytes`` per rank."""
    # A group may have several backends, such as "cpu:gloo,cuda:nccl".
    device = torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")
    payload = torch.zeros((1, nbytes), dtype=torch.uint8, device=device)
    times = torch.empty(repetitions + 1, dtype=torch.float64, device=device)
    for repetition in range(repetitions + 1):
        # All ranks start together, or the first would count its wait for the last.
        dist.barrier(group)
        _synchronize(device)
        start = time.perf_counter()
        hop.all_gather(payload, "bandwidth")
        _synchronize(device)
        times[repetition] = time.perf_counter() - start
    # All ranks need the same figures, or they might choose different strategies.
    dist.all_reduce(times, dist.ReduceOp.MAX, group)
    return median(times[1:].tolist())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
