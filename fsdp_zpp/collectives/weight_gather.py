"""Two-hop all-gather of weights.

    optimizer's shard       full precision, 1 / world of the unit, on this rank
        | encode            once; with Int4Delta, after a step, the change against what the receivers hold
    payload                 uint8 [1, nbytes]
        | inter-node hop    all-gather among the ranks with this local index
    secondary shard         uint8 [nodes, nbytes]; parameter scope I keeps it until the weights change
        | intra-node hop    all-gather among the ranks of this node
    gathered payload        uint8 [world, nbytes], by local index, then node
        | decode            one kernel, which restores the order of ranks
    unsharded parameters    in the dtype to compute in; scope N keeps them until the weights change

inter_node_gather.py has the way down to the secondary shard, and prefetch.py makes it for all units of a model ahead of
their use. This file has the rest.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_zpp.codecs.base import Codec, full_precision

from .exact_places import ExactPlaces, PlacesInChunks
from .flat_layout import FlatLayout
from .hops import Traffic, decode, hop_over
from .inter_node_gather import StaleShard, gather_inter_node
from .mesh import ProcessMesh
from .prefetch import SecondaryShardPrefetcher
from .secondary_shard import SecondaryShard, ShardValues


class _Settled(NamedTuple):
    """Facts that gathers into outputs of one shape, dtype and device have in common.

    Attributes:
        of: The shape, the dtype and the device.
        codec: Encodes the weights.
        sent_as: The same codec, with room for small values.
        exact: The places of small values in an output.
    """

    of: tuple[torch.Size, torch.dtype, torch.device]
    codec: Codec
    sent_as: Codec
    exact: ExactPlaces | None


class WeightGather:
    """All-gathers one flat shard over a mesh in two hops.

    Args:
        mesh: The ranks.
        codec: Encodes the weights for both hops; None sends them in the dtype of the output. For an
            :class:`Int4Delta` see the top of delta.py.
        keep_secondary: Whether to keep the secondary shard from one call to the next, until it is marked stale.
        traffic: Where bytes are counted.
        label: Names the unit in profiles and errors.

    Attributes:
        group: The ranks that gather; None if this one is alone.
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
        self._intra = hop_over(mesh.intra, "gather", "intra", traffic)
        self.group = mesh.group
        own_node = mesh.rank // mesh.topology.gpus_per_node
        self.secondary = SecondaryShard(inter, own_node, codec, keep_secondary, label)
        self.prefetcher: SecondaryShardPrefetcher | None = None
        topology = mesh.topology
        self._world, self._nodes, self._gpus = topology.world, topology.nodes, topology.gpus_per_node
        self._places = PlacesInChunks(mesh, [codec])
        self.secondary.find_exact = self._find_exact
        self._settled: _Settled | None = None

    @property
    def label(self) -> str:
        """Return the unit's name in profiles and errors."""
        return self.secondary.label

    @label.setter
    def label(self, label: str) -> None:
        self.secondary.label = label

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
        if shard is not None:
            self._check_sizes(shard, out)
        settled = self._settled
        if settled is None or settled.of != (out.shape, out.dtype, out.device):
            settled = self._settle(out)
        secondary, values = self.secondary, None
        if secondary.encoded_by is settled.sent_as:
            secondary.check_version(version)
        else:
            values = self._values(shard, version)
            if self.prefetcher is None:
                gather_inter_node([StaleShard(secondary, settled.sent_as, values)])
            else:
                self.prefetcher.refresh(secondary, settled.sent_as, values)
        payload = secondary.read()
        # A side stream may have read ``values``, which were allocated in this one. To free them is safe without
        # record_stream by now, for read() has this stream wait for the encoding.
        del values
        if self._intra is not None:
            payload = self._intra.all_gather(payload, secondary.label)
        # Rows come by local index, then node; decoding transposes that grid to the order of ranks.
        decode(settled.codec, payload, out, self._gpus, self._nodes, secondary.label, settled.exact)

    def _settle(self, out: Tensor) -> _Settled:
        numel, device = out.numel() // self._world, out.device
        codec = self.secondary.codec or full_precision(out.dtype)
        exact = None if codec.is_lossless else self._places.of_all_ranks(self._layout(numel), numel, device)
        sent_as = self.secondary.sent_as(codec, numel, device)
        self._settled = _Settled((out.shape, out.dtype, device), codec, sent_as, exact)
        return self._settled

    def _find_exact(self, numel: int, device: torch.device) -> ExactPlaces | None:
        return self._places.of_own_rank(self._layout(numel), numel, device)

    def _layout(self, numel: int) -> FlatLayout | None:
        source = self.secondary.source
        return None if source is None else source.layout(numel * self._world)

    def _values(self, shard: Tensor | None, version: Hashable) -> ShardValues:
        source = self.secondary.source
        if shard is not None:
            return ShardValues([shard], shard.numel(), version, source is None or source.is_trained())
        assert source is not None
        return source.read()

    def _check_sizes(self, shard: Tensor, out: Tensor) -> None:
        if out.numel() != self._world * shard.numel():
            raise ValueError(
                f"{self.label}: a gather of {shard.numel()} values over {self._world} ranks needs an output "
                f"of {self._world * shard.numel()} values, got {out.numel()}"
            )
