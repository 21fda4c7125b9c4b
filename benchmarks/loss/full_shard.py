"""Bytes that torch's FULL_SHARD sends, which torch does not count."""

from __future__ import annotations

import torch
from torch import nn

from fsdp_zpp import plan
from fsdp_zpp.planner.model_size import module_size


def full_shard_sends(
    model: nn.Module, nodes: int, gpus_per_node: int, dtype: torch.dtype, micro_batches: int = 1
) -> dict[str, int]:
    """Return the bytes that one rank has to send in a step of FULL_SHARD, by hop.

    FULL_SHARD accumulates whole gradients under ``no_sync``, which is what the planner calls GNG. It counts two hops: a
    shard goes once to each other node, and is passed on inside. A flat ring, as NCCL may choose it, sends more.

    Args:
        model: Model before it is sharded.
        nodes: Number of nodes.
        gpus_per_node: Ranks of each.
        dtype: Dtype of weights and gradients on the wire.
        micro_batches: Micro-batches of a step.
    """
    planned = plan(
        module_size(model),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        inter_gbps=1,  # any: bytes are asked for, not seconds
        intra_gbps=1,
        micro_batches=micro_batches,
        compute=dtype,
        reduce=dtype,
    )
    volume = planned["GNG"].volume
    return {"inter": volume.inter, "intra": volume.intra}
