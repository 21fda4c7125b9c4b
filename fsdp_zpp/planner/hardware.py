"""Figures of a cluster by the names of its hardware, where no numbers are given.

Peaks are discounted: a GPU of the catalog is taken to compute at :data:`UTILIZATION` of its peak, and collectives to
reach :data:`OF_A_LINK` of a link inside a machine. The CPU is taken to need :data:`LAUNCH_MS` to launch a unit.
"""

from __future__ import annotations

from dataclasses import dataclass

from .catalog import gpu_named, link_named, network_named
from .config import Cluster, MemoryBudget, Offload, StepConfig, positive

UTILIZATION = 0.4
"""Share of its peak FLOP/s at which a GPU computes a layer of a transformer, unless ``utilization`` is given."""
OF_A_LINK = 0.5
"""Share of a link's peak that an all-gather reaches: over NVLink between two H200s, of 26 MiB, 196 to 200 of 450 GB/s
(benchmarks/step/results/hops-2x2-*.json)."""
SLOWEST_NVLINK = OF_A_LINK * link_named("nvlink-bridge").gbps
"""Gbit/s that collectives reach over the slowest NVLink; what is slower is taken for PCIe or the host's memory."""
LAUNCH_MS = 5.0
"""Milliseconds in which a CPU launches forward and backward of one unit in eager mode: of the 25 units of a Llama of
1.35B under fully_shard, 141 to 243 ms on the CPUs of H100 and H200 machines (benchmarks/step/results/1.35B-*.json)."""
OF_HOST_LINK = 0.8
"""Share of PCI Express's peak that copies from and to pinned memory reach, not measured here."""
OPTIMIZER_GBS = 200.0
"""GB/s at which the CPUs of a node read and write memory in the optimizer's step: half of the peak of two sockets with
eight channels of DDR4-3200 each (AMD EPYC 7002 data sheet: 204.8 GB/s a socket), not measured here."""


@dataclass(frozen=True)
class Hardware:
    """Hardware by its names in the catalog.

    Args:
        gpu: Name of the GPU: its memory, its FLOP/s, and the link that it usually has.
        link: Name of the link between the GPUs of a node; None takes the GPU's usual one.
        net: Name of the network between nodes.
        utilization: Share of the GPU's peak at which it computes; None takes :data:`UTILIZATION`.

    Raises:
        ValueError: If a name is not in the catalog, or ``utilization`` is not above 0 and at most 1 or has no ``gpu``.
        TypeError: If ``utilization`` is not a number.
    """

    gpu: str | None = None
    link: str | None = None
    net: str | None = None
    utilization: float | None = None

    def __post_init__(self) -> None:
        for name, lookup in (("gpu", gpu_named), ("link", link_named), ("net", network_named)):
            if (value := getattr(self, name)) is not None:
                lookup(value)
        if self.utilization is None:
            return
        if positive("utilization", self.utilization) > 1:
            raise ValueError(f"utilization is a share of the GPU's peak, above 0 and up to 1, got {self.utilization}")
        if self.gpu is None:
            raise ValueError(f"utilization={self.utilization} is a share of a GPU's peak; name the gpu, or give tflops")

    def cluster(
        self,
        nodes: int,
        gpus_per_node: int,
        inter_gbps: float | None,
        intra_gbps: float | None,
        slow_links: bool | None = None,
    ) -> Cluster:
        """Return the cluster; numbers that are given override names.

        Args:
            nodes: Number of nodes.
            gpus_per_node: GPUs of each.
            inter_gbps: Gbit/s out of a node.
            intra_gbps: Gbit/s of a GPU inside.
            slow_links: Whether the links inside a node are slow; None asks the link's name.
        """
        name = self.link or (None if self.gpu is None else gpu_named(self.gpu).link)
        if name is not None:
            link = link_named(name)
            intra_gbps = OF_A_LINK * link.gbps if intra_gbps is None else intra_gbps
            slow_links = not link.fast if slow_links is None else slow_links
        if inter_gbps is None and self.net is not None:
            inter_gbps = network_named(self.net).gbps
        return Cluster(nodes, gpus_per_node, inter_gbps, intra_gbps, bool(slow_links))

    def work(self, micro_batches: int, tokens: int | None, tflops: float | None, launch_ms: float | None) -> StepConfig:
        """Return the work of a step; numbers that are given override names."""
        if self.gpu is not None and tokens is not None:
            # Numbers say more than a name: who gives TFLOP/s may have measured them.
            share = UTILIZATION if self.utilization is None else self.utilization
            tflops = share * gpu_named(self.gpu).tflops if tflops is None else tflops
            launch_ms = LAUNCH_MS if launch_ms is None else launch_ms
        return StepConfig(micro_batches, tokens, tflops, 0.0 if launch_ms is None else launch_ms)

    def budget(
        self, gpu_memory: float | None, activations: float, reserve: float, offload: Offload | None = None
    ) -> MemoryBudget:
        """Return the memory of a GPU; a number that is given overrides the GPU's."""
        if gpu_memory is None and self.gpu is not None:
            gpu_memory = gpu_named(self.gpu).memory
        return MemoryBudget(gpu_memory, activations, reserve, offload)

    def offload(
        self, asked: bool, host_gbps: float | None, host_memory: float | None, optimizer_gbs: float | None
    ) -> Offload | None:
        """Return the host that parameters are offloaded to; numbers that are given override names.

        Args:
            asked: Whether they are to be offloaded.
            host_gbps: Gbit/s of a GPU's copies from and to the host.
            host_memory: GiB of a node's host.
            optimizer_gbs: GB/s of a node's CPUs in the optimizer's step.

        Raises:
            TypeError: If ``asked`` is not a bool, or a number is none.
            ValueError: If nothing tells ``host_gbps``, or a number is given though nothing is offloaded.
        """
        if not isinstance(asked, bool):
            raise TypeError(f"cpu_offload must be True or False, got {asked!r}")
        given = {"host_gbps": host_gbps, "host_memory": host_memory, "optimizer_gbs": optimizer_gbs}
        if not asked:
            named = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
            if named:
                raise ValueError(
                    f"{named} is about CPU offload; pass cpu_offload=True (--cpu-offload), too, or remove it"
                )
            return None
        assumed = tuple(name for name in ("host_gbps", "optimizer_gbs") if given[name] is None)
        if host_gbps is None and self.gpu is not None:
            host_gbps = OF_HOST_LINK * link_named(gpu_named(self.gpu).host).gbps
        if host_gbps is None:
            raise ValueError(
                "host_gbps is missing: Gbit/s at which a GPU copies from the host's memory; name the gpu, or give it"
            )
        return Offload(host_gbps, OPTIMIZER_GBS if optimizer_gbs is None else optimizer_gbs, host_memory, assumed)
