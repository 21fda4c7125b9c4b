"""Resolution of a strategy on a layout of ranks: its effective scopes, and the codecs that are active.

[Note: One node]
Codecs trade computation for bytes on the slow network between nodes. A single node has no such network, and encoding
takes longer than its fast links take to send the bytes saved. So the codecs meant for the slow network are inactive
there: those of weights and gradients, and what "auto" derives from the latter for the intra-node hop. Torch's own
collectives then do whatever the scopes leave to them. A codec named explicitly for the intra-node hop stays active, as
does error feedback on it.

[Note: Links]
What counts is which ranks share fast links. On a single host whose GPUs NVLink does not join, every link is slow, and
``gpus_per_node=1`` makes every hop an inter-node hop; GPUs that NVLink bridges in pairs are nodes of two. If it is not
given, the machine is asked (collectives/links.py), and its answer decides if that costs little:

- Only with optimizer scope ``G``. Under ``I`` and ``N`` smaller nodes hold more of the optimizer state, the largest of
  all states: ``III`` would become ``NNN``.
- Only if codecs make it pay. Under parameter scope ``I`` they must encode the weights, of which each node keeps a copy:
  one that is not encoded would undo what sharding saves. Under others, codecs of weights or gradients will do.
- Not with error feedback, whose fp32 errors each GPU would keep for whole gradients: 4 bytes a parameter, which no
  sharding divides.
- Not for a frozen base, ours or one of packed values, which stays sharded over the host: under LoRA it is nearly all of
  the model, which often has no room on one GPU.
- Not on several hosts. The network between them is slower still, so the host stays the node, and both hops are encoded.
- Not if the sets of ranks that NVLink joins are unequal or not consecutive, which no node size expresses.

The price is the encoded copy of the weights and, under gradient scope ``I``, gradients that accumulate whole on
each GPU; the set-up line names the bytes. Otherwise the host is the node. PCIe counts as slow with
peer-to-peer access, too: what it lacks beside NVLink is bandwidth.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.codecs.blockwise import Int8

from .error_feedback import LoCo, error_buffer_specs
from .topology import Topology


class Scopes(NamedTuple):
    """Scopes of a parameter, its gradient and its optimizer state: ``N``, ``I`` or ``G`` each."""

    parameters: str
    gradients: str
    optimizer: str


@dataclass(frozen=True)
class ResolvedStrategy:
    """A strategy on a layout of ranks. :meth:`Strategy.resolve` makes it once; everything downstream takes it.

    Attributes:
        levels: The requested scopes as letters; the first one places a frozen base.
        topology: The layout.
        scopes: The effective scopes; see :func:`resolve_scopes`.
        weights: Codec of the weight all-gather, if active.
        gradient_codecs: Codecs of the intra-node and of the inter-node hop of the gradient reduction, if active.
        error_feedback: Error feedback on the gradient codecs, if active.
        frozen: Codec of frozen parameters that are in full precision.
        intra_codec: Codec of the intra-node hop of the gradient reduction, if it was named explicitly.
    """

    levels: str
    topology: Topology
    scopes: Scopes
    weights: Codec | None
    gradient_codecs: tuple[Codec | None, Codec | None]
    error_feedback: LoCo | None
    frozen: Codec | None
    intra_codec: Codec | None = None

    def within_node(self) -> ResolvedStrategy:
        """Return the strategy as a node runs it that trains on its own: as a job of one node.

        The codec of its weights stays active, unlike that of a job that has one node: it was resolved for several.
        """
        gpus, codecs = self.topology.gpus_per_node, (self.intra_codec, None)
        node = Topology(gpus, gpus)
        feedback = self.error_feedback
        if feedback is not None and (feedback.hops == "inter" or self.intra_codec is None):
            feedback = None
        # Error feedback between nodes may have changed the scopes, and does not apply inside a node.
        scopes = resolve_scopes(Scopes(*self.levels), self.topology)
        return dataclasses.replace(
            self,
            topology=node,
            scopes=resolve_scopes(scopes, node, feedback, codecs),
            gradient_codecs=codecs,
            error_feedback=feedback,
        )


def resolve(
    levels: str,
    *,
    weights: Codec | None,
    gradients: Codec | None,
    intra_gradients: Codec | Literal["auto"] | None,
    error_feedback: LoCo | None,
    frozen: Codec | None,
    topology: Topology,
) -> ResolvedStrategy:
    """Resolve a strategy on ``topology``; see [Note: One node]. The arguments are those of :class:`Strategy`.

    A single rank keeps its codecs: it sends nothing, so they cost nothing.
    """
    if topology.nodes == 1 and topology.world > 1:
        weights = gradients = None
        intra_node = intra_node_codec(intra_gradients, None)
        if error_feedback is not None and (error_feedback.hops == "inter" or intra_node is None):
            error_feedback = None
    # Only now: on one node, "auto" must follow a gradient codec that is inactive.
    codecs = intra_node_codec(intra_gradients, gradients), gradients
    scopes = resolve_scopes(Scopes(*levels), topology, error_feedback, codecs)
    named = intra_node_codec(intra_gradients, None)
    return ResolvedStrategy(levels, topology, scopes, weights, codecs, error_feedback, frozen, named)


def resolve_scopes(
    scopes: Scopes,
    topology: Topology,
    error_feedback: LoCo | None = None,
    gradient_codecs: tuple[Codec | None, Codec | None] = (None, None),
) -> Scopes:
    """Return the effective scopes on ``topology``: a network level that does not exist shards nothing.

    On one node, ``I`` is the same as ``G``. On nodes of one GPU, ``I`` is the same as ``N``, except for a secondary
    shard (parameters ``I`` beside an optimizer ``G``): it then holds all weights, but still encoded, which ``N`` does
    not express.

    Error feedback must see the sum of all micro-batches. So gradients accumulate before the first hop that has error
    feedback: on the rank (``N``) or in the node (``I``), unless their scope is as coarse already.

    Args:
        scopes: The requested scopes.
        topology: The layout of the ranks.
        error_feedback: Error feedback on the gradient codecs, if active.
        gradient_codecs: Codecs of the intra-node and of the inter-node hop of the gradient reduction.
    """
    requested = "".join(scopes)
    if topology.nodes == 1:
        scopes = Scopes(*requested.replace("I", "G"))
    elif topology.gpus_per_node == 1:
        keeps_secondary = scopes.parameters == "I" and scopes.optimizer == "G"
        scopes = Scopes(*requested.replace("I", "N"))
        scopes = scopes._replace(parameters="I") if keeps_secondary else scopes
    if error_feedback is None:
        return scopes
    # Only the names of the hops matter here, not the sizes of their buffers.
    fed_back = error_buffer_specs(error_feedback, gradient_codecs, scopes.optimizer, topology, 0)
    if "intra" in fed_back or ("inter" in fed_back and topology.gpus_per_node == 1):
        return scopes._replace(gradients="N")
    if "inter" in fed_back and scopes.gradients == "G":
        return scopes._replace(gradients="I")
    return scopes


def intra_node_codec(intra: Codec | Literal["auto"] | None, inter: Codec | None) -> Codec | None:
    """Return the codec of the intra-node hop: as given, or for ``"auto"`` 8 bits with the inter-node codec's block.

    The intra-node network is fast, so its hop can afford the precision that the slow hop can't. SDP4Bit (arXiv
    2410.15526, section 3.2) finds 8 bits on the intra-node hop and 4 on the inter-node hop enough to keep the loss.
    """
    if intra != "auto":
        return intra
    # A codec of a user's own may have no block; 256 is the default of Int8.
    return None if inter is None else _eight_bits(getattr(inter, "block", 256))


_eight_bits = cache(Int8)
