"""Hops of a gradient reduction: all-to-alls whose sums are made locally, in fp32.

quantize -> intra-node all-to-all -> decode, sum -> quantize -> inter-node all-to-all -> decode, sum.
A value is rounded once a hop however many ranks there are, where a ring would round it at every rank; and the
slow network carries each partial sum once, all GPUs of a node using it in parallel (ZeRO++, arXiv 2306.10209,
section 3.3). A level with one rank has no hop, and its codec is not applied.

The optimizer scope says which part of the sums a rank needs: its chunk of all ranks' (``G``), all that its local
index has summed (``I``), or everything (``N``). A coarser part than the two hops leave is gathered back over the
same hops, encoded, and every rank decodes the same bytes: replicas stay equal bit for bit.

A reduction comes in two parts, ``start()`` up to the inter-node hop and :meth:`PendingReduction.finish`.

The result is the mean over all ranks. The one division is made on the fp32 sums of the intra-node hop, before they
are encoded again: in fp16 a sum may overflow where the mean does not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_zpp.codecs.base import Codec, FullPrecision, full_precision

from .error_buffer import ErrorBuffer
from .error_state import ErrorFeedbackState
from .exact_places import ExactPlaces, PlacesInChunks
from .flat_layout import FlatLayout
from .held_errors import Extent
from .hops import Hop, PendingHop, PendingReduction, decode, decode_sum, decode_sum_encode, encode, log_launched
from .mesh import ProcessMesh
from .streams import keep_until_read


class _Done(PendingReduction):
    def finish(self) -> None:
        """Do nothing, for nothing is left to do."""


DONE = _Done()


class TwoHopReduce(ABC):
    """Base of the two ways to reduce.

    Args:
        mesh: The ranks.
        hops: The intra-node and the inter-node hop; None for a level that has one rank.
        codecs: The codecs of both hops; None sends the dtype of the gradient.
        errors: The errors that are fed back, if any.
        label: Names the unit in profiles and errors.
        optimizer_scope: See the top of this file.
        native: Whether a single hop without a codec is torch's own reduce-scatter.

    Attributes:
        layout: Where parameters lie in the gradient that is being reduced; None if that is neither known nor changes.
        idle: The names of parameters that this rank has not used.
    """

    def __init__(
        self,
        mesh: ProcessMesh,
        hops: tuple[Hop | None, Hop | None],
        codecs: tuple[Codec | None, Codec | None],
        errors: ErrorFeedbackState | None,
        label: str,
        optimizer_scope: str,
        native: bool,
    ) -> None:
        self.label = label
        self._errors = errors
        topology, self._rank = mesh.topology, mesh.rank
        self._nodes, self._gpus = topology.nodes, topology.gpus_per_node
        self._mean = 1.0 / topology.world  # the factor that makes a mean of a sum over all ranks
        # Chunks in each rank's part of the intra-node hop: one for each node if the inter-node hop scatters it further.
        self._chunks = self._nodes if optimizer_scope == "G" else 1
        self._intra, self._inter = hops
        self._intra_codec, self._inter_codec = codecs
        self._optimizer_scope, self._native = optimizer_scope, native
        self._places = PlacesInChunks(mesh, [*codecs, None if errors is None else errors.codec])
        self.layout: FlatLayout | None = None
        self.idle: Collection[str] = ()

    @abstractmethod
    def start(
        self,
        gradient: Tensor,
        accumulated: Tensor | None,
        out: Tensor,
        factor: float,
        wire_dtype: torch.dtype | None = None,
    ) -> PendingReduction:
        """Reduce up to the inter-node hop.

        Args:
            gradient: Flat, contiguous; a part for each rank that shares it.
            accumulated: The fp32 sums of earlier micro-batches in this node, which the inter-node hop is to add.
            out: Receives this rank's part of the mean, times ``factor``.
            factor: Applied in fp32, with the last sum.
            wire_dtype: The dtype in which hops without a codec send; None is the gradient's.
        """

    def reduce_intra_node(self, gradient: Tensor, wire_dtype: torch.dtype | None = None) -> Tensor:
        """Return this node's share of the fp32 mean of this local index's part, flat."""
        if self._intra is None:
            return gradient.float() * self._mean
        codec, received = self._exchange_intra_node(gradient, wire_dtype)
        part = gradient.numel() // self._gpus
        sums = torch.empty(part, dtype=torch.float32, device=gradient.device)
        decode_sum(
            codec, received, sums, received.shape[1], self._mean, self.label, self._exact_in_sums(part, sums.device)
        )
        return sums

    def _exchange_intra_node(self, gradient: Tensor, wire_dtype: torch.dtype | None) -> tuple[Codec, Tensor]:
        """Make the intra-node hop; return the codec, and the ranks' payloads: uint8 [gpus, chunks, nbytes]."""
        assert self._intra is not None
        codec = self._intra_codec or full_precision(wire_dtype or gradient.dtype)
        chunks, gpus = self._chunks, self._gpus
        numel = gradient.shape[0] // (chunks * gpus)
        errors = None
        if self._errors is not None:
            starts = [(node * gpus + local) * numel for local in range(gpus) for node in range(chunks)]
            errors = self._errors_of("intra", starts, numel, gradient.device)
        payload = encode(codec, gradient, chunks, gpus, self.label, errors, self._exact(numel, gradient.device))
        return codec, self._intra.all_to_all(payload, self.label).view(gpus, chunks, -1)

    @abstractmethod
    def _exact(self, numel: int, device: torch.device) -> ExactPlaces | None:
        """Return the places of small values in a gradient with ``numel`` values in a chunk."""

    @abstractmethod
    def _exact_in_sums(self, part: int, device: torch.device) -> ExactPlaces | None:
        """Return the places of small values in the ``part`` values of this local index."""

    def _errors_of(self, hop: str, starts: Sequence[int], numel: int, device: torch.device) -> ErrorBuffer | None:
        """Return the errors of what is sent, if they are fed back; the arguments are those of an :class:`Extent`."""
        buffer = None if self._errors is None else self._errors.buffer(hop)
        if self._errors is None or buffer is None:
            return None
        return buffer.prepare(Extent(numel, tuple(starts), self.layout), device, self.idle)


class TwoHopReduceScatter(TwoHopReduce):
    """Reduces to a chunk on each rank: optimizer scope ``G``."""

    _settled_for: tuple[FlatLayout | None, int, torch.device] | None = None
    _settled: tuple[ExactPlaces | None, ...] = (None, None, None)

    def start(
        self,
        gradient: Tensor,
        accumulated: Tensor | None,
        out: Tensor,
        factor: float,
        wire_dtype: torch.dtype | None = None,
    ) -> PendingReduction:
        if self._inter is None:
            self._reduce_one_level(gradient, wire_dtype, out, factor)
            log_launched(self.label)
            return DONE
        codec, numel = self._inter_codec or full_precision(wire_dtype or gradient.dtype), out.numel()
        errors = None if self._errors is None else self._inter_errors(out)
        _, exact, own = self._exact_of_hops(numel, out.device)
        if accumulated is not None:
            sums = self.reduce_intra_node(gradient, wire_dtype).add_(accumulated)
            payload = encode(codec, sums, 1, self._nodes, self.label, errors, exact)
        elif self._intra is None:
            payload = encode(codec, gradient, 1, self._nodes, self.label, errors, exact)
            factor *= self._mean  # there was no intra-node sum to apply the mean to
        else:
            intra_codec, received = self._exchange_intra_node(gradient, wire_dtype)
            payload = decode_sum_encode(intra_codec, received, numel, codec, self._mean, self.label, errors, exact)
        return PendingHop(self._inter, codec, payload, out, factor, self.label, own)

    def _exact_of_hops(self, numel: int, device: torch.device) -> tuple[ExactPlaces | None, ...]:
        """Return the places of small values in the chunks of all ranks, of the inter-node hop, and of this rank."""
        layout, settled = self.layout, self._settled_for
        if settled is None or settled[0] is not layout or settled[1:] != (numel, device):
            self._settled_for = layout, numel, device
            places = (self._places.of_all_ranks, self._places.of_own_local_index, self._places.of_own_rank)
            self._settled = tuple(of(layout, numel, device) for of in places)
        return self._settled

    def _exact(self, numel: int, device: torch.device) -> ExactPlaces | None:
        return self._exact_of_hops(numel, device)[0]

    def _exact_in_sums(self, part: int, device: torch.device) -> ExactPlaces | None:
        return self._places.of_own_local_index(self.layout, part // self._nodes, device)

    def _inter_errors(self, out: Tensor) -> ErrorBuffer | None:
        numel, local = out.numel(), self._rank % self._gpus
        starts = [(node * self._gpus + local) * numel for node in range(self._nodes)]
        return self._errors_of("inter", starts, numel, out.device)

    def _reduce_one_level(self, gradient: Tensor, wire_dtype: torch.dtype | None, out: Tensor, factor: float) -> None:
        if self._intra is None:
            torch.mul(gradient, factor, out=out)
        elif self._native:
            self._reduce_natively(gradient, out, self._mean * factor)
        else:
            codec, received = self._exchange_intra_node(gradient, wire_dtype)
            own = self._exact_of_hops(out.numel(), out.device)[2]
            decode_sum(codec, received, out, 1, self._mean * factor, self.label, own)

    def _reduce_natively(self, gradient: Tensor, out: Tensor, factor: float) -> None:
        assert self._intra is not None
        # In fp16 a sum may overflow where the mean does not.
        scale_first = gradient.dtype == torch.float16 and factor < 1
        sums = out if out.dtype == gradient.dtype else torch.empty_like(out, dtype=gradient.dtype)
        self._intra.reduce_scatter(gradient * factor if scale_first else gradient, sums, self.label)
        if sums is not out:
            out.copy_(sums)
        if not scale_first and factor != 1:
            out.mul_(factor)


class TwoHopAllReduce(TwoHopReduce):
    """Reduces to replicas: optimizer scope ``I``, where ranks of a local index are alike, or ``N``, where all are."""

    def start(
        self,
        gradient: Tensor,
        accumulated: Tensor | None,
        out: Tensor,
        factor: float,
        wire_dtype: torch.dtype | None = None,
    ) -> PendingReduction:
        wire_dtype = wire_dtype or gradient.dtype
        sums = self.reduce_intra_node(_padded(gradient, -gradient.numel() % self._gpus), wire_dtype)
        if accumulated is not None:
            sums.add_(accumulated)
        return _PendingAllReduce(self, sums, full_precision(wire_dtype), out, factor)

    def all_reduce_inter_node(self, sums: Tensor, wire_codec: FullPrecision, out: Tensor, factor: float) -> None:
        """Sum the nodes' sums, and write the whole result to ``out`` on every replica."""
        nodes, part = self._nodes, keep_until_read(sums).numel()  # made in the stream of the intra-node hop
        chunk = -(-part // nodes)  # a collective takes chunks of one size, so the last one is padded
        codec, payload = self._sum_inter_node(_padded(sums, chunk * nodes - part), part, wire_codec, factor)
        of_all = self._optimizer_scope == "N" and self._intra is not None
        if of_all and self._intra is not None:
            payload = self._intra.all_gather(payload, self.label)
        decoded = torch.empty(payload.shape[0] * chunk, dtype=out.dtype, device=out.device)
        exact = self._places.of_nodes(self.layout, part, chunk, "all" if of_all else "part", out.device)
        decode(codec, payload, decoded, 1, payload.shape[0], self.label, exact)
        out.copy_(decoded.view(-1, nodes * chunk)[:, :part].reshape(-1)[: out.numel()])

    def _exact(self, numel: int, device: torch.device) -> ExactPlaces | None:
        return self._places.of_parts(self.layout, numel, device)

    def _exact_in_sums(self, part: int, device: torch.device) -> ExactPlaces | None:
        return self._places.of_own_part(self.layout, part, device)

    def _sum_inter_node(
        self, sums: Tensor, part: int, wire_codec: FullPrecision, factor: float
    ) -> tuple[Codec, Tensor]:
        """Sum over nodes; return the codec, and the encoded sums of all nodes' chunks: uint8 [nodes, nbytes].

        Args:
            sums: The node's sums of this local index's part of the gradient, padded.
            part: Its number of values without padding.
            wire_codec: Encodes if the hop has no codec.
            factor: Applied with the last sum.
        """
        start, device = self._places.part_starts(self.layout, part)[self._rank % self._gpus], sums.device
        nodes, chunk = self._nodes, sums.numel() // self._nodes
        own = self._places.of_nodes(self.layout, part, chunk, "own", device)
        if self._inter is None:
            codec = self._intra_codec or wire_codec
            errors = self._errors_of("back", [start], chunk, device)
            return codec, encode(codec, sums.mul_(factor), 1, 1, self.label, errors, own)
        codec = self._inter_codec or wire_codec
        starts = [start + node * chunk for node in range(nodes)]
        errors = self._errors_of("inter", starts, chunk, device)
        exact = self._places.of_nodes(self.layout, part, chunk, "part", device)
        received = self._inter.all_to_all(encode(codec, sums, 1, nodes, self.label, errors, exact), self.label)
        errors = self._errors_of("back", [starts[self._rank // self._gpus]], chunk, device)
        payload = decode_sum_encode(codec, received.unsqueeze(1), chunk, codec, factor, self.label, errors, own)
        return codec, self._inter.all_gather(payload, self.label)


@dataclass(slots=True)
class _PendingAllReduce(PendingReduction):
    reduce: TwoHopAllReduce
    sums: Tensor
    wire_codec: FullPrecision
    out: Tensor
    factor: float

    def finish(self) -> None:
        self.reduce.all_reduce_inter_node(self.sums, self.wire_codec, self.out, self.factor)
        log_launched(self.reduce.label)


def _padded(values: Tensor, padding: int) -> Tensor:
    return F.pad(values, (0, padding)) if padding else values  # pad() copies even where there is nothing to add
