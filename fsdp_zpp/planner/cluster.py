"""The cluster that is planned for: GPUs, nodes and links, from the catalog or measured."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from fsdp_zpp.comm.agreement import agree
from fsdp_zpp.comm.hops import Hop, Level, Traffic, hop_over
from fsdp_zpp.comm.mesh import mesh_on, topology_of
from fsdp_zpp.names import did_you_mean
from fsdp_zpp.runtime.links import find_links
from fsdp_zpp.strategy.error_feedback import Topology

# ---- config

GIB = 2**30

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cluster:
    """Nodes, their GPUs, and the two networks.

    Args:
        nodes: Number of nodes.
        gpus_per_node: GPUs of each node.
        inter_gbps: Gbit/s that a *whole node* can send to the others, all its network cards together. Required if
            there is more than one node.
        intra_gbps: Gbit/s that *one GPU* can send to the others of its node. Required if a node has more than one.
        slow_links: True if the GPUs of a node have no NVLink, so that codecs save time between them, too.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is out of range or missing.
    """

    nodes: int
    gpus_per_node: int
    inter_gbps: float | None = None
    intra_gbps: float | None = None
    slow_links: bool = False

    def __post_init__(self) -> None:
        # The command line passes floats. A frozen dataclass lets its fields be set in this way only.
        for name in ("nodes", "gpus_per_node"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        between, inside = "nodes, so a node's Gbit/s to the others", "GPUs a node, so a GPU's Gbit/s inside it"
        _check_bandwidth("inter_gbps", self.inter_gbps, self.nodes, between, "--net")
        _check_bandwidth("intra_gbps", self.intra_gbps, self.gpus_per_node, inside, "--gpu, --link")

    @property
    def topology(self) -> Topology:
        """Return the layout of the ranks."""
        return Topology(self.nodes * self.gpus_per_node, self.gpus_per_node)


def _check_bandwidth(name: str, gbps: float | None, ranks: int, what: str, named: str) -> None:
    if gbps is not None:
        positive(name, gbps)
    elif ranks > 1:
        raise ValueError(
            f"{name} is missing: there are {ranks} {what} must be given or measured; on the command line, "
            f"pass --{name.replace('_', '-')}, {named}, or run it under torchrun with --measure"
        )


@dataclass(frozen=True)
class StepConfig:
    """Work of one optimizer step.

    Args:
        micro_batches: Number of micro-batches in a step, all but the last under ``no_sync``.
        tokens: Number of tokens on one GPU in one micro-batch.
        tflops: TFLOP/s that a GPU achieves on this model (not its peak).
        launch_ms: Milliseconds in which the CPU launches forward and backward of one unit; 0 leaves launches out.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is out of range, or only one of ``tokens`` and ``tflops`` is given.
    """

    micro_batches: int = 1
    tokens: int | None = None
    tflops: float | None = None
    launch_ms: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "micro_batches", whole("micro_batches", self.micro_batches))
        if (self.tokens is None) != (self.tflops is None):
            raise ValueError(
                "computation time needs both tokens (per GPU and micro-batch) and tflops (achieved per GPU), "
                f"got tokens={self.tokens} and tflops={self.tflops}; give both, or neither to leave it out"
            )
        if self.tokens is not None and self.tflops is not None:
            object.__setattr__(self, "tokens", whole("tokens", self.tokens))
            positive("tflops", self.tflops)


@dataclass(frozen=True)
class MemoryBudget:
    """Memory of one GPU in GiB (2**30 bytes), and how much of it model states cannot use.

    GB in the name of a GPU means GiB: an A100-80GB holds 80 GiB, of which torch sees 79.2.

    Args:
        gpu_memory: Memory of the GPU; None sets no limit.
        activations: Memory of the activations that the model keeps for backward.
        reserve: Memory that no tensor can use: the CUDA context, NCCL's buffers, the allocator's gaps.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is out of range.
    """

    gpu_memory: float | None = None
    activations: float = 2.0
    reserve: float = 2.0

    def __post_init__(self) -> None:
        if self.gpu_memory is not None:
            positive("gpu_memory", self.gpu_memory)
        if _number("activations", self.activations) < 0:
            raise ValueError(f"activations must be at least 0, got {self.activations!r}")


@dataclass(frozen=True)
class Precision:
    """Dtypes of a training with mixed precision.

    Args:
        compute: Dtype of weights in forward and backward, on the wire without a codec, and of frozen shards.
        reduce: Dtype of the gradients on the wire without a codec.
        storage: Dtype of the shards that the optimizer updates.
        optimizer_bytes: Bytes of optimizer state per trainable element; 8 is Adam in fp32.
        accumulation: Dtype in which gradients of several micro-batches accumulate.

    Raises:
        TypeError: If a dtype is not a ``torch.dtype``, or ``optimizer_bytes`` is not a number.
        ValueError: If a dtype is not one that a strategy takes, or ``optimizer_bytes`` is negative.
    """

    compute: torch.dtype = torch.bfloat16
    reduce: torch.dtype = torch.bfloat16
    storage: torch.dtype = torch.float32
    optimizer_bytes: int = 8
    accumulation: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in ("compute", "reduce", "storage", "accumulation"):
            dtype = getattr(self, name)
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{name} must be a torch.dtype, got {dtype!r}")
            if dtype not in DTYPES.values():
                raise ValueError(f"{name} must be one of {', '.join(map(str, DTYPES.values()))}, got {dtype}")
        object.__setattr__(self, "optimizer_bytes", whole("optimizer_bytes", self.optimizer_bytes, least=0))


def whole(name: str, value: float, least: int = 1) -> int:
    """Return ``value``, maybe a float such as ``70e9``, as an int; raise TypeError or ValueError if it is not whole."""
    number = _number(name, value)
    if not number.is_integer() or number < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return int(value)


def positive(name: str, value: float) -> float:
    """Return ``value``, which must be a finite number above 0; raise like :func:`whole`."""
    if _number(name, value) <= 0:
        raise ValueError(f"{name} must be above 0, got {value!r}")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):  # Python counts bool as an int
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value!r}")
    return float(value)


# ---- catalog
#
# Typical GPUs, the links between them, and networks: figures of vendors' data sheets, by name.
#
# All figures are peaks; ``hardware`` below has the shares of their peaks that GPUs and links reach.


class Gpu(NamedTuple):
    """A GPU.

    Attributes:
        memory: GiB of memory, which vendors write as GB.
        tflops: Dense TFLOP/s in bf16 with fp32 accumulation, at its peak.
        link: Name of the link that usually connects the GPU to others of its machine.
    """

    memory: float
    tflops: float
    link: str


# TFLOP/s are without sparsity: half of a data sheet's figure if that is with sparsity only. Sources are NVIDIA's data
# sheets of 2021 to 2025 for a10, a100, b200, h100, h200, l4 and l40s, and the appendices of NVIDIA's whitepapers
# on the architectures GA102 (a6000, rtx3090), Ada (rtx4090) and RTX Blackwell (rtx5090).
GPUS: Mapping[str, Gpu] = {
    "a10": Gpu(24, 125, "pcie4"),
    "a100": Gpu(80, 312, "nvlink3"),
    "a100-40gb": Gpu(40, 312, "nvlink3"),
    "a100-pcie": Gpu(80, 312, "pcie4"),
    "a6000": Gpu(48, 154.8, "pcie4"),
    "b200": Gpu(180, 2250, "nvlink5"),
    "h100": Gpu(80, 989, "nvlink4"),
    "h100-pcie": Gpu(80, 756, "pcie5"),
    "h200": Gpu(140, 989, "nvlink4"),
    "l4": Gpu(24, 121, "pcie4"),
    "l40s": Gpu(48, 362.05, "pcie4"),
    "rtx3090": Gpu(24, 71, "pcie4"),
    "rtx4090": Gpu(24, 165.2, "pcie4"),
    "rtx5090": Gpu(32, 209.5, "pcie5"),
}

# NVLink's rates are half of those in NVIDIA's data sheets, which add both directions: A100 (600 GB/s), H100 (900), HGX
# B200 (1800), RTX A6000 (112.5, a bridge between two GPUs). PCIe is 16 lanes in 128b/130b encoding, as specified.
LINKS: Mapping[str, float] = {
    "nvlink3": 2400,
    "nvlink4": 3600,
    "nvlink5": 7200,
    "nvlink-bridge": 450,
    "pcie3": 126,
    "pcie4": 252,
    "pcie5": 504,
}
"""Gbit/s that one GPU sends to others of its machine, at the link's peak, in one direction."""

# Ethernet's rates are in its names (IEEE 802.3); InfiniBand's, for four lanes, in its Trade Association's roadmap.
NETWORKS: Mapping[str, float] = {
    **{f"{rate}gbe": float(rate) for rate in ("1", "2.5", "10", "25", "40", "50", "100", "200", "400")},
    "ib-edr": 100,
    "ib-hdr": 200,
    "ib-ndr": 400,
    "ib-xdr": 800,
}
"""Gbit/s that a node's network card sends, at line rate."""

T = TypeVar("T")


def _named(what: str, known: Mapping[str, T], name: str) -> T:
    if name in known:
        return known[name]
    hint = f"{asked} " if (asked := did_you_mean(name, known)) else ""
    raise ValueError(f"{what} {name!r} is not in the catalog; {hint}allowed are {', '.join(known)}, or give numbers")


# ---- hardware
#
# Figures of a cluster by the names of its hardware, where no numbers are given. GPUs and the links inside a machine are
# taken to reach a share of their peaks; networks count at line rate.

UTILIZATION = 0.4
"""Share of its peak FLOP/s at which a GPU computes a layer of a transformer."""
OF_A_LINK = 0.5
"""Share of a link's peak that an all-gather reaches. With 26 MiB, it reaches 196 to 200 of 450 GB/s over NVLink
between two H200s (hops-2x2-* in benchmarks/step/results/hops-h200.json)."""
SLOWEST_NVLINK = OF_A_LINK * LINKS["nvlink-bridge"]
"""Gbit/s that collectives reach over the slowest NVLink; slower links are taken for PCIe or the host's memory."""
LAUNCH_MS = 5.0
"""Milliseconds in which a CPU launches forward and backward of one unit in eager mode. CPUs of H100 and H200 machines
take 5.6 to 9.7, waits included, for a layer of a 1.35B Llama (benchmarks/step/results/1.35B-*.json)."""


def named_figures(gpu: str | None, link: str | None, net: str | None) -> dict[str, Any]:
    """Return the figures of named hardware. All but ``launch_ms`` have the name of the argument that overrides them.

    In ``net``, the number of a node's network cards may precede their name: ``8xib-ndr``.
    """
    figures: dict[str, Any] = {}
    if gpu is not None:
        memory, tflops, usual = _named("gpu", GPUS, gpu)
        figures |= {"gpu_memory": memory, "tflops": UTILIZATION * tflops, "launch_ms": LAUNCH_MS}
        link = usual if link is None else link
    if link is not None:
        gbps = _named("link", LINKS, link)
        figures |= {"intra_gbps": OF_A_LINK * gbps, "slow_links": not link.startswith("nvlink")}
    if net is not None:
        several = re.fullmatch(r"([1-9]\d*)x(.+)", net)
        cards, card = several.groups() if several else (1, net)
        figures["inter_gbps"] = int(cards) * _named("net", NETWORKS, card)
    return figures


# ---- measurements

DEFAULT_MIB = 256
REPETITIONS = 7


@dataclass(frozen=True)
class Bandwidth:
    """Measured bandwidths of a :class:`Cluster`, the same on every rank; None for a hop that has no other rank."""

    nodes: int
    gpus_per_node: int
    inter_gbps: float | None
    intra_gbps: float | None


def measure_bandwidth(
    group: dist.ProcessGroup, gpus_per_node: int | None = None, mib: float = DEFAULT_MIB
) -> Bandwidth:
    """Time all-gathers between nodes and inside them. Collective over ``group``.

    All ranks take part at once, so the inter-node figure is that of a node's whole network. Each all-gather leaves
    ``mib`` MiB on a rank, and its time is that of the slowest rank. The first all-gather is a warm-up. The result uses
    the median of the others.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is out of range, or the layout is not possible.
    """
    nbytes = int(positive("mib", mib) * 2**20)
    # Launched node sizes may differ, so that only some ranks raise.
    topology = agree(group, lambda: topology_of(group, gpus_per_node), str, "found another layout than")
    mesh = mesh_on(group, topology)

    def gbps(subgroup: dist.ProcessGroup | None, level: Level, senders: int) -> float | None:
        traffic = Traffic()
        hop = hop_over(subgroup, "gather", level, traffic)
        if hop is None:
            return None
        # Each rank contributes an equal part of the gathered bytes.
        seconds = _median_seconds(hop, group, max(1, nbytes // hop.size))
        sent = traffic.sent["gather", level] / (REPETITIONS + 1)  # traffic includes the warm-up
        return senders * sent * 8 / seconds / 1e9

    return Bandwidth(
        topology.nodes,
        topology.gpus_per_node,
        inter_gbps=gbps(mesh.inter, "inter", topology.gpus_per_node),
        intra_gbps=gbps(mesh.intra, "intra", 1),
    )


def links_are_slow(group: dist.ProcessGroup, measured: Bandwidth | None) -> bool | None:
    """Return whether the links inside a node are slow. Collective over ``group``.

    This is read from the machine, as in training, or else judged from ``measured``; None if neither is known.
    """
    links = find_links(group)
    if links is not None:
        return links.are_slow
    if measured is None:
        return None
    return measured.intra_gbps is not None and measured.intra_gbps < SLOWEST_NVLINK


def world() -> dist.ProcessGroup:
    """Return the group of all ranks; raise ValueError if none is initialized."""
    if dist.group.WORLD is None:
        raise ValueError("no process group is initialized; call torch.distributed.init_process_group first")
    return dist.group.WORLD


def _median_seconds(hop: Hop, group: dist.ProcessGroup, nbytes: int) -> float:
    """Return the seconds of an all-gather of ``nbytes`` per rank: the slowest rank's, as a median of repetitions."""
    # A group may have several backends, such as "cpu:gloo,cuda:nccl".
    on_gpu = "nccl" in dist.get_backend(group)
    device = torch.device("cuda" if on_gpu else "cpu")
    payload = torch.zeros((1, nbytes), dtype=torch.uint8, device=device)
    times = torch.empty(REPETITIONS + 1, dtype=torch.float64, device=device)
    for repetition in range(REPETITIONS + 1):
        # All ranks start together, so that no rank's time includes its wait for another to start.
        dist.barrier(group)
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        hop.all_gather(payload, "bandwidth")
        if on_gpu:
            torch.cuda.synchronize()
        times[repetition] = time.perf_counter() - start
    # All ranks need the same figures, or they might choose different strategies.
    dist.all_reduce(times, dist.ReduceOp.MAX, group)
    return median(times[1:].tolist())
