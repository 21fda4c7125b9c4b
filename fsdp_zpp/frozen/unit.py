"""Frozen weights that are gathered together: one payload, one collective a hop.

[Note: Frozen units]
A unit is the frozen weights of one transformer block, or whatever FSDP wraps as one. This rank's chunks of all of them
lie side by side in one row of bytes, the *payload shard*; a gather makes a row of each chunk. Under the letter ``I``
nodes hold the same, so only the hop inside the node is there. Under ``G`` the first gather crosses nodes, and what it
leaves, the *secondary shard*, replaces the payload shard, of which it is a superset: frozen weights never get stale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..hop import Traffic, hop_over
from .placement import Placement
from .residency import Residency
from .weight import FrozenWeight, out_of_inference_mode


class FrozenUnit:
    """The payload shard of some weights. Takes them over from where they are held.

    Args:
        label: Names the unit in profiles.
        weights: The weights, of one placement.
        traffic: Where bytes are counted.
        residency: Which units are gathered.
    """

    def __init__(self, label: str, weights: list[FrozenWeight], traffic: Traffic, residency: Residency) -> None:
        self.label, self.weights = label, weights
        self.placement: Placement = weights[0].placement
        mesh, letter = self.placement.mesh, self.placement.letter
        self._inter = hop_over(mesh.inter if letter == "G" else None, "gather", "inter", traffic)
        self._intra = hop_over(mesh.intra if letter != "N" else None, "gather", "intra", traffic)
        self._residency = residency
        self._crossed = False
        self._starts: dict[FrozenWeight, int] = {}
        self.row_nbytes = 0
        for weight in weights:
            self._starts[weight] = self.row_nbytes
            self.row_nbytes += weight.row_nbytes
        self._shard = torch.cat([weight.held.row_of(weight).to(weights[0].device) for weight in weights]).view(1, -1)
        for weight in weights:
            weight.held = self

    @property
    def device(self) -> torch.device:
        """Where the payload shard is."""
        return self._shard.device

    @property
    def nbytes(self) -> int:
        """Bytes that this rank keeps of the unit."""
        return self._shard.nbytes

    @property
    def gathered_shape(self) -> tuple[int, int]:
        """The shape of the gathered payload: a row for each chunk."""
        return self.placement.chunks, self.row_nbytes

    def move(self, device: torch.device) -> None:
        """Keep the payload shard on another device."""
        self._residency.forget(self)
        self._shard = self._shard.to(device)

    def row_of(self, weight: FrozenWeight) -> Tensor:
        """This rank's chunk of a weight."""
        start = self._starts[weight]
        row = self._shard[
            self.placement.mesh.rank // self.placement.mesh.topology.gpus_per_node if self._crossed else 0
        ]
        return row[start : start + weight.row_nbytes]

    def rows_of(self, weight: FrozenWeight, device: torch.device) -> Tensor:
        """All chunks of a weight, uint8 [chunks, nbytes], where the computation is. Collective.

        They are valid until another unit is asked for its.
        """
        with out_of_inference_mode():
            if self._shard.is_cpu and device.type != "cpu":
                self.move(device)  # with the model, in a way that its modules were not told of, as FSDP does it
            self._cross_nodes()
            gathered = self._shard if self._intra is None else self._residency.demand(self)
        start = self._starts[weight]
        return gathered[:, start : start + weight.row_nbytes]

    def gather(self, out: Tensor) -> None:
        """Gather the payload into ``out``, uint8 of the gathered shape. Collective."""
        assert self._intra is not None
        self._intra.all_gather(self._shard, self.label, out)

    def _cross_nodes(self) -> None:
        """Under the letter G, at the first gather: replace the payload shard by the secondary shard."""
        if self._inter is not None and not self._crossed:
            self._shard = self._inter.all_gather(self._shard, self.label)
            self._crossed = True
