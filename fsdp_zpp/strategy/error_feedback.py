"""Error feedback (LoCo) as users configure it, and the layout of ranks on nodes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fsdp_zpp.codecs import Codec, Int8
from fsdp_zpp.names import did_you_mean, explains_keywords

# ---- topology
#
# Layout of ranks on nodes x GPUs, without process groups.


@dataclass(frozen=True)
class Topology:
    """``world`` ranks on nodes of ``gpus_per_node``: rank = node * gpus_per_node + local."""

    world: int
    gpus_per_node: int

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1 or self.world % self.gpus_per_node:
            divisors = [d for d in range(1, self.world + 1) if self.world % d == 0]
            raise ValueError(
                f"the world size must be divisible by gpus_per_node, got a world of {self.world} and "
                f"gpus_per_node={self.gpus_per_node}; allowed are {divisors}"
            )

    @cached_property
    def nodes(self) -> int:
        return self.world // self.gpus_per_node

    def shard_count(self, scope: str) -> int:
        """Return the number of shards into which a scope cuts a state: D(scope) in PaRO (arXiv 2310.06003)."""
        return {"N": 1, "I": self.gpus_per_node, "G": self.world}[scope]

    def intra_partition(self) -> list[list[int]]:
        """Return the ranks of each node, ordered by local index."""
        starts = range(0, self.world, self.gpus_per_node)
        return [list(range(start, start + self.gpus_per_node)) for start in starts]

    def inter_partition(self) -> list[list[int]]:
        """Return the ranks of each local index, one per node, ordered by node."""
        return [list(range(local, self.world, self.gpus_per_node)) for local in range(self.gpus_per_node)]

    def __str__(self) -> str:
        return f"{self.nodes} node{'s' * (self.nodes > 1)} x {self.gpus_per_node}"


# ---- error feedback
#
# Configuration of error feedback on quantized gradients, and the error buffers that it needs.


@explains_keywords
@dataclass(frozen=True)
class LoCo:
    """LoCo's error feedback: send ``Q(h)`` with ``h = g + e``, then set ``e = beta*e + (1-beta)*(h - deq(Q(h)))``.

    ``g`` is the gradient, ``e`` the error and ``Q`` the codec (arXiv 2407.04480). A ``beta`` of 0 is classical error
    feedback. ``decay`` multiplies errors before they are used: ``LoCo(beta=0, decay=0.95, reset_every=0)`` is the error
    feedback of SparseLoCo (arXiv 2508.15706, algorithm 1), where errors replace the outer optimizer's momentum.

    Args:
        beta: Weight of the old error, in [0, 1).
        reset_every: Number of optimizer steps after which all errors are reset to zero; 0 never resets them.
        hops: The hops with error feedback: ``"inter"`` (parameters / gpus_per_node errors per rank) or ``"both"``.
        dtype: ``Int8(block)`` keeps the errors in 8 bits; None keeps them in fp32.
        decay: Factor on the errors at each use, in (0, 1].

    Raises:
        ValueError: If ``beta``, ``reset_every``, ``hops`` or ``decay`` is out of range.
        TypeError: If ``dtype`` is neither an ``Int8`` nor None.
    """

    beta: float = 0.8
    reset_every: int = 1024
    hops: Literal["inter", "both"] = "inter"
    dtype: Int8 | None = None
    decay: float = 1.0

    def __post_init__(self) -> None:
        # bool counts as an int in Python; a beta of 1 would ignore every new error.
        if isinstance(self.beta, bool) or not isinstance(self.beta, (int, float)) or not 0 <= self.beta < 1:
            raise ValueError(f"beta must be in [0, 1), got {self.beta!r}")
        if isinstance(self.reset_every, bool) or not isinstance(self.reset_every, int) or self.reset_every < 0:
            raise ValueError(f"reset_every must be an int of 0 or more optimizer steps, got {self.reset_every!r}")
        if self.hops not in ("inter", "both"):
            hint = did_you_mean(self.hops, ("inter", "both"), "{!r}", before="; ")
            raise ValueError(f"hops must be 'inter' or 'both', got {self.hops!r}{hint}")
        if self.dtype is not None and not isinstance(self.dtype, Int8):
            raise TypeError(f"dtype must be Int8(...) or None (fp32), got {self.dtype!r}")
        if isinstance(self.decay, bool) or not isinstance(self.decay, (int, float)) or not 0 < self.decay <= 1:
            raise ValueError(f"decay must be in (0, 1], got {self.decay!r}")

    def __str__(self) -> str:
        reset = f"reset every {self.reset_every} steps" if self.reset_every else "never reset"
        decay = f", decay {self.decay}" if self.decay < 1 else ""
        return f"beta {self.beta}{decay}, {reset}, kept in {self.dtype or 'fp32'}"

    def nbytes(self, numel: int) -> int:
        """Return the bytes of the errors for a chunk of ``numel`` values."""
        return 4 * numel if self.dtype is None else self.dtype.nbytes(numel)


def error_buffer_specs(
    config: LoCo, codecs: tuple[Codec | None, Codec | None], optimizer_scope: str, topology: Topology, numel: int
) -> dict[str, tuple[int, int]]:
    """Return the error buffers of a gradient reduction, by the name of the transfer: chunks, and values of a chunk.

    ``"intra"`` and ``"inter"`` are the two hops. ``"back"`` is the all-gather of the sums after the last hop, unless
    the optimizer scope is ``G``. It has the codec of the hop that makes the sums, and errors if that hop has errors.

    ``codecs`` are those of the intra-node and the inter-node hop. A rank keeps ``numel`` values of the gradient.
    """
    intra, inter = codecs
    nodes, gpus = topology.nodes, topology.gpus_per_node
    # ``numel`` counts, by optimizer scope: G, this rank's chunk; I, the part that all ranks of one local index keep;
    # N, the whole gradient. Both divisions round up, since the reduction pads parts and chunks.
    part = -(-numel // gpus) if optimizer_scope == "N" else numel
    chunk = numel if optimizer_scope == "G" else -(-part // nodes)
    # A hop with a single rank sends nothing, so it encodes nothing.
    specs: dict[str, tuple[int, int]] = {}
    if config.hops == "both" and gpus > 1 and intra is not None:
        specs["intra"] = (gpus * nodes, numel) if optimizer_scope == "G" else (gpus, part)
    if nodes > 1 and inter is not None:
        specs["inter"] = nodes, chunk
    # On one node the intra-node hop makes the sums, and only optimizer scope N gathers them inside the node.
    if optimizer_scope != "G" and ("inter" in specs or (nodes == 1 and optimizer_scope == "N" and "intra" in specs)):
        specs["back"] = 1, chunk
    return specs


def error_nbytes(
    config: LoCo | None, codecs: tuple[Codec | None, Codec | None], optimizer_scope: str, topology: Topology, numel: int
) -> int:
    """Return the bytes of a rank's errors for a reduction; for arguments see :func:`error_buffer_specs`."""
    if config is None:
        return 0
    specs = error_buffer_specs(config, codecs, optimizer_scope, topology, numel).values()
    return sum(chunks * config.nbytes(chunk) for chunks, chunk in specs)


def check_loco(error_feedback: object) -> None:
    if error_feedback is not None and not isinstance(error_feedback, LoCo):
        hint = " (did you mean LoCo()?)" if error_feedback is LoCo else ""
        raise TypeError(f"error_feedback must be a LoCo or None, got {error_feedback!r}{hint}")


def check_error_feedback(error_feedback: LoCo | None, name: str, intra: Codec | None, inter: Codec | None) -> None:
    """Raise if no hop of ``error_feedback`` has a codec to correct; ``name`` is the argument that gave ``inter``."""
    check_loco(error_feedback)
    if error_feedback is not None and inter is None and (intra is None or error_feedback.hops == "inter"):
        raise ValueError(
            f"error_feedback corrects the error of the gradient codec, but {name}=None has no error; "
            f"set {name}=Int4(...) or Int8(...), or remove error_feedback"
        )
    fed_back = () if error_feedback is None else (inter, intra)[: 1 + (error_feedback.hops == "both")]
    for codec in fed_back:
        if codec is not None and codec.mixes_values:
            raise ValueError(
                f"error_feedback can't correct {codec!r}: it mixes values, so errors fade slowly; "
                f"choose Int4(...) or Int8(...), or remove error_feedback"
            )
