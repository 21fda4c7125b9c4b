"""Reduction of one unit's gradients, over the micro-batches of a step.

    unsharded gradient      [world * numel], in its own dtype, of one micro-batch
        | intra-node hop    encode, all-to-all among the ranks of this node, decode and sum in fp32, times 1 / world
    sums of the node        fp32; gradient scope I accumulates micro-batches here, N above, G below
        | inter-node hop    encode, all-to-all among the ranks with this local index, decode and sum in fp32
    mean over all ranks     this rank's chunk
        | gathered back     optimizer scopes I and N only: encoded, over the same hops, to all who hold a replica
    optimizer's gradient

two_hop_reduce.py has the hops. This file has what happens between micro-batches.

[Note: What a micro-batch reduces]
The gradient scope says how far a micro-batch that is not the last of its step goes: ``N`` sums on the rank, ``I`` over
the node, ``G`` over all ranks. The sums accumulate there, in fp32 whatever the dtype of the parameters, and the last
micro-batch makes the remaining hops, once (PaRO, arXiv 2310.06003, section 3.2). So with ``I`` the traffic between
nodes does not depend on the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.config.error_feedback import LoCo, error_buffer_specs, error_nbytes

from .accumulated_gradient import AccumulatedGradient
from .error_state import ErrorFeedbackState
from .flat_layout import FlatLayout
from .hops import PendingReduction, Traffic, hop_over
from .mesh import ProcessMesh
from .streams import keep_until_read
from .two_hop_reduce import DONE, TwoHopAllReduce, TwoHopReduceScatter


class GradientReduce:
    """Reduces one flat gradient over a mesh: each rank gets the mean of its part.

    Args:
        mesh: The ranks.
        intra_codec: Encodes the gradients for the intra-node hop; None sends them in their own dtype.
        inter_codec: Encodes the partial sums for the inter-node hop; None sends them in the gradients' dtype.
        traffic: Where bytes are counted.
        label: Names the unit in profiles and errors.
        gradient_scope: How far micro-batches reduce before the last one; see [Note: What a micro-batch reduces].
        optimizer_scope: Which part of the sums a rank needs; see the top of two_hop_reduce.py.
        error_feedback: Feeds the codecs' errors back; see [Note: Error feedback] in error_buffer.py.
        native: Whether to use torch's own reduce-scatter, whose bytes are not counted, instead of an all-to-all where
            there is one hop and it has no codec.

    Attributes:
        accumulated: The gradients of earlier micro-batches.
        errors: The errors that are fed back, if any.
        is_native: True if a reduction is torch's own reduce-scatter.
        has_two_hops: True if gradients make an intra-node and an inter-node hop, which take two networks.
        communicates_early: True if a micro-batch that is not the last makes hops.
        defers_hops: True if a micro-batch that is not the last leaves hops to be made by the last one.
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
        self._topology = mesh.topology
        self._gradient_scope, self._optimizer_scope = gradient_scope, optimizer_scope
        self._codecs = intra_codec, inter_codec
        self._error_feedback = error_feedback
        self.errors = None
        if error_feedback is not None:
            # Their sizes come with the first gradient.
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

    @property
    def label(self) -> str:
        """Return the unit's name in profiles and errors."""
        return self._two_hop.label

    @label.setter
    def label(self, label: str) -> None:
        self._two_hop.label = label

    def error_nbytes(self, numel: int) -> int:
        """Return the bytes of the errors of a gradient of which a rank keeps ``numel`` values."""
        return error_nbytes(self._error_feedback, self._codecs, self._optimizer_scope, self._topology, numel)

    def accumulate(self, gradient: Tensor, layout: FlatLayout | None = None) -> PendingReduction:
        """Take a micro-batch's gradient as far as the gradient scope says, and add it to those of earlier ones.

        Args:
            gradient: As in :meth:`start`.
            layout: As in :meth:`start`.
        """
        accumulated, self._two_hop.layout, self._two_hop.idle = self.accumulated, layout, ()
        if self._gradient_scope == "N":
            # The gradient is the caller's, who may write to it.
            accumulated.add(gradient.float() if gradient.dtype != torch.float32 else gradient.clone(), layout)
            return DONE
        if self._gradient_scope == "I":
            accumulated.add(self._two_hop.reduce_intra_node(gradient), layout)
            return DONE
        part = torch.empty(gradient.numel() // self._topology.world, dtype=torch.float32, device=gradient.device)
        return _PendingAccumulation(accumulated, self._two_hop.start(gradient, None, part, 1.0), part, layout)

    def __call__(self, gradient: Tensor, out: Tensor, factor: float = 1.0) -> None:
        """Write the mean over ranks of this rank's part of ``gradient``, times ``factor``, to ``out``.

        Arguments and errors are those of :meth:`start`.
        """
        self.start(gradient, out, factor).finish()

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

        The accumulated gradients of earlier micro-batches are added to it, and dropped.

        Args:
            gradient: Flat, contiguous, bf16, fp16 or fp32, which may be written to: [world * numel] for optimizer scope
                ``G``, chunk i for rank i; [gpus_per_node * numel] for ``I``, chunk i for local index i; [numel] for
                ``N``.
            out: Flat [numel], in any float dtype; may be ``gradient`` itself for ``N``.
            factor: Applied in fp32, with the last sum.
            layout: Where the parameters that the gradient consists of lie in it, those of accumulated gradients among
                them; None if they are the same in every call. See [Note: Identity] in flat_layout.py.
            divided_by: The number that the caller has divided this gradient by, but not those of earlier micro-batches.
            idle: The names of parameters in ``layout`` that this rank has not used in the step, so that their errors
                stay as they are; see [Note: Error feedback] in error_buffer.py.

        Raises:
            ValueError: If the sizes do not fit, before any communication.
        """
        self._check_sizes(gradient, out)
        self._two_hop.layout, self._two_hop.idle = layout, idle
        if self.errors is not None:
            self.errors.begin(gradient.device)
        has_accumulated = self.accumulated.sums is not None
        if self._gradient_scope == "G" and has_accumulated:
            last = torch.empty(out.numel(), dtype=torch.float32, device=gradient.device)
            reduction = self._two_hop.start(gradient, None, last, factor)
            return _PendingWithAccumulated(self.accumulated, reduction, last, layout, divided_by, out, factor)
        accumulated = self.accumulated.take(layout, divided_by) if has_accumulated else None
        if self._gradient_scope == "N" and accumulated is not None:
            # The hops send the dtype that FSDP would have sent, whatever the sum is in.
            return self._two_hop.start(accumulated.add_(gradient), None, out, factor, wire_dtype=gradient.dtype)
        return self._two_hop.start(gradient, accumulated, out, factor)

    @cached_property
    def _parts(self) -> int:
        return self._topology.shard_count(self._optimizer_scope)

    def _check_sizes(self, gradient: Tensor, out: Tensor) -> None:
        parts = self._parts
        if gradient.numel() != parts * out.numel():
            raise ValueError(
                f"{self.label}: a reduction over {self._topology.world} ranks to {out.numel()} values needs a gradient "
                f"of {parts * out.numel()} values, got {gradient.numel()}; is the state that "
                "reduces it built for another process group?"
            )


@dataclass(slots=True)
class _PendingAccumulation(PendingReduction):
    """Reduction of a micro-batch that is not the last: adds its sums over all ranks to those of earlier ones."""

    accumulated: AccumulatedGradient
    reduction: PendingReduction
    part: Tensor
    layout: FlatLayout | None

    def finish(self) -> None:
        self.reduction.finish()
        # The current stream is that of the inter-node hop, not the one that allocated it.
        self.accumulated.add(keep_until_read(self.part), self.layout)


@dataclass(slots=True)
class _PendingWithAccumulated(PendingReduction):
    """Reduction of the last micro-batch, where earlier ones reduced over all ranks: writes the fp32 sum of all."""

    accumulated: AccumulatedGradient
    reduction: PendingReduction
    last: Tensor
    layout: FlatLayout | None
    divided_by: float
    out: Tensor
    factor: float

    def finish(self) -> None:
        self.reduction.finish()
        # Only here: the stream that started the reduction would wait for the slow hops of earlier micro-batches.
        accumulated = self.accumulated.take(self.layout, self.divided_by)
        assert accumulated is not None, "dropped within a reduction"
        last = keep_until_read(self.last)  # which that stream allocated; it is freed when this returns
        self.out.copy_(last.add_(accumulated, alpha=self.factor))
