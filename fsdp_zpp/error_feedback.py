"""Configuration of error feedback on quantized gradients, and where it keeps errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .codecs import Codec, Int8
from .topology import Topology


@dataclass(frozen=True)
class LoCo:
    """LoCo's error feedback: the gradient sent is ``h = g + e``, then ``e = beta*e + (1-beta)*(h - deq(Q(h)))``.

    Source: LoCo, arXiv 2407.04480. ``beta`` weighs the old error, so 0 is classical error feedback.

    Args:
        beta: Weight of the old error, in [0, 1).
        reset_every: Optimizer steps after which all errors are reset to zero; 0 never resets.
        hops: Where errors are kept: ``"inter"`` (parameters / gpus_per_node values) or ``"both"``.
        dtype: ``Int8(block)`` to keep the errors in 8 bits; None keeps them in fp32.

    Raises:
        ValueError: If a value is outside of its range.
        TypeError: If ``dtype`` is neither.
    """

    beta: float = 0.8
    reset_every: int = 1024
    hops: Literal["inter", "both"] = "inter"
    dtype: Int8 | None = None

    def __post_init__(self) -> None:
        if isinstance(self.beta, bool) or not isinstance(self.beta, (int, float)) or not 0 <= self.beta < 1:
            raise ValueError(f"beta must be in [0, 1), got {self.beta!r}")
        if isinstance(self.reset_every, bool) or not isinstance(self.reset_every, int) or self.reset_every < 0:
            raise ValueError(f"reset_every must be an int of 0 or more optimizer steps, got {self.reset_every!r}")
        if self.hops not in ("inter", "both"):
            raise ValueError(f"hops must be 'inter' or 'both', got {self.hops!r}")
        if self.dtype is not None and not isinstance(self.dtype, Int8):
            raise TypeError(f"dtype must be Int8(...) or None (fp32), got {self.dtype!r}")

    def __str__(self) -> str:
        reset = f"reset every {self.reset_every} steps" if self.reset_every else "never reset"
        return f"beta {self.beta}, {reset}, kept in {self.dtype or 'fp32'}"

    def nbytes(self, numel: int) -> int:
        """Bytes of the errors of a chunk of ``numel`` values."""
        return 4 * numel if self.dtype is None else self.dtype.nbytes(numel)


@dataclass(frozen=True)
class Sender:
    """What one rank compresses for one hop, and so keeps errors of: ``chunks`` of ``numel`` values."""

    chunks: int
    numel: int


def senders(
    config: LoCo | None,
    codecs: tuple[Codec | None, Codec | None],
    keep: str,
    topology: Topology,
    numel: int,
) -> dict[str, Sender]:
    """Where a gradient reduction keeps errors, by the name of what is sent.

    ``"intra"`` and ``"inter"`` are the two hops. Sums that are gathered back, as for optimizer letters other than ``G``
    (``"back"``), are compressed once more, by the codec of the hop that made them, and have errors if that has.

    Args:
        config: Its error feedback, if any.
        codecs: Of the hop inside and of that between nodes.
        keep: The letter of the optimizer.
        topology: The layout of the ranks.
        numel: Values of the gradient that a rank keeps.
    """
    if config is None:
        return {}
    intra, inter = codecs
    nodes, gpus = topology.nodes, topology.gpus_per_node
    part = -(-numel // gpus) if keep == "N" else numel  # of this local index; for G, in chunks
    chunk = numel if keep == "G" else -(-part // nodes)
    found: dict[str, Sender] = {}
    if config.hops == "both" and gpus > 1 and intra is not None:
        found["intra"] = Sender(gpus * nodes, numel) if keep == "G" else Sender(gpus, part)
    if nodes > 1 and inter is not None:
        found["inter"] = Sender(nodes, chunk)
    if keep != "G" and ("inter" in found or (nodes == 1 and keep == "N" and "intra" in found)):
        found["back"] = Sender(1, chunk)
    return found


def error_nbytes(
    config: LoCo | None, codecs: tuple[Codec | None, Codec | None], keep: str, topology: Topology, numel: int
) -> int:
    """Bytes of all errors that a gradient reduction keeps on a rank; arguments as of :func:`senders`."""
    if config is None:
        return 0
    sent = senders(config, codecs, keep, topology, numel).values()
    return sum(sender.chunks * config.nbytes(sender.numel) for sender in sent)
