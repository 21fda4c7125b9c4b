"""Average of optimizers' moments over nodes that train on their own.

    this node's moments         of each parameter what this rank holds, in its own dtype
        | in chunks             fp32, each parameter in a chunk for each node
    mean over nodes             encode, all-to-all among the ranks with this local index, decode, sum in fp32
        | each rank its chunk
    moments of all nodes        encode, all-gather among the same ranks, decode: equal bit for bit

Source: DES-LOC (arXiv 2505.22549), algorithm 1, which averages moments more rarely than weights.

[Note: Roots of moments]
Adam divides by the root of its second moment. A blockwise code rounds the small values of a block to 0, and an update
is then divided by eps alone. So lossy codecs encode fourth roots, with their signs: the smallest code of 8 bits stands
for 1 / 127**4 of a block's largest value, and values that would still round to 0 in a block without negative ones
become those of half a code. First moments are encoded alike, since their small values matter as much: an optimizer
divides each by its own scale. The mean is that of the moments, not of their roots.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor

from fsdp_zpp.codecs.base import Codec, full_precision

from .devices import for_collectives
from .hops import Hop, Traffic, decode, encode
from .mesh import ProcessMesh
from .node_chunks import NodeChunks

_HALF_CODE = 1 / 254
"""Half of the step between two codes of 8 bits, as a share of a block's largest value."""


class MomentAverage:
    """Replaces moments by their mean over nodes.

    Args:
        mesh: All ranks, on several nodes.
        codec: Encodes roots of moments; None sends the moments themselves, in fp32, so that the mean is exact.
        traffic: Where bytes are counted.
        label: Names what they belong to in profiles.
    """

    def __init__(self, mesh: ProcessMesh, codec: Codec | None, traffic: Traffic, label: str) -> None:
        assert mesh.inter is not None
        self._codec, self._label, self._nodes = codec or full_precision(torch.float32), label, mesh.topology.nodes
        self._reduce = Hop(mesh.inter, "reduce", "inter", traffic)
        self._gather = Hop(mesh.inter, "gather", "inter", traffic)

    @torch.no_grad()
    def average(self, moments: Mapping[str, Tensor], placements: Mapping[str, Hashable]) -> None:
        """Write the mean over nodes into moments of one kind.

        Collective among the ranks with this local index, unless these hold nothing of the moments.

        Args:
            moments: What this rank holds of each parameter's moment, by the parameter's name: contiguous, of the same
                sizes on all nodes.
            placements: How another parallelism has placed each parameter, by name, in an order that is always the same.
        """
        held = {name: moment.view(-1) for name, moment in moments.items() if moment.numel()}
        if not held:
            return
        numels = {name: moment.numel() for name, moment in held.items()}
        chunks = NodeChunks(numels, placements, self._nodes, self._codec.block_numel or 1)
        device = for_collectives(next(iter(held.values())).new_empty(0), self._gather.group).device
        # Zeros where chunks are padded.
        flat = torch.zeros(self._nodes, chunks.layout.numel, dtype=torch.float32, device=device)
        for name, places, part in chunks.places(flat):
            part.copy_(held[name][places])
        # Payloads in one expression with what uses them up, so that they are freed.
        self._decode(self._reduce.all_to_all(self._encoded(flat), self._label), flat)
        self._expand(flat)
        mean = flat[:1]
        for other in flat[1:]:  # one after the other, so that copies on other axes are summed in the same order
            mean.add_(other)
        self._decode(self._gather.all_gather(self._encoded(mean.div_(self._nodes)), self._label), flat)
        self._expand(flat)
        for name, places, part in chunks.places(flat):
            held[name][places].copy_(part)

    def _encoded(self, rows: Tensor) -> Tensor:
        """Encode chunks [n, numel], which may be written to."""
        if not self._codec.is_lossless:
            for row in rows:
                _to_root(row)
        return encode(self._codec, rows.view(-1), 1, len(rows), self._label)

    def _decode(self, payload: Tensor, rows: Tensor) -> None:
        decode(self._codec, payload, rows.view(-1), 1, len(rows), self._label)

    def _expand(self, rows: Tensor) -> None:
        """Make moments of their decoded roots."""
        if not self._codec.is_lossless:
            for row in rows:
                for blocks in _in_blocks(row, self._codec.block_numel):
                    _raise_zeros(blocks)
                _to_power(row)


def _to_root(chunk: Tensor) -> None:
    """Replace values by their fourth roots, with their signs."""
    signs = chunk.sign()
    chunk.abs_().sqrt_().sqrt_().mul_(signs)


def _to_power(chunk: Tensor) -> None:
    """Replace fourth roots by what they are of."""
    signs = chunk.sign()
    chunk.square_().square_().mul_(signs)


def _in_blocks(chunk: Tensor, block: int) -> tuple[Tensor, ...]:
    """Return views of a chunk's whole blocks, and of the last one if it is shorter: [blocks, numel]."""
    whole = chunk.numel() // block * block if block else 0
    views = chunk[:whole].view(-1, block or 1), chunk[whole:].view(1, -1)
    return tuple(view for view in views if view.numel())


def _raise_zeros(blocks: Tensor) -> None:
    """Raise values to at least half a code in blocks that have no negative value; see [Note: Roots of moments]."""
    half, lowest = blocks.amax(1, keepdim=True).mul_(_HALF_CODE), blocks.amin(1, keepdim=True)
    torch.maximum(blocks, torch.where(lowest < 0, -torch.inf, half), out=blocks)
