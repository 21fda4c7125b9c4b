"""``choose_strategy``: the strategy for a given model on the cluster of the running job."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_zpp.collectives.agreement import agree, check_agreement
from fsdp_zpp.collectives.mesh import topology_of
from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.config.topology import Topology

from .bandwidth import links_are_slow, measure_bandwidth, world
from .config import GIB, whole
from .host_link import measure_host_link
from .model_size import ModelSize, module_size
from .plan import plan


def choose_strategy(
    model: nn.Module,
    *,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    inter_gbps: float | None = None,
    intra_gbps: float | None = None,
    gpu_memory: float | None = None,
    slow_links: bool | None = None,
    **options: Any,
) -> Strategy:
    """Return the strategy that :func:`plan` chooses; for one of torch's, that which does the same here.

    Without codecs among the options, presets with their codecs are compared with torch's strategies.

    If a process group is initialized, all ranks must call this with the same arguments; they get the same strategy.

    Args:
        model: The model, not wrapped yet. Its trainable and frozen parameters are counted layer by layer.
        nodes: Number of nodes. None takes it from the running job.
        gpus_per_node: GPUs of each node. None takes it from the running job.
        inter_gbps: Gbit/s of a whole node to the others. None measures it with all-gathers over the running job.
        intra_gbps: Gbit/s of one GPU to the others of its node. None measures it likewise.
        gpu_memory: GiB of a GPU. None asks the GPUs; without GPUs there is no limit.
        slow_links: Whether the links inside a node are slow, as in ``plan``. None asks the machine, or
            the measurement if it does not say, unless ``gpus_per_node`` or hardware is named: a node size that is given
            stays.
        **options: The other options of ``plan``: codecs, ``micro_batches``, ``gpu``, ``tp``, ``activations``, ... Names
            of hardware replace measurements. With ``cpu_offload``, ``host_gbps`` is measured on GPUs unless it or
            ``gpu`` is given. With experts on ranks of their own, the result is the strategy of the
            other parameters; ``plan`` has both.

    Raises:
        ValueError: If nothing fits, an argument is out of range, or one is missing and no process group is initialized.
        TypeError: If an argument has the wrong type.
    """
    group = dist.group.WORLD
    named = options.get("gpu") is not None or options.get("link") is not None
    asks_machine = gpus_per_node is None and slow_links is None and not named
    size, nodes, gpus_per_node = agree(group, lambda: _on_what(model, nodes, gpus_per_node))
    unknown_inter = inter_gbps is None and nodes > 1 and options.get("net") is None
    unknown_intra = intra_gbps is None and gpus_per_node > 1 and not named
    facts: dict[str, object] = {"nodes": nodes, "gpus_per_node": gpus_per_node}
    # Each of these decides on a collective.
    facts |= {"measured inter_gbps": unknown_inter, "measured intra_gbps": unknown_intra}
    facts |= {"links asked of the machine": asks_machine, "memory of the GPU": gpu_memory is None}
    unknown_host = bool(options.get("cpu_offload")) and options.get("host_gbps") is None and options.get("gpu") is None
    facts["measured host_gbps"] = unknown_host
    check_agreement(group, "choose_strategy", facts)
    if group is not None:
        measured = measure_bandwidth(group, gpus_per_node) if unknown_inter or unknown_intra else None
        if measured is not None:
            inter_gbps = measured.inter_gbps if unknown_inter else inter_gbps
            intra_gbps = measured.intra_gbps if unknown_intra else intra_gbps
        if asks_machine:
            slow_links = links_are_slow(group, measured if unknown_intra else None)
    on: dict[str, Any] = {"nodes": nodes, "gpus_per_node": gpus_per_node, "slow_links": slow_links}
    on |= {"inter_gbps": inter_gbps, "intra_gbps": intra_gbps}
    on["gpu_memory"] = device_memory() if gpu_memory is None else gpu_memory
    if unknown_host:
        options["host_gbps"] = measure_host_link()
    agreed = agree(group, lambda: plan(size, **on, **options))
    if agreed.choice is None:
        raise ValueError(agreed.reason)
    return agreed.choice.strategy


def _on_what(model: nn.Module, nodes: int | None, gpus_per_node: int | None) -> tuple[ModelSize, int, int]:
    """Return the size of ``model``, and the numbers of nodes and of GPUs of each, given or from the running job."""
    size = module_size(model)
    running = _running(gpus_per_node) if nodes is None or gpus_per_node is None else None
    if running is not None:
        gpus_per_node = running.gpus_per_node
        nodes = running.nodes if nodes is None else nodes
    if nodes is None or gpus_per_node is None:
        raise ValueError(
            f"got nodes={nodes} and gpus_per_node={gpus_per_node}, and no process group is initialized to take them "
            "from; pass both, or call torch.distributed.init_process_group first"
        )
    return size, whole("nodes", nodes), whole("gpus_per_node", gpus_per_node)


def device_memory() -> float | None:
    """Return the GiB of the current GPU, or of the smallest GPU of the running job; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    memory = torch.tensor(float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory))
    if dist.is_initialized():
        # All ranks need the same figure, or they might choose different strategies.
        memory = memory.to("cuda" if "nccl" in dist.get_backend() else "cpu")
        dist.all_reduce(memory, dist.ReduceOp.MIN)
    return memory.item() / GIB


def _running(gpus_per_node: int | None) -> Topology | None:
    return topology_of(world(), gpus_per_node) if dist.is_initialized() else None
