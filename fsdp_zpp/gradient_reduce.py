"""The two-hop reduction of gradients: all-to-alls whose sums are made locally, in fp32.

[Note: Two-hop reduction]
quantize -> all-to-all inside the node -> decode, sum -> quantize -> all-to-all between nodes -> decode, sum.
A value is rounded once a hop however many ranks there are, where a ring would round it at every rank; and the
slow network carries each partial sum once, all GPUs of a node using it in parallel (ZeRO++, arXiv 2306.10209,
section 3.3). A level with one rank has no hop, and its codec is not applied.

[Note: What a micro-batch reduces]
The gradient scope says how far a micro-batch that is not the last of its step goes: ``N`` sums on the rank, ``I`` over
the node, ``G`` over all ranks. The sums accumulate there, in fp32 whatever the dtype of the parameters, and the last
micro-batch makes the remaining hops, once (PaRO, arXiv 2310.06003, section 3.2). So with ``I`` the traffic between
nodes does not depend on the number of micro-batches.

[Note: What is left on a rank]
The optimizer letter says which part of the sums a rank needs: its chunk of all ranks' (``G``), all that its local
index has summed (``I``), or everything (``N``). A coarser part than the two hops leave is gathered back over the
same hops, encoded, and every rank decodes the same bytes: replicas stay equal bit for bit.

[Note: Two hops at once]
While the slow network is busy with one unit's sums, the fast one can sum up the next unit's. So a reduction comes in
two parts, :meth:`GradientReduce.start` up to the hop between nodes and what that returns, which an adapter runs in
streams of their own.

[Note: The mean]
The result is the mean over all ranks. The one division is made on the fp32 sums of the first hop, before they
are encoded again: in fp16 a sum may overflow where the mean does not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
import torch.nn.functional as F
from torch import Tensor

from .codecs import Codec, FullPrecision
from .error_buffer import ErrorBuffer
from .error_feedback import LoCo, error_nbytes, senders
from .hop import Traffic, hop_over
from .labels import labelled
from .topology import ProcessMesh
from .unit_errors import UnitErrors


class GradientReduce:
    """Reduces one flat gradient over a mesh, leaving each rank the mean of its part.

    Args:
        mesh: The ranks.
        intra_codec: Encodes the gradients for the hop inside a node; None sends them in their own dtype.
        inter_codec: Encodes the partial sums for the hop between nodes; None sends them in the gradients' dtype.
        traffic: Where bytes are counted.
        label: Names the unit in profiles and errors.
        accumulate: The letter of the gradients; see [Note: What a micro-batch reduces].
        keep: The letter of the optimizer; see [Note: What is left on a rank].
        error_feedback: Feeds the codecs' errors back; see [Note: Error feedback] in error_buffer.py.
        native: Whether to use torch's own reduce-scatter, whose bytes are not counted, instead of an all-to-all where
            there is one hop and it has no codec.

    Attributes:
        errors: The errors that are fed back, if any.
    """

    def __init__(
        self,
        mesh: ProcessMesh,
        intra_codec: Codec | None,
        inter_codec: Codec | None,
        traffic: Traffic,
        label: str = "unit",
        *,
        accumulate: str = "G",
        keep: str = "G",
        error_feedback: LoCo | None = None,
        native: bool = False,
    ) -> None:
        self.label = label
        self._topology = mesh.topology
        self._keep = keep
        self._scope = accumulate
        self._native = native and mesh.inter is None and intra_codec is None and accumulate == "G"
        self._intra_codec = intra_codec
        self._inter_codec = inter_codec
        self._intra = hop_over(mesh.intra, "reduce", "intra", traffic)
        self._inter = hop_over(mesh.inter, "reduce", "inter", traffic)
        self._waiting: Tensor | None = None
        self._error_feedback = error_feedback
        # Their sizes come with the first gradient.
        hops = senders(error_feedback, (intra_codec, inter_codec), keep, mesh.topology, 0)
        self.errors = UnitErrors(error_feedback, hops) if error_feedback is not None and hops else None
        left = {"N": (self._intra, self._inter), "I": (self._inter,), "G": ()}[accumulate]
        self._defers_hops = any(hop is not None for hop in left)

    @property
    def defers_hops(self) -> bool:
        """Whether a micro-batch that is not the last leaves hops to be made by the last one."""
        return self._defers_hops

    @property
    def communicates_early(self) -> bool:
        """Whether a micro-batch that is not the last makes hops."""
        return self._scope != "N"

    @property
    def has_two_hops(self) -> bool:
        """Whether gradients go both inside and between nodes, which take two networks."""
        return self._intra is not None and self._inter is not None

    @property
    def waiting(self) -> bool:
        """Whether gradients of earlier micro-batches wait for the last one."""
        return self._waiting is not None

    def discard(self) -> None:
        """Forget the gradients that wait."""
        self._waiting = None

    def error_nbytes(self, numel: int) -> int:
        """Bytes of the errors of a gradient of which a rank keeps ``numel`` values."""
        codecs = self._intra_codec, self._inter_codec
        return error_nbytes(self._error_feedback, codecs, self._keep, self._topology, numel)

    @torch.no_grad()
    def accumulate(self, gradient: Tensor) -> Callable[[], None]:
        """Take a micro-batch's gradient as far as the gradient letter says, and add it to those that wait.

        Args:
            gradient: As in :meth:`start`.

        Returns:
            What does the rest, as :meth:`start` does.
        """
        if self._scope == "N":
            # The gradient is the caller's, who may write to it.
            self._add(gradient.float() if gradient.dtype != torch.float32 else gradient.clone())
            return _nothing
        wire = self._wire_dtype(gradient)
        if self._scope == "I":
            self._add(self._sum_inside(gradient, wire))
            return _nothing
        part = torch.empty(gradient.numel() // self._topology.world, dtype=torch.float32, device=gradient.device)
        reduce = self._reduce_scatter(gradient, None, wire, part, 1.0)

        def finish() -> None:
            reduce()
            self._add(part)

        return torch.no_grad()(finish)

    def _add(self, part: Tensor) -> None:
        if self._waiting is None:
            self._waiting = part
        else:
            # Sums over nodes are added in the stream of that hop, which is not the one that has made their memory.
            _handed_over(self._waiting).add_(_handed_over(part))

    def __call__(self, gradient: Tensor, out: Tensor, factor: float = 1.0) -> None:
        """Write the mean over ranks of this rank's part of ``gradient``, times ``factor``, to ``out``.

        Arguments and errors as :meth:`start`.
        """
        self.start(gradient, out, factor)()

    @torch.no_grad()
    def start(self, gradient: Tensor, out: Tensor, factor: float = 1.0, layout: Hashable = None) -> Callable[[], None]:
        """Begin to write the mean over ranks of this rank's part of ``gradient``, times ``factor``, to ``out``.

        Gradients that wait are added to it, and wait no more. See [Note: Two hops at once].

        Args:
            gradient: Flat, contiguous, bf16, fp16 or fp32: [world * numel] to keep ``G``, chunk i for rank i;
                [gpus_per_node * numel] to keep ``I``, chunk i for local index i; [numel] to keep ``N``.
            out: Flat [numel], in any float dtype; may be ``gradient`` itself to keep ``N``.
            factor: Applied in fp32, with the last sum.
            layout: Identifies the parameters that the gradient consists of. Errors that are fed back belong to one
                layout; if it changes, they start from zero.

        Returns:
            What does the rest, in whatever stream is current then, which must come after this one.

        Raises:
            ValueError: If the sizes do not fit, before any communication.
        """
        self._check_sizes(gradient, out)
        if self.errors is not None:
            self.errors.begin(gradient.device, layout)
        waiting, self._waiting = self._waiting, None
        wire = self._wire_dtype(gradient)
        if self._scope == "G":
            if waiting is not None:
                return torch.no_grad()(self._reduce_scatter_onto(waiting, gradient, wire, out, factor))
        elif self._scope == "N" and waiting is not None:
            gradient, waiting = waiting.add_(gradient), None
        begin = self._reduce_scatter if self._keep == "G" else self._all_reduce
        return torch.no_grad()(begin(gradient, waiting, wire, out, factor))

    def _check_sizes(self, gradient: Tensor, out: Tensor) -> None:
        parts = {"G": self._topology.world, "I": self._topology.gpus_per_node, "N": 1}[self._keep]
        if gradient.numel() != parts * out.numel():
            raise ValueError(
                f"{self.label}: a reduction over {self._topology.world} ranks to {out.numel()} values needs a gradient "
                f"of {parts * out.numel()} values, got {gradient.numel()}; is the state that "
                "reduces it built for another process group?"
            )

    @staticmethod
    def _wire_dtype(gradient: Tensor) -> FullPrecision:
        return FullPrecision(gradient.dtype)

    # ---- to a chunk on each rank

    def _reduce_scatter(
        self, gradient: Tensor, waiting: Tensor | None, wire: FullPrecision, out: Tensor, factor: float
    ) -> Callable[[], None]:
        mean = 1.0 / self._topology.world
        codec = self._inter_codec or wire
        if self._inter is None:
            if self._intra is None:
                torch.mul(gradient, factor, out=out)
            elif self._native:
                self._reduce_scatter_natively(gradient, out, mean * factor)
            else:
                intra_codec, received = self._exchange_inside(gradient, wire)
                self._decode_sum(intra_codec, received, out, mean * factor)
            return _nothing
        if waiting is not None:
            sums = self._sum_inside(gradient, wire).add_(waiting)
            payload = self._encode(codec, sums, 1, self._topology.nodes, "inter")
        elif self._intra is None:
            payload = self._encode(codec, gradient, 1, self._topology.nodes, "inter")
            factor *= mean
        else:
            intra_codec, received = self._exchange_inside(gradient, wire)
            payload = self._decode_sum_encode(intra_codec, received, out.numel(), codec, mean, "inter")
        return lambda: self._reduce_between(codec, payload, out, factor)

    def _reduce_scatter_onto(
        self, waiting: Tensor, gradient: Tensor, wire: FullPrecision, out: Tensor, factor: float
    ) -> Callable[[], None]:
        """As :meth:`_reduce_scatter`, plus the fp32 sums of earlier micro-batches."""
        last = torch.empty_like(waiting)
        reduce = self._reduce_scatter(gradient, None, wire, last, factor)

        def finish() -> None:
            reduce()
            out.copy_(last.add_(_handed_over(waiting), alpha=factor))

        return finish

    def _reduce_scatter_natively(self, gradient: Tensor, out: Tensor, factor: float) -> None:
        assert self._intra is not None
        # In fp16 a sum may overflow where the mean does not.
        first = gradient.dtype == torch.float16 and factor < 1
        sums = out if out.dtype == gradient.dtype else torch.empty_like(out, dtype=gradient.dtype)
        self._intra.reduce_scatter(gradient * factor if first else gradient, sums, self.label)
        if sums is not out:
            out.copy_(sums)
        if not first and factor != 1:
            out.mul_(factor)

    def _exchange_inside(self, gradient: Tensor, wire: FullPrecision) -> tuple[Codec, Tensor]:
        """The intra-node hop: the codec, and what all ranks of the node sent, uint8 [gpus, chunks, nbytes].

        A rank's part is a chunk for every node if it is to be scattered between them (in the order of ranks, which
        the encoding transposes), else a single one.
        """
        assert self._intra is not None
        codec = self._intra_codec or wire
        chunks, gpus = self._topology.nodes if self._keep == "G" else 1, self._topology.gpus_per_node
        received = self._intra.all_to_all(self._encode(codec, gradient, chunks, gpus, "intra"), self.label)
        return codec, received.view(gpus, chunks, -1)

    def _reduce_between(self, codec: Codec, payload: Tensor, out: Tensor, factor: float) -> None:
        """The inter-node hop, from ``payload`` uint8 [nodes, nbytes] by destination."""
        assert self._inter is not None
        received = self._inter.all_to_all(_handed_over(payload), self.label)
        self._decode_sum(codec, received.unsqueeze(1), out, factor)

    def _sum_inside(self, gradient: Tensor, wire: FullPrecision) -> Tensor:
        """The fp32 mean of this local index's part, flat, as far as this node's ranks contribute to it."""
        mean = 1.0 / self._topology.world
        if self._intra is None:
            return gradient.float() * mean
        codec, received = self._exchange_inside(gradient, wire)
        part = gradient.numel() // self._topology.gpus_per_node
        sums = torch.empty(part, dtype=torch.float32, device=gradient.device)
        with labelled("decode_sum", self.label):
            codec.decode_sum(received, sums, 1, received.shape[1], mean)
        return sums

    # ---- to replicas

    def _all_reduce(
        self, gradient: Tensor, waiting: Tensor | None, wire: FullPrecision, out: Tensor, factor: float
    ) -> Callable[[], None]:
        sums = self._sum_inside(F.pad(gradient, (0, -gradient.numel() % self._topology.gpus_per_node)), wire)
        if waiting is not None:
            sums.add_(waiting)
        return lambda: self._all_reduce_between(sums, wire, out, factor)

    def _all_reduce_between(self, sums: Tensor, wire: FullPrecision, out: Tensor, factor: float) -> None:
        """Sum over nodes what each has summed inside, and give every replica of ``out`` all of it."""
        nodes, part = self._topology.nodes, _handed_over(sums).numel()
        chunk = -(-part // nodes)
        codec, payload = self._sum_between(F.pad(sums, (0, chunk * nodes - part)), wire, factor)
        if self._keep == "N" and self._intra is not None:
            payload = self._intra.all_gather(payload, self.label)
        decoded = torch.empty(payload.shape[0] * chunk, dtype=out.dtype, device=out.device)
        with labelled("decode", self.label):
            codec.decode(payload, decoded, 1, payload.shape[0])
        out.copy_(decoded.view(-1, nodes * chunk)[:, :part].reshape(-1)[: out.numel()])

    def _sum_between(self, sums: Tensor, wire: FullPrecision, factor: float) -> tuple[Codec, Tensor]:
        """Sum over nodes: the codec, and the sums of all nodes' chunks encoded, uint8 [nodes, nbytes]."""
        if self._inter is None:
            codec = self._intra_codec or wire
            return codec, self._encode(codec, sums.mul_(factor), 1, 1, "back")
        codec = self._inter_codec or wire
        nodes = self._topology.nodes
        received = self._inter.all_to_all(self._encode(codec, sums, 1, nodes, "inter"), self.label)
        received = received.unsqueeze(1)
        payload = self._decode_sum_encode(codec, received, sums.numel() // nodes, codec, factor, "back")
        return codec, self._inter.all_gather(payload, self.label)

    # ---- what is sent, with the errors of what sends it

    def _errors_of(self, sender: str, chunks: int, numel: int, device: torch.device) -> ErrorBuffer | None:
        buffer = None if self.errors is None else self.errors.buffer(sender)
        return None if buffer is None else buffer.begin(chunks, numel, device)

    def _encode(self, codec: Codec, values: Tensor, rows: int, cols: int, sender: str) -> Tensor:
        chunks = rows * cols
        errors = self._errors_of(sender, chunks, values.numel() // chunks, values.device)
        with labelled("encode", self.label):
            if errors is None:
                return codec.encode(values, rows, cols)
            return codec.encode_corrected(values, rows, cols, errors)

    def _decode_sum_encode(
        self, codec: Codec, received: Tensor, numel: int, next_codec: Codec, scale: float, sender: str
    ) -> Tensor:
        errors = self._errors_of(sender, received.shape[1], numel, received.device)
        with labelled("decode_sum_encode", self.label):
            if errors is None:
                return codec.decode_sum_encode(received, numel, next_codec, scale)
            return codec.decode_sum_encode_corrected(received, numel, next_codec, scale, errors)

    def _decode_sum(self, codec: Codec, received: Tensor, out: Tensor, factor: float) -> None:
        with labelled("decode_sum", self.label):
            codec.decode_sum(received, out, 1, 1, factor)


def _handed_over(tensor: Tensor) -> Tensor:
    """``tensor``, whose memory the stream that made it is not to reuse before the current one has read it."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def _nothing() -> None:
    """All has been done."""
