"""The two-hop reduction of gradients: all-to-alls whose sums are made locally, in fp32.

[Note: Two-hop reduction]
quantize -> all-to-all inside the node -> decode, sum -> quantize -> all-to-all between nodes -> decode, sum.
A value is rounded once a hop however many ranks there are, where a ring would round it at every rank; and the
slow network carries each partial sum once, all GPUs of a node using it in parallel (ZeRO++, arXiv 2306.10209,
section 3.3). A level with one rank has no hop, and its codec is not applied.

[Note: The mean]
The result is the mean over all ranks. The one division is made on the fp32 sums of the first hop, before they
are encoded again: in fp16 a sum may overflow where the mean does not.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.profiler import record_function

from .codecs import Codec, FullPrecision
from .hop import Traffic, hop_over
from .topology import ProcessMesh


class GradientReduce:
    """Reduces one flat gradient over a mesh, leaving each rank the mean of its shard.

    Args:
        mesh: The ranks.
        intra_codec: Encodes the gradients for the hop inside a node; None sends them in their own dtype.
        inter_codec: Encodes the partial sums for the hop between nodes; None sends them in the gradients' dtype.
        traffic: Where bytes are counted.
        label: Names the unit in profiles and errors.
    """

    def __init__(
        self,
        mesh: ProcessMesh,
        intra_codec: Codec | None,
        inter_codec: Codec | None,
        traffic: Traffic,
        label: str = "unit",
    ) -> None:
        self.label = label
        self._topology = mesh.topology
        self._intra_codec = intra_codec
        self._inter_codec = inter_codec
        self._intra = hop_over(mesh.intra, "reduce", "intra", traffic)
        self._inter = hop_over(mesh.inter, "reduce", "inter", traffic)

    @torch.no_grad()
    def __call__(self, gradient: Tensor, out: Tensor, factor: float = 1.0) -> None:
        """Write the mean over ranks of this rank's chunk of ``gradient``, times ``factor``, to ``out``.

        Args:
            gradient: Flat, contiguous [world * numel], bf16, fp16 or fp32; chunk i belongs to rank i.
            out: Flat [numel], in any float dtype.
            factor: Applied in fp32, with the last sum.

        Raises:
            ValueError: If the sizes do not fit, before any communication.
        """
        if gradient.numel() != self._topology.world * out.numel():
            raise ValueError(
                f"{self.label}: a reduction over {self._topology.world} ranks to {out.numel()} values needs a gradient "
                f"of {self._topology.world * out.numel()} values, got {gradient.numel()}; is the state that "
                "reduces it built for another process group?"
            )
        mean = 1.0 / self._topology.world
        if self._intra is None and self._inter is None:
            torch.mul(gradient, factor, out=out)
        elif self._inter is None:
            codec, received = self._exchange_inside(gradient)
            self._decode_sum(codec, received, out, mean * factor)
        elif self._intra is None:
            codec = self._inter_codec or FullPrecision(gradient.dtype)
            payload = self._encode(codec, gradient)
            self._reduce_between(codec, payload, out, mean * factor)
        else:
            intra_codec, received = self._exchange_inside(gradient)
            codec = self._inter_codec or FullPrecision(gradient.dtype)
            with record_function(f"fsdp_zpp::decode_sum_encode ({self.label})"):
                payload = intra_codec.decode_sum_encode(received, out.numel(), codec, mean)
            self._reduce_between(codec, payload, out, factor)

    def _exchange_inside(self, gradient: Tensor) -> tuple[Codec, Tensor]:
        """The intra-node hop: the codec, and what all ranks of the node sent, uint8 [gpus, nodes, nbytes]."""
        assert self._intra is not None
        codec = self._intra_codec or FullPrecision(gradient.dtype)
        received = self._intra.all_to_all(self._encode(codec, gradient), self.label)
        return codec, received.view(self._topology.gpus_per_node, self._topology.nodes, -1)

    def _reduce_between(self, codec: Codec, payload: Tensor, out: Tensor, factor: float) -> None:
        """The inter-node hop, from ``payload`` uint8 [nodes, nbytes] by destination."""
        assert self._inter is not None
        received = self._inter.all_to_all(payload, self.label)
        self._decode_sum(codec, received.unsqueeze(1), out, factor)

    def _encode(self, codec: Codec, gradient: Tensor) -> Tensor:
        with record_function(f"fsdp_zpp::encode ({self.label})"):
            return codec.encode(gradient, rows=self._topology.nodes, cols=self._topology.gpus_per_node)

    def _decode_sum(self, codec: Codec, received: Tensor, out: Tensor, factor: float) -> None:
        with record_function(f"fsdp_zpp::decode_sum ({self.label})"):
            codec.decode_sum(received, out, 1, 1, factor)
