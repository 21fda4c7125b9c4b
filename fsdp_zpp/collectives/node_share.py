"""This rank's share of weights that every rank of a node holds; each exchanges its own with other nodes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .devices import for_collectives
from .hops import Hop, Traffic
from .mesh import ProcessMesh


class NodeShare:
    """Splits replicated tensors over the ranks of a node, and puts them together again.

    Args:
        node: The ranks of this node, of which there are several.
        traffic: Where bytes are counted.
    """

    def __init__(self, node: ProcessMesh, traffic: Traffic) -> None:
        assert node.intra is not None
        self._ranks, self._local = node.topology.world, node.rank
        self._hop = Hop(node.intra, "gather", "intra", traffic)

    def of(self, whole: Sequence[Tensor]) -> list[Tensor]:
        """Return 1-D views of this rank's part of each contiguous tensor; parts may be empty."""
        return [self._part(tensor.view(-1)) for tensor in whole]

    @torch.no_grad()
    def gather(self, whole: Sequence[Tensor], label: str) -> None:
        """Gather the parts of all ranks of the node into each rank's tensors. Collective over the node.

        Args:
            whole: The tensors.
            label: Names them in profiles.
        """
        for flat in (tensor.view(-1) for tensor in whole):
            own = flat.new_zeros(1, self._part_numel(flat))  # a collective takes parts of one size
            part = self._part(flat)
            own[0, : part.numel()] = part
            gathered = self._hop.all_gather(for_collectives(own, self._hop.group), label)  # they may be offloaded
            flat.copy_(gathered.view(-1)[: flat.numel()])

    def _part_numel(self, flat: Tensor) -> int:
        return -(-flat.numel() // self._ranks)

    def _part(self, flat: Tensor) -> Tensor:
        first = min(self._local * self._part_numel(flat), flat.numel())
        return flat[first : first + self._part_numel(flat)]
