"""Two-hop reduction of gradients, and the sums that micro-batches accumulate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_zpp.codecs import Codec, FullPrecision, full_precision
from fsdp_zpp.strategy.error_feedback import LoCo, error_buffer_specs, error_nbytes
from fsdp_zpp.strategy.local_steps import LocalSteps
from fsdp_zpp.strategy.strategy import ResolvedStrategy

from .error_feedback import ErrorBuffer, ErrorFeedbackState
from .flat_layout import ExactPlaces, Extent, FlatLayout, boundaries_of, exact_places, keep_recent
from .hops import (
    Hop,
    Traffic,
    decode,
    decode_sum,
    decode_sum_encode,
    encode,
    exchange_and_sum,
    hop_over,
    keep_until_read,
    label_of,
    log_launched,
    record_event,
    wait_for,
)
from .mesh import ProcessMesh

# ---- accumulated gradient


class AccumulatedGradient:
    """Accumulated gradient of one unit, in fp32, reduced over the ranks that the gradient scope names.

    Sums belong to parameters, and the next micro-batch may use other parameters; see [Note: Identity] in
    flat_layout.py. Calls may come from several streams: each waits for the sums of the call before.
    """

    def __init__(self) -> None:
        self.sums: Tensor | None = None
        self.names: frozenset[str] = frozenset()
        self._layout: FlatLayout | None = None
        self._complete: torch.cuda.Event | None = None

    def drop(self) -> None:
        self._set(None, None)

    def _set(self, sums: Tensor | None, layout: FlatLayout | None) -> None:
        self.sums, self._layout = sums, layout
        self.names = frozenset() if layout is None else layout.names
        self._complete = None if sums is None else record_event(sums)

    def _wait_for(self, sums: Tensor) -> Tensor:
        wait_for(self._complete, sums.device)
        return keep_until_read(sums)

    def add(self, part: Tensor, layout: FlatLayout | None) -> None:
        """Add a micro-batch's fp32 ``part``, whole chunks of ``layout``; this object may keep ``part`` and write to it.

        If ``layout`` is fixed or None, all parts have the same layout.
        """
        if layout is not None and layout.is_fixed:
            layout = None
        if self.sums is None:
            self._set(part, layout)
            return
        sums = self._wait_for(self.sums)
        if layout is None or self._layout is None or layout == self._layout:
            self._set(sums.add_(part), self._layout)
            return
        both = self._layout | layout
        self._set(self._layout.translate(sums, both).add_(layout.translate(part, both)), both)

    def take(self, layout: FlatLayout | None, divided_by: float = 1.0) -> Tensor | None:
        """Drop the sums; return them divided, in ``layout``, which must have their parameters; None without sums."""
        if self.sums is None:
            return None
        sums, accumulated_layout = self._wait_for(self.sums), self._layout
        self.drop()
        if layout is not None and accumulated_layout is not None:
            assert accumulated_layout.names <= layout.names, "gradients of earlier micro-batches would be lost"
            sums = accumulated_layout.translate(sums, layout)
        return sums if divided_by == 1.0 else sums.div_(divided_by)


# ---- arriving gradients
#
# Optimizer steps inside a backward, each delayed until its gradients have arrived on the CPU.
#
# With offloaded parameters, a gradient is copied to the host's memory, and an optimizer there must wait for the copy.
# If it waited at once, the CPU would launch nothing meanwhile, and GPU and CPU would take turns. So a unit's optimizers
# step only when the backward is :data:`UNITS_BEHIND` units ahead: the GPU then has those units to compute while the CPU
# waits for the copy and steps. The remaining units step at the end of the backward.
#
# Optimizers may communicate, so all ranks must step in the same order. A fixed number of units ensures this order; a
# test of whether a copy has arrived would not, since ranks may get different answers.

UNITS_BEHIND = 2
"""Units that a backward is ahead of the optimizers' steps: one whose copy is on its way, and one that the GPU
computes."""


class ArrivingGradients:
    def __init__(self) -> None:
        self.waiting: deque[tuple[torch.Event | torch.cuda.Event | None, Callable[[], None]]] = deque()

    def step_on_arrival(self, event: torch.Event | torch.cuda.Event | None, step: Callable[[], None]) -> None:
        """Queue a step whose gradients arrive at ``event``, and make the steps that are due."""
        self.waiting.append((event, step))
        while len(self.waiting) > UNITS_BEHIND:
            self._step()

    def step_all(self) -> None:
        while self.waiting:
            self._step()

    def drop(self) -> None:
        self.waiting.clear()

    def _step(self) -> None:
        event, step = self.waiting.popleft()
        if event is not None:
            event.synchronize()
        step()


# ---- two hop reduce
#
# Hops of a gradient reduction: all-to-alls whose sums are made locally, in fp32.
#
# quantize -> intra-node all-to-all -> decode, sum -> quantize -> inter-node all-to-all -> decode, sum.
# Each hop rounds a value once, however many ranks there are; a ring would round it at every rank. The slow network
# carries each partial sum once, and all GPUs of a node use it in parallel (ZeRO++, arXiv 2306.10209, section 3.3). A
# hop over a single rank is left out, together with its codec.
#
# The optimizer scope says which sums a rank needs: only its own chunk (``G``), the chunks of all ranks with its local
# index (``I``), or all chunks (``N``). The two hops leave a rank its own chunk. For ``I`` and ``N`` the chunks are then
# encoded and gathered back over the same hops. Every rank decodes the same bytes, so replicas stay equal bit for bit.
#
# A reduction has two parts: ``start()`` makes the intra-node hop, and returns a function that makes the rest.
# While the slow network is busy with one unit's sums, the fast network can reduce the next unit.
#
# The result is the mean over all ranks. The fp32 sums of the intra-node hop are divided by the number of ranks before
# they are encoded again: in fp16 a sum may overflow where the mean does not.

PendingReduction = Callable[[], None]
"""Makes the inter-node hop in the current stream, which must have waited for the stream that started the reduction."""


def done() -> None:
    """Do nothing, in place of a function that makes an inter-node hop."""


class Chunks(NamedTuple):
    """Chunks of a gradient or of its sums; ``exact`` are the places in them of values that codecs leave as they are."""

    extent: Extent
    exact: ExactPlaces | None


class HopChunks(NamedTuple):
    """Chunks of all hops of a reduction.

    Attributes:
        intra: The chunks of the gradient, which the intra-node hop encodes.
        sums: The sums that the intra-node hop leaves on this rank.
        inter: The chunks of these sums, which the inter-node hop encodes.
        own: The chunk that the inter-node hop leaves on this rank.
        gathered: The chunks that are gathered back.
    """

    intra: Chunks
    sums: Chunks
    inter: Chunks
    own: Chunks
    gathered: Chunks


class TwoHopReduce(ABC):
    """Base of reduce-scatter and all-reduce. ``hops`` are the intra-node and the inter-node hop; None if left out.

    Attributes:
        layout: Layout of the gradient that is being reduced; None if it is unknown or never changes.
        idle: The names of parameters that this rank has not used in the step.
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
        topology = mesh.topology
        self._nodes, self._gpus = topology.nodes, topology.gpus_per_node
        self._node, self._local = divmod(mesh.rank, self._gpus)
        self._mean = 1.0 / topology.world  # this factor turns a sum over all ranks into their mean
        # Chunks in each rank's part of the intra-node hop: one for each node if the inter-node hop scatters the part.
        self._rows = self._nodes if optimizer_scope == "G" else 1
        self._intra, self._inter = hops
        self._intra_codec, self._inter_codec = codecs
        self._optimizer_scope, self._native = optimizer_scope, native
        used = [codec for codec, hop in zip(codecs, hops, strict=True) if hop is not None]
        self._rounded_by = *used, None if errors is None else errors.codec
        self._mixes_values = any(codec is not None and codec.mixes_values for codec in used)
        self._known: dict[tuple[int, int, torch.device], HopChunks] = {}  # by layout id, size and device
        self.layout: FlatLayout | None = None
        self.idle: Collection[str] = ()

    @abstractmethod
    def start(
        self, gradient: Tensor, accumulated: Tensor | None, out: Tensor, factor: float, wire_dtype: torch.dtype
    ) -> PendingReduction:
        """Reduce up to the inter-node hop; write this rank's part of the mean, times ``factor``, to ``out``.

        Args:
            gradient: Flat and contiguous, as in :meth:`GradientReduce.start`.
            accumulated: The fp32 sums of earlier micro-batches over this node, added before the inter-node hop.
            wire_dtype: The dtype in which hops without a codec send.
        """

    def reduce_intra_node(self, gradient: Tensor, wire_dtype: torch.dtype) -> Tensor:
        """Return the node's sums, times 1 / world, for the part that this rank's local index reduces: fp32, flat."""
        if self._intra is None:
            return gradient.float() * self._mean
        chunks = self.chunks_of(gradient)
        codec, received = self._exchange_intra_node(gradient, chunks.intra, wire_dtype)
        sums = torch.empty(gradient.numel() // self._gpus, dtype=torch.float32, device=gradient.device)
        decode_sum(codec, received, sums, received.shape[1], self._mean, self.label, chunks.sums.exact)
        return sums

    def _exchange_intra_node(self, gradient: Tensor, chunks: Chunks, wire_dtype: torch.dtype) -> tuple[Codec, Tensor]:
        """Make the intra-node hop; return the codec, and the ranks' payloads: uint8 [gpus, chunks, nbytes]."""
        assert self._intra is not None
        codec = self._intra_codec or full_precision(wire_dtype)
        errors = None if self._errors is None else self._errors_of("intra", chunks, gradient.device)
        payload = encode(codec, gradient, self._rows, self._gpus, self.label, errors, chunks.exact)
        return codec, self._intra.all_to_all(payload, self.label).view(self._gpus, self._rows, -1)

    def chunks_of(self, gradient: Tensor) -> HopChunks:
        layout, numel, device = self.layout, gradient.shape[0], gradient.device
        chunks = self._known.get((id(layout), numel, device))  # the chunks refer to the layout, so no other gets its id
        if chunks is None:
            chunks = keep_recent(self._known, (id(layout), numel, device), self._make_chunks(numel, device))
        return chunks

    @abstractmethod
    def _make_chunks(self, numel: int, device: torch.device) -> HopChunks: ...

    def _chunks(
        self, numel: int, starts: Iterable[int], of_all: Iterable[int], device: torch.device, *, in_place: bool = False
    ) -> Chunks:
        """Return chunks of ``numel`` values; they lie one after another or, if ``in_place``, at ``starts``."""
        layout, exact = self.layout, None
        extent = Extent(numel, tuple(starts), layout)
        if layout is not None:
            boundaries = boundaries_of(layout, self._rounded_by) if layout.boundaries or self._mixes_values else []
            if layout.exact or boundaries:
                at = extent.starts if in_place else None
                exact = exact_places(extent, boundaries, of_all, device, at)
        return Chunks(extent, exact)

    def _errors_of(self, hop: str, chunks: Chunks, device: torch.device) -> ErrorBuffer | None:
        buffer = None if self._errors is None else self._errors.buffer(hop)
        return None if buffer is None else buffer.prepare(chunks.extent, device, self.idle)


class TwoHopReduceScatter(TwoHopReduce):
    def start(
        self, gradient: Tensor, accumulated: Tensor | None, out: Tensor, factor: float, wire_dtype: torch.dtype
    ) -> PendingReduction:
        if self._inter is None:
            self._reduce_one_level(gradient, wire_dtype, out, factor)
            log_launched(self.label)
            return done
        codec, numel = self._inter_codec or full_precision(wire_dtype), out.numel()
        chunks = self.chunks_of(gradient)
        errors = None if self._errors is None else self._errors_of("inter", chunks.inter, out.device)
        exact = chunks.inter.exact
        if accumulated is not None:
            sums = self.reduce_intra_node(gradient, wire_dtype).add_(accumulated)
            payload = encode(codec, sums, 1, self._nodes, self.label, errors, exact)
        elif self._intra is None:
            payload = encode(codec, gradient, 1, self._nodes, self.label, errors, exact)
            factor *= self._mean  # without an intra-node hop, nothing has applied it
        else:
            intra_codec, received = self._exchange_intra_node(gradient, chunks.intra, wire_dtype)
            payload = decode_sum_encode(intra_codec, received, numel, codec, self._mean, self.label, errors, exact)
        return partial(exchange_and_sum, self._inter, codec, payload, out, factor, self.label, chunks.own.exact)

    def _make_chunks(self, numel: int, device: torch.device) -> HopChunks:
        nodes, gpus = range(self._nodes), range(self._gpus)
        chunk = numel // (self._nodes * self._gpus)
        # Hops exchange chunks in this order: by local index, then by node.
        of_all = [(node * self._gpus + local) * chunk for local in gpus for node in nodes]
        of_index = [(node * self._gpus + self._local) * chunk for node in nodes]
        index = self._chunks(chunk, of_index, of_all, device)
        own = self._chunks(chunk, [of_index[self._node]], of_all, device)
        return HopChunks(self._chunks(chunk, of_all, of_all, device, in_place=True), index, index, own, own)

    def _reduce_one_level(self, gradient: Tensor, wire_dtype: torch.dtype, out: Tensor, factor: float) -> None:
        if self._intra is None:
            torch.mul(gradient, factor, out=out)
        elif self._native:
            self._reduce_natively(gradient, out, self._mean * factor)
        else:
            chunks = self.chunks_of(gradient)
            codec, received = self._exchange_intra_node(gradient, chunks.intra, wire_dtype)
            decode_sum(codec, received, out, 1, self._mean * factor, self.label, chunks.own.exact)

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
    """Reduces to replicas: with optimizer scope ``I`` one on each node, sharded in it; with ``N`` one on each rank."""

    def start(
        self, gradient: Tensor, accumulated: Tensor | None, out: Tensor, factor: float, wire_dtype: torch.dtype
    ) -> PendingReduction:
        gradient = _padded(gradient, -gradient.numel() % self._gpus)
        sums = self.reduce_intra_node(gradient, wire_dtype)
        if accumulated is not None:
            sums.add_(accumulated)
        chunks = self.chunks_of(gradient)
        return partial(self._all_reduce_inter_node, sums, chunks, full_precision(wire_dtype), out, factor)

    def _all_reduce_inter_node(
        self, sums: Tensor, chunks: HopChunks, wire_codec: FullPrecision, out: Tensor, factor: float
    ) -> None:
        nodes, part = self._nodes, keep_until_read(sums).numel()  # made in the stream of the intra-node hop
        chunk = chunks.own.extent.numel  # a collective takes chunks of one size, so the last one is padded
        codec, payload = self._sum_inter_node(_padded(sums, chunk * nodes - part), chunks, wire_codec, factor)
        if self._optimizer_scope == "N" and self._intra is not None:
            payload = self._intra.all_gather(payload, self.label)
        decoded = torch.empty(payload.shape[0] * chunk, dtype=out.dtype, device=out.device)
        decode(codec, payload, decoded, 1, payload.shape[0], self.label, chunks.gathered.exact)
        out.copy_(decoded.view(-1, nodes * chunk)[:, :part].reshape(-1)[: out.numel()])
        log_launched(self.label)

    def _make_chunks(self, numel: int, device: torch.device) -> HopChunks:
        nodes, part = range(self._nodes), numel // self._gpus
        chunk = -(-part // self._nodes)
        # The layout covers either one part, and is the same for every part, or all parts one after another.
        step = 0 if self.layout is None or self.layout.numel == part else part
        parts = [local * step for local in range(self._gpus)]
        own_part = parts[self._local]
        of_all = [start + node * chunk for start in parts for node in nodes]
        of_part = [own_part + node * chunk for node in nodes]
        inter = self._chunks(chunk, of_part, of_all, device)
        return HopChunks(
            intra=self._chunks(part, [local * part for local in range(self._gpus)], parts, device),
            sums=self._chunks(part, [own_part], parts, device),
            inter=inter,
            own=self._chunks(chunk, [of_part[self._node]], of_all, device),
            gathered=self._chunks(chunk, of_all, of_all, device) if self._optimizer_scope == "N" else inter,
        )

    def _sum_inter_node(
        self, sums: Tensor, chunks: HopChunks, wire_codec: FullPrecision, factor: float
    ) -> tuple[Codec, Tensor]:
        """Sum over nodes; return the codec, and the encoded sums of all nodes' chunks: uint8 [nodes, nbytes]."""
        own, device = chunks.own, sums.device
        if self._inter is None:
            codec = self._intra_codec or wire_codec
            errors = self._errors_of("back", own, device)
            return codec, encode(codec, sums.mul_(factor), 1, 1, self.label, errors, own.exact)
        codec = self._inter_codec or wire_codec
        errors = self._errors_of("inter", chunks.inter, device)
        payload = encode(codec, sums, 1, self._nodes, self.label, errors, chunks.inter.exact)
        received = self._inter.all_to_all(payload, self.label).unsqueeze(1)
        errors = self._errors_of("back", own, device)
        numel = own.extent.numel
        payload = decode_sum_encode(codec, received, numel, codec, factor, self.label, errors, own.exact)
        return codec, self._inter.all_gather(payload, self.label)


def _padded(values: Tensor, padding: int) -> Tensor:
    return F.pad(values, (0, padding)) if padding else values  # pad() copies even where there is nothing to add


# ---- gradient reduce
#
#     unsharded gradient      [world * numel], in its own dtype, of one micro-batch
#         | intra-node hop    encode, all-to-all among the ranks of this node, decode and sum in fp32, times 1 / world
#     sums of the node        fp32; gradient scope I accumulates micro-batches here, N above, G below
#         | inter-node hop    encode, all-to-all among the ranks with this local index, decode and sum in fp32
#     mean over all ranks     this rank's chunk
#         | gathered back     optimizer scopes I and N only: encoded, over the same hops, to all ranks with a replica
#     optimizer's gradient
#
# ``TwoHopReduce`` makes the hops; this section handles what happens between micro-batches.
#
# [Note: What a micro-batch reduces]
# The gradient scope names the ranks over which all micro-batches of a step but the last reduce: ``N`` this rank alone,
# ``I`` the node, ``G`` all ranks. These sums accumulate in fp32, whatever the dtype of the parameters, and the last
# micro-batch makes the remaining hops, once (PaRO, arXiv 2310.06003, section 3.2). So with ``I`` the traffic
# between nodes does not depend on the number of micro-batches.


class GradientReduce:
    """Reduces one flat gradient over a mesh: each rank gets the mean of its part.

    Args:
        intra_codec: Encodes the gradients for the intra-node hop; None sends them in their own dtype.
        inter_codec: Encodes the partial sums for the inter-node hop; None sends them in the gradients' dtype.
        label: The unit's name in profiles and errors.
        gradient_scope: Ranks over which all micro-batches but the last reduce; see [Note: What a micro-batch reduces].
        optimizer_scope: The part of the sums that a rank needs.
        error_feedback: Feeds the codecs' errors back; see [Note: Error feedback] in error_feedback.py.
        native: True to use torch's own reduce-scatter for a single hop without a codec; its bytes are not counted.

    Attributes:
        communicates_early: True if a micro-batch that is not the last makes hops.
        defers_hops: True if a micro-batch that is not the last leaves hops to the last one.
    """

    def __init__(
        self,
        mesh: ProcessMesh,
        intra_codec: Codec | None,
        inter_codec: Codec | None,
        traffic: Traffic,
        label: str = "unit",
        *,
        gradient_scope: str = "G",
        optimizer_scope: str = "G",
        error_feedback: LoCo | None = None,
        native: bool = False,
    ) -> None:
        self._topology, self._parts = mesh.topology, mesh.topology.shard_count(optimizer_scope)
        self._gradient_scope, self._optimizer_scope = gradient_scope, optimizer_scope
        self._codecs = intra_codec, inter_codec
        self._error_feedback = error_feedback
        self.errors = None
        if error_feedback is not None:
            # Sizes of buffers are known only at the first gradient, so 0 stands for them.
            specs = error_buffer_specs(error_feedback, self._codecs, optimizer_scope, mesh.topology, 0)
            self.errors = ErrorFeedbackState(error_feedback, specs) if specs else None
        intra = hop_over(mesh.intra, "reduce", "intra", traffic)
        inter = hop_over(mesh.inter, "reduce", "inter", traffic)
        kind = TwoHopReduceScatter if optimizer_scope == "G" else TwoHopAllReduce
        self.is_native = native and inter is None and intra_codec is None and gradient_scope == "G"
        self._two_hop = kind(mesh, (intra, inter), self._codecs, self.errors, label, optimizer_scope, self.is_native)
        self.accumulated = AccumulatedGradient()
        self.has_two_hops = intra is not None and inter is not None
        self.communicates_early = gradient_scope != "N"
        left = {"N": (intra, inter), "I": (inter,), "G": ()}[gradient_scope]
        self.defers_hops = any(hop is not None for hop in left)

    label = label_of("_two_hop")

    def error_nbytes(self, numel: int) -> int:
        return error_nbytes(self._error_feedback, self._codecs, self._optimizer_scope, self._topology, numel)

    def accumulate(self, gradient: Tensor, layout: FlatLayout | None = None) -> PendingReduction:
        """Reduce a micro-batch's gradient over the gradient scope, and accumulate it; arguments as in :meth:`start`."""
        accumulated, self._two_hop.layout, self._two_hop.idle = self.accumulated, layout, ()
        if self._gradient_scope == "N":
            # Copy the gradient, since the caller may write to it.
            accumulated.add(gradient.float() if gradient.dtype != torch.float32 else gradient.clone(), layout)
            return done
        if self._gradient_scope == "I":
            accumulated.add(self._two_hop.reduce_intra_node(gradient, gradient.dtype), layout)
            return done
        part = torch.empty(gradient.numel() // self._topology.world, dtype=torch.float32, device=gradient.device)
        finish = self._two_hop.start(gradient, None, part, 1.0, gradient.dtype)
        return partial(self._add_micro_batch, finish, part, layout)

    def _add_micro_batch(self, finish: PendingReduction, part: Tensor, layout: FlatLayout | None) -> None:
        finish()
        # ``part`` was allocated in the stream of the intra-node hop, and this runs in that of the inter-node hop.
        self.accumulated.add(keep_until_read(part), layout)

    def __call__(self, gradient: Tensor, out: Tensor, factor: float = 1.0) -> None:
        finish = self.start(gradient, out, factor)
        finish()

    def start(
        self,
        gradient: Tensor,
        out: Tensor,
        factor: float = 1.0,
        layout: FlatLayout | None = None,
        divided_by: float = 1.0,
        idle: Collection[str] = (),
    ) -> PendingReduction:
        """Begin to write the mean over ranks of this rank's part of ``gradient``, times ``factor``, to ``out``.

        Adds the accumulated gradients of earlier micro-batches, and drops them.

        Args:
            gradient: Flat, contiguous, bf16, fp16 or fp32, which may be written to: [world * numel] for optimizer scope
                ``G``, chunk i for rank i; [gpus_per_node * numel] for ``I``, chunk i for local index i; [numel] for
                ``N``.
            out: Flat [numel], in any float dtype; may be ``gradient`` itself for ``N``.
            factor: Applied in fp32, with the last sum.
            layout: Layout of the gradient, with all parameters of accumulated gradients; None if it never changes. See
                [Note: Identity] in flat_layout.py.
            divided_by: The caller has divided this gradient by this number; accumulated gradients are divided here.
            idle: The names of parameters in ``layout`` that this rank has not used in the step; error feedback leaves
                their errors unchanged.

        Raises:
            ValueError: If the sizes do not fit; raised before any communication.
        """
        needed = self._parts * out.numel()
        if gradient.numel() != needed:
            raise ValueError(
                f"{self.label}: a reduction over {self._topology.world} ranks to {out.numel()} values needs a gradient "
                f"of {needed} values, got {gradient.numel()}; is the state that "
                "reduces it built for another process group?"
            )
        self._two_hop.layout, self._two_hop.idle = layout, idle
        if self.errors is not None:
            self.errors.begin(gradient.device)
        has_accumulated = self.accumulated.sums is not None
        if self._gradient_scope == "G" and has_accumulated:
            last = torch.empty(out.numel(), dtype=torch.float32, device=gradient.device)
            finish = self._two_hop.start(gradient, None, last, factor, gradient.dtype)
            return partial(self._add_accumulated, finish, last, layout, divided_by, out, factor)
        accumulated = self.accumulated.take(layout, divided_by) if has_accumulated else None
        if self._gradient_scope == "N" and accumulated is not None:
            # The sum is in fp32, but hops send the gradient's dtype, as FSDP would.
            return self._two_hop.start(accumulated.add_(gradient), None, out, factor, gradient.dtype)
        return self._two_hop.start(gradient, accumulated, out, factor, gradient.dtype)

    def _add_accumulated(
        self,
        finish: PendingReduction,
        last: Tensor,
        layout: FlatLayout | None,
        divided_by: float,
        out: Tensor,
        factor: float,
    ) -> None:
        """Write the fp32 sum of all micro-batches, each of which was reduced over all ranks, to ``out``."""
        finish()
        # Take the sums only now: if start() took them, its stream would wait for slow hops of earlier micro-batches.
        accumulated = self.accumulated.take(layout, divided_by)
        assert accumulated is not None, "dropped within a reduction"
        last = keep_until_read(last)  # allocated in the stream of start(), and freed at the return
        out.copy_(last.add_(accumulated, alpha=factor))


# ---- step reductions
#
# Gradient reductions of a unit: a synchronous step reduces over all ranks, a local step inside the node.
#
# Without local steps, a unit has only the reduction over all ranks; if all steps are local, only that inside the node.


class StepReductions:
    """Gradient reductions of a unit; ``current`` is the one in use, for synchronous or for local steps.

    ``current`` is None if there is only one rank, or torch reduces.
    """

    def __init__(
        self, ranks: ProcessMesh, resolved: ResolvedStrategy, local_steps: LocalSteps | None, traffic: Traffic
    ) -> None:
        self.is_synchronous = local_steps is None or local_steps.start > 0
        self._by_phase: dict[bool, tuple[ProcessMesh, GradientReduce | None]] = {}
        if self.is_synchronous:
            self._by_phase[True] = ranks, _reduction(ranks, resolved, traffic)
        if local_steps is not None:
            node = ranks.own_node()
            self._by_phase[False] = node, _reduction(node, resolved.within_node(), traffic)
        self.mesh, self.current = self._by_phase[self.is_synchronous]
        self.all = [reduction for _, reduction in self._by_phase.values() if reduction is not None]
        self.have_two_hops = any(reduction.has_two_hops for reduction in self.all)

    def leave_to_torch(self) -> None:
        self._by_phase = {phase: (mesh, None) for phase, (mesh, _) in self._by_phase.items()}
        self.current, self.all, self.have_two_hops = None, [], False

    def set_synchronous(self, synchronous: bool) -> None:
        """Have steps reduce over all ranks or inside this node; drop the errors of the other reduction."""
        if synchronous == self.is_synchronous:
            return
        if self.current is not None and self.current.errors is not None:
            self.current.errors.reset()  # a later phase must not feed back old errors, and they take memory
        self.is_synchronous = synchronous
        self.mesh, self.current = self._by_phase[synchronous]

    def error_states(self) -> Iterator[tuple[str, ErrorFeedbackState]]:
        for synchronous, (_, reduction) in self._by_phase.items():
            if reduction is not None and reduction.errors is not None:
                is_second = not synchronous and True in self._by_phase
                yield "errors in local steps" if is_second else "errors", reduction.errors


def set_synchronous(
    reductions: Sequence[StepReductions], synchronous: bool, on_any_rank: Callable[[bool], bool], step: str
) -> None:
    """Have the next step of a model reduce over all ranks, or inside nodes. Collective if the last step did otherwise.

    Raises:
        RuntimeError: If gradients of an earlier step wait for their reduction on any rank.
    """
    if synchronous == reductions[0].is_synchronous:
        return
    sums = (each.accumulated.sums for of_unit in reductions for each in of_unit.all)
    if on_any_rank(any(each is not None for each in sums)):
        raise RuntimeError(
            f"{step}: local_steps reduces gradients over other ranks from here on, but micro-batches of an earlier "
            "step have accumulated gradients that no backward has synchronized; synchronize the last micro-batch of "
            "each step, or clear gradients after it"
        )
    for of_unit in reductions:
        of_unit.set_synchronous(synchronous)


def _reduction(mesh: ProcessMesh, resolved: ResolvedStrategy, traffic: Traffic) -> GradientReduce | None:
    if mesh.intra is None and mesh.inter is None:
        return None
    return GradientReduce(
        mesh,
        *resolved.gradient_codecs,
        traffic,
        gradient_scope=resolved.scopes.gradients,
        optimizer_scope=resolved.scopes.optimizer,
        error_feedback=resolved.error_feedback,
        native=True,
    )


# ---- step gradients
#
# Gradients of a model over the micro-batches of a step: the code that both adapters share.
#
# [Note: The order of reductions]
# All ranks must issue collectives in the same order. Torch itself reduces in the last micro-batch only, where all ranks
# must use the same units in the same order. In earlier micro-batches, ranks may use different units in different
# orders. If these micro-batches reduce, too, they can't reduce units in the order in which autograd finishes them.
# Instead, each reduces every unit that ranks have gathered for it, used or not, exactly once. The order is that of the
# last backward that synchronized gradients; before there is one, it is the reverse of the model's. Both orders are the
# same on all ranks. A unit that autograd finishes before its turn keeps its gradients until its turn.


class StepGradients(ABC):
    """A unit's gradients over the micro-batches of a step; all units of a model share one ``watch``."""

    reductions: StepReductions
    watch: StepWatch

    @property
    @abstractmethod
    def takes_part(self) -> bool:
        """Return whether ranks gathered the unit for this micro-batch, not the last, and reduce it; the same on all."""

    @abstractmethod
    def reduce_micro_batch(self) -> None:
        """Reduce the gradients that torch has kept, and zeros for missing ones, as far as the gradient scope says."""

    def micro_batch_ended(self) -> None:
        """Reduce the units whose turn it is, after this unit's backward in a micro-batch that is not the last.

        See [Note: What a micro-batch reduces] and [Note: The order of reductions].
        """
        assert self.reductions.current is not None
        if not self.reductions.current.communicates_early:
            self.reduce_micro_batch()
            return
        for due in self.watch.finished(self):
            due.reduce_micro_batch()


class StepWatch:
    """The units of a model whose backwards end together, and the order in which the units reduce.

    In backwards that synchronize gradients, an adapter appends each unit that it reduces to ``synchronized``. It calls
    ``on_backward_end`` at the end of every backward, with True if this backward synchronizes gradients.
    """

    def __init__(self, gradients: Iterable[StepGradients], on_backward_end: Callable[[bool], None]) -> None:
        self._gradients = list(gradients)
        self.on_backward_end = on_backward_end
        self.arriving = ArrivingGradients()
        for each in self._gradients:
            each.watch = self
        self.restart_in_order_of_model()

    def restart_in_order_of_model(self) -> None:
        """Restart before the first backward, or after an exception, which ranks may meet at different points."""
        self._order = self._gradients[::-1]
        self.abandon()

    def finished(self, unit: StepGradients) -> list[StepGradients]:
        """Note that autograd has finished ``unit``; return the units whose turn has come: none, one or several."""
        self._finished.add(id(unit))
        due = []
        while self._turn < len(self._order):
            following = self._order[self._turn]
            if following.takes_part:
                if id(following) not in self._finished:
                    break
                due.append(following)
            self._turn += 1
        self._returned.update(map(id, due))
        return due

    def remaining(self) -> list[StepGradients]:
        order, returned = self._order, self._returned
        self.restart()
        # A unit may be gathered after its turn: in the second of two backwards after two forwards, say.
        return [unit for unit in order if unit.takes_part and id(unit) not in returned]

    def restart(self) -> None:
        """End a backward; in the next one, units in ``synchronized`` come first, in that order, then the others."""
        first = dict.fromkeys(self.synchronized)
        self._order = [*first] + [unit for unit in self._order if unit not in first]
        self.abandon()

    def abandon(self) -> None:
        # If a backward fails, ranks may be at different points of it, so drop the order that it has recorded.
        self._turn = 0
        self.synchronized: list[StepGradients] = []
        self._finished: set[int] = set()
        self._returned: set[int] = set()

    def reduce_remaining(self) -> None:
        """Reduce the units that are not reduced yet, at the end of a micro-batch that is not the last."""
        for each in self.remaining():
            each.reduce_micro_batch()
