"""Inputs of a plan: the cluster, the work of a step, the memory of a GPU, and the dtypes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fsdp_zpp.config.topology import Topology

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
        slow_links: Whether the GPUs of a node have no NVLink, so that codecs pay between them, too.

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
        object.__setattr__(self, "nodes", whole("nodes", self.nodes))
        object.__setattr__(self, "gpus_per_node", whole("gpus_per_node", self.gpus_per_node))
        _check_bandwidth("inter_gbps", self.inter_gbps, self.nodes, "nodes, so a node's Gbit/s to the others", "--net")
        _check_bandwidth(
            "intra_gbps",
            self.intra_gbps,
            self.gpus_per_node,
            "GPUs a node, so a GPU's Gbit/s inside it",
            "--gpu, --link",
        )

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
        launch_ms: Milliseconds in which the CPU launches forward and backward of one unit; 0 leaves it out.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is out of range, or only one of ``tokens`` and ``tflops`` is given.
    """

    micro_batches: int = 1
    tokens: int | None = None
    tflops: float | None = None
    launch_ms: float = 0.0

    def __post_init__(self) -> None:
        not_negative("launch_ms", self.launch_ms)
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
class Offload:
    """Host to which parameters, gradients and optimizer state are offloaded.

    Args:
        gbps: Gbit/s that one GPU copies from the host's memory, or to it, one direction at a time.
        optimizer_gbs: GB/s (10**9 bytes) at which the CPUs of a node read and write memory in the optimizer's step, for
            all GPUs of the node together.
        memory: GiB of a node's host that its trainings may take, for all GPUs of the node; None sets no limit.
        assumed: Which of ``host_gbps`` and ``optimizer_gbs`` nobody has given or measured, for the report.

    Raises:
        TypeError: If a figure is not a number.
        ValueError: If an argument is out of range.
    """

    gbps: float
    optimizer_gbs: float
    memory: float | None = None
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        positive("host_gbps", self.gbps)
        positive("optimizer_gbs", self.optimizer_gbs)
        if self.memory is not None:
            positive("host_memory", self.memory)

    def allows(self, nbytes: int) -> bool:
        """Return whether ``nbytes`` bytes fit in a node's host memory."""
        return self.memory is None or nbytes <= self.memory * GIB


@dataclass(frozen=True)
class MemoryBudget:
    """Memory of one GPU, in GiB (2**30 bytes), and where the rest goes.

    GPUs are named after GB but have GiB: an A100-80GB holds 80 GiB, of which torch sees 79.2.

    Args:
        gpu_memory: Memory of the GPU; None sets no limit.
        activations: Memory of the activations that the model keeps for backward.
        reserve: Memory that no tensor can use: the CUDA context, NCCL's buffers, the allocator's gaps.
        offload: The host that shards, their gradients and optimizer state are on; None keeps them on the GPU.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is out of range.
    """

    gpu_memory: float | None = None
    activations: float = 2.0
    reserve: float = 2.0
    offload: Offload | None = None

    def __post_init__(self) -> None:
        if self.gpu_memory is not None:
            positive("gpu_memory", self.gpu_memory)
        not_negative("activations", self.activations)
        not_negative("reserve", self.reserve)

    def allows(self, nbytes: int) -> bool:
        """Return whether ``nbytes`` bytes fit on the GPU."""
        return self.gpu_memory is None or nbytes <= self.gpu_memory * GIB

    def host_allows(self, nbytes: int) -> bool:
        """Return whether ``nbytes`` bytes fit in a node's host memory; nothing else is known to be there."""
        return self.offload is None or self.offload.allows(nbytes)


@dataclass(frozen=True)
class Precision:
    """Dtypes of a training with mixed precision.

    Args:
        compute: Dtype of the weights in forward and backward, and on the wire without a codec.
        reduce: Dtype of the gradients on the wire without a codec.
        storage: Dtype of the shards that the optimizer updates.
        frozen_storage: Dtype of the shards of frozen weights; None takes ``storage``.
        optimizer_bytes: Bytes of optimizer state per trainable element; 8 is Adam in fp32.
        accumulation: Dtype in which gradients of several micro-batches accumulate.

    Raises:
        TypeError: If a dtype is not a ``torch.dtype``, or ``optimizer_bytes`` is not a number.
        ValueError: If a dtype is not one that a strategy takes, or ``optimizer_bytes`` is negative.
    """

    compute: torch.dtype = torch.bfloat16
    reduce: torch.dtype = torch.bfloat16
    storage: torch.dtype = torch.float32
    frozen_storage: torch.dtype | None = None
    optimizer_bytes: int = 8
    accumulation: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in ("compute", "reduce", "storage", "frozen_storage", "accumulation"):
            self._check_dtype(name, getattr(self, name))
        object.__setattr__(self, "optimizer_bytes", whole("optimizer_bytes", self.optimizer_bytes, least=0))

    def _check_dtype(self, name: str, dtype: object) -> None:
        if name == "frozen_storage" and dtype is None:
            return
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{name} must be a torch.dtype, got {dtype!r}")
        if dtype not in DTYPES.values():
            raise ValueError(f"{name} must be one of {', '.join(map(str, DTYPES.values()))}, got {dtype}")


def whole(name: str, value: float, least: int = 1) -> int:
    """Return ``value`` as an int; it may be a float such as ``70e9`` without a fraction.

    Raises:
        TypeError: If ``value`` is not a number.
        ValueError: If ``value`` has a fraction, is not finite, or is less than ``least``.
    """
    number = _number(name, value)
    if not number.is_integer() or number < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return int(value)


def positive(name: str, value: float) -> float:
    """Return ``value``, which must be a finite number above 0; raise like :func:`whole`."""
    if _number(name, value) <= 0:
        raise ValueError(f"{name} must be above 0, got {value!r}")
    return value


def not_negative(name: str, value: float) -> float:
    """Return ``value``, which must be a finite number of at least 0; raise like :func:`whole`."""
    if _number(name, value) < 0:
        raise ValueError(f"{name} must be at least 0, got {value!r}")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):  # Python counts bool as an int
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value!r}")
    return float(value)
