"""The two-hop all-gather of weights.

    optimizer's shard       full precision, 1 / world of the unit, on this rank
        | encode            once; with Int4Delta, after a step, the change against what the receivers hold
    payload                 uint8 [1, nbytes]
        | inter-node hop    all-gather among the ranks with this local index
    secondary shard         uint8 [nodes, nbytes]; parameter scope I keeps it until the weights change
        | intra-node hop    all-gather among the ranks of this node
    gathered payload        uint8 [world, nbytes], by local index, then node
        | decode            one kernel, which restores the order of ranks
    unsharded parameters    in the dtype to compute in; scope N keeps them until the weights change

secondary_shard.py has the way down to the secondary shard, and prefetch.py makes it for all units of a model ahead of
their use. This file has the rest.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from fsdp_zpp.codecs.base import Codec, FullPrecision

from .hops import Traffic, decode, hop_over
from .mesh import ProcessMesh
from .prefetch import SecondaryShardPrefetcher
from .secondary_shard import SecondaryShard


class WeightGather:
    """All-gathers one flat shard over a mesh in two hops.

    Args:
        mesh: The ranks.
        codec: Encodes the weights for both hops; None sends them in the dtype of the output. For an
            :class:`Int4Delta` see the top of delta.py.
        keep_secondary: Keep the secondary shard from one call to the next, until it is marked stale.
        traffic: Where bytes are counted.
        label: Names the unit in profiles and errors.

    Attributes:
        secondary: What the inter-node hop leaves on this rank.
        prefetcher: Makes the secondary shards of several units; None if each is made when it is needed.
    """

    def __init__(
        self,
        mesh: ProcessMesh,
        codec: Codec | None,
        keep_secondary: bool,
        traffic: Traffic,
        label: str = "unit",
    ) -> None:
        inter = hop_over(mesh.inter, "gather", "inter", traffic)
        own_node = mesh.rank // mesh.topology.gpus_per_node
        self.secondary = SecondaryShard(inter, own_node, codec, keep_secondary, label)
        self.prefetcher: SecondaryShardPrefetcher | None = None
        topology = mesh.topology
        self._world, self._nodes, self._gpus = topology.world, topology.nodes, topology.gpus_per_node
        self._intra = hop_over(mesh.intra, "gather", "intra", traffic)

    @property
    def label(self) -> str:
        """The unit's name in profiles and errors."""
        return self.secondary.label

    @label.setter
    def label(self, label: str) -> None:
        self.secondary.label = label

    @torch.no_grad()
    def __call__(self, shard: Tensor | None, out: Tensor, version: Hashable = None) -> None:
        """Gather every rank's ``shard`` into ``out``.

        Args:
            shard: This rank's full-precision values, flat [numel], the same numel on every rank; None has them read
                from the secondary shard's source, if they are needed.
            out: Flat [world * numel], in any float dtype; chunk i receives rank i's shard.
            version: Identifies the state of the shard; compared while the secondary shard is reused.

        Raises:
            ValueError: If the sizes do not fit, before any communication.
            StaleSecondaryError: If the secondary shard is reused but ``version`` has changed.
        """
        secondary, codec = self.secondary, self.secondary.codec or FullPrecision(out.dtype)
        if shard is not None:
            self._check_sizes(shard, out)
        if secondary.is_fresh(codec):
            secondary.check_version(version)
        else:
            if shard is None:
                assert secondary.source is not None
                shard = secondary.source.full_precision_shard()
            # A side stream may read ``shard``, which was allocated in this one. That is safe without record_stream, for
            # read() below has this stream wait for the encoding before ``shard`` is freed.
            if self.prefetcher is None:
                secondary.refresh(shard, codec, version)
            else:
                self.prefetcher.refresh(secondary, shard, codec, version)
        payload = secondary.read()
        if self._intra is not None:
            payload = self._intra.all_gather(payload, secondary.label)
        # Rows come by local index, then node; decoding transposes that grid to the order of ranks.
        decode(codec, payload, out, self._gpus, self._nodes, secondary.label)

    def _check_sizes(self, shard: Tensor, out: Tensor) -> None:
        if out.numel() != self._world * shard.numel():
            raise ValueError(
                f"{self.label}: a gather of {shard.numel()} values over {self._world} ranks needs an output "
                f"of {self._world * shard.numel()} values, got {out.numel()}"
            )
