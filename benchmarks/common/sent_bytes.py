"""Bytes that torch's own collectives send: those of FULL_SHARD by count, and those of DTensors by watching them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

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


_GATHERS, _REDUCES = "all_gather_into_tensor", "all_reduce"
_SCATTERS = ("reduce_scatter_tensor", "all_to_all_single")


@dataclass(frozen=True)
class Collective:
    """One collective of this rank.

    Args:
        name: Name of the operator, such as ``all_gather_into_tensor``.
        nbytes: Bytes of this rank's input.
        nodes: Nodes that have ranks in it.
        ranks: Ranks in it.
    """

    name: str
    nbytes: int
    nodes: int
    ranks: int

    @property
    def hop(self) -> str:
        """Return ``inter`` if it crosses between nodes, ``intra`` if it does not."""
        return "inter" if self.nodes > 1 else "intra"

    @property
    def sent(self) -> dict[str, float]:
        """Return the fewest bytes that a rank can send, by hop: what goes to a node goes once, and is passed on inside.

        Raises:
            NotImplementedError: If it is none whose bytes are known.
        """
        chunk = self.nbytes / self.ranks  # what a rank ends up with
        if self.name == _GATHERS:
            chunk, times = self.nbytes, 1
        elif self.name in (_REDUCES, *_SCATTERS):
            times = 2 if self.name == _REDUCES else 1
        else:
            raise NotImplementedError(f"the bytes of {self.name} are unknown")
        inside = self.ranks // self.nodes
        return {"inter": times * chunk * (self.nodes - 1), "intra": times * chunk * self.nodes * (inside - 1)}


class DTensorCollectives(TorchDispatchMode):
    """Lists the collectives of DTensors while it is entered.

    Args:
        gpus_per_node: Consecutive ranks that form a node.
    """

    def __init__(self, gpus_per_node: int) -> None:
        super().__init__()
        self.made: list[Collective] = []
        self._gpus_per_node = gpus_per_node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # until torch has taken it apart
        if func.namespace in ("c10d_functional", "_c10d_functional") and isinstance(args[-1], str):
            ranks = dist.get_process_group_ranks(_resolve_process_group(args[-1]))  # type: ignore[arg-type]
            nodes = {rank // self._gpus_per_node for rank in ranks}
            if len(ranks) > 1:
                self.made.append(Collective(func.__name__.partition(".")[0], args[0].nbytes, len(nodes), len(ranks)))
        return func(*args, **(kwargs or {}))

    @property
    def sent(self) -> dict[str, float]:
        """Return the bytes of all of them, by hop."""
        return {hop: sum(collective.sent[hop] for collective in self.made) for hop in ("inter", "intra")}
