"""Frozen weights that are gathered together: one payload, one collective a hop.

A unit is the frozen weights of one transformer block, or of whatever FSDP wraps as one. This rank's chunks of all of
them lie side by side in one row of bytes, the *payload shard*; a gather returns one such row for each rank. Under the
scope ``I`` all nodes hold the same, so there is only the intra-node hop. Under ``G`` the first gather crosses nodes.
What that leaves, the *secondary shard*, contains the payload shard and replaces it for good, since frozen weights never
get stale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp_zpp.collectives.hops import Hop, Traffic, hop_over

from .double_buffer import DoubleBuffer
from .weight import FrozenWeight, out_of_inference_mode


class FrozenUnit:
    """A payload shard of some weights, which it takes over from their holders.

    Args:
        label: Names the unit in profiles.
        weights: The weights, of one placement.
        traffic: Counts the bytes sent.
        buffers: The memory that units of the base are gathered into.
    """

    def __init__(self, label: str, weights: list[FrozenWeight], traffic: Traffic, buffers: DoubleBuffer) -> None:
        self.label, self.weights = label, weights
        self.placement = weights[0].placement
        mesh, scope = self.placement.mesh, self.placement.scope
        self._inter = hop_over(mesh.inter if scope == "G" else None, "gather", "inter", traffic)
        self._intra = hop_over(mesh.intra if scope != "N" else None, "gather", "intra", traffic)
        self._buffers = buffers
        self._crossed = False
        self._places = {weight: place for place, weight in enumerate(weights)}
        self._nbytes = [weight.local_nbytes for weight in weights]
        self.local_nbytes = sum(self._nbytes)
        # To one device, since a model may have been moved in part. The chunks' own memory goes with their holders.
        chunks = [weight.holder.local_payload(weight).to(weights[0].device) for weight in weights]
        self._hold(torch.cat(chunks).view(1, -1))
        for weight in weights:
            weight.holder = self

    @property
    def device(self) -> torch.device:
        """Return the device that the payload shard is on."""
        return self._shard.device

    @property
    def nbytes(self) -> int:
        """Return how many bytes this rank keeps of the unit."""
        return self._shard.nbytes

    @property
    def gathered_shape(self) -> tuple[int, int]:
        """Return the shape of the gathered payload: a row of bytes for each chunk."""
        return self.placement.chunks, self.local_nbytes

    def move(self, device: torch.device) -> None:
        """Move the payload shard to another device."""
        self._buffers.drop(self)  # what they have gathered is on the old device
        with out_of_inference_mode():  # they outlive the forward that a move may be part of
            self._hold(self._shard.to(device))

    def local_payload(self, weight: FrozenWeight) -> Tensor:
        """Return this rank's chunk of a weight, uint8 [local_nbytes]; a view of the payload shard."""
        # A secondary shard has a row from each node; this rank's own is that of its node.
        node = self.placement.mesh.rank // self.placement.mesh.topology.gpus_per_node if self._crossed else 0
        return self._held[self._places[weight]][node]

    def gathered_payload(self, weight: FrozenWeight, device: torch.device) -> Tensor:
        """Return all chunks of a weight, uint8 [chunks, local_nbytes], on the device that computes. Collective.

        They are valid until the payload of another unit is asked for.
        """
        if self._shard.is_cpu and device.type != "cpu":
            # FSDP moves a model to its device past Module._apply, so nothing has moved the codes with it.
            self.move(device)
        if self._inter is not None and not self._crossed:
            self._cross_nodes(self._inter)
        parts = self._held if self._intra is None else self._buffers.get(self)
        return parts[self._places[weight]]

    def split(self, gathered: Tensor) -> Sequence[Tensor]:
        """Return the part of each weight in rows of the payload: views, uint8 [rows, local_nbytes of the weight]."""
        return gathered.split(self._nbytes, dim=1)

    def gather(self, out: Tensor) -> None:
        """Gather the payload over the intra-node hop into ``out``, uint8 of the gathered shape. Collective."""
        assert self._intra is not None
        self._intra.all_gather(self._shard, self.label, out)

    def _cross_nodes(self, inter: Hop) -> None:
        """Replace the payload shard by the secondary shard, under the scope G, at the first gather."""
        with out_of_inference_mode():  # it outlives the forward
            self._hold(inter.all_gather(self._shard, self.label))
        self._crossed = True

    def _hold(self, shard: Tensor) -> None:
        """Hold another tensor as the payload shard, or as the secondary shard."""
        self._shard, self._held = shard, self.split(shard)
        for codec in {weight.codec for weight in self.weights}:
            codec.prepare_decode(shard.device)
