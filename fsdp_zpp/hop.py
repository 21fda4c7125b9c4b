"""One hop: a collective over the ranks of one network level, whose bytes are counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from .labels import labelled

Kind = Literal["gather", "reduce"]
Level = Literal["inter", "intra"]


@dataclass
class Traffic:
    """Bytes sent by this rank, per kind of collective and level of the network.

    An all-gather of a payload of b bytes over n ranks sends b * (n - 1), an all-to-all b * (n - 1) / n: what
    each rank must put on the wire when every byte goes to its destination once.
    """

    sent: dict[tuple[Kind, Level], int] = field(default_factory=dict)

    def add(self, kind: Kind, level: Level, nbytes: int) -> None:
        """Count ``nbytes`` sent."""
        self.sent[kind, level] = self.sent.get((kind, level), 0) + nbytes


@dataclass(frozen=True, eq=False)
class Hop:
    """The collectives of one kind over one process group.

    Args:
        group: Ranks of this hop, in the order of the chunks.
        kind: ``"gather"`` for weights, ``"reduce"`` for gradients.
        level: ``"inter"`` between nodes or ``"intra"`` inside one.
        traffic: Where the bytes are counted.
    """

    group: dist.ProcessGroup
    kind: Kind
    level: Level
    traffic: Traffic

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size()

    def all_gather(self, payload: Tensor, label: str, out: Tensor | None = None) -> Tensor:
        """Gather payloads [chunks, nbytes] of all ranks into [size * chunks, nbytes], by rank; in ``out`` if given."""
        self._count_gather(payload)
        return self._all_gather(payload, label, out)

    def _count_gather(self, payload: Tensor) -> None:
        self.traffic.add(self.kind, self.level, payload.nbytes * (self.size - 1))

    def _all_gather(self, payload: Tensor, label: str, out: Tensor | None = None) -> Tensor:
        gathered = payload.new_empty((self.size * payload.shape[0], payload.shape[1])) if out is None else out
        with labelled(f"{self.level}_all_gather", label):
            all_gather_single()(gathered, payload, group=self.group)
        return gathered

    def all_to_all(self, payload: Tensor, label: str) -> Tensor:
        """Send the i-th part of ``payload`` [size * chunks, nbytes] to rank i; return what all sent, by rank."""
        received = torch.empty_like(payload)
        self.traffic.add(self.kind, self.level, payload.nbytes // self.size * (self.size - 1))
        with labelled(f"{self.level}_all_to_all", label):
            dist.all_to_all_single(received, payload, group=self.group)
        return received

    def reduce_scatter(self, values: Tensor, out: Tensor, label: str) -> None:
        """torch's own reduce-scatter into ``out``; not counted, as the bytes of torch's collectives never are."""
        with labelled(f"{self.level}_reduce_scatter", label):
            _reduce_scatter_single()(out, values, group=self.group)


def all_gather_together(hops: list[Hop], payloads: list[Tensor], label: str) -> list[Tensor]:
    """As :meth:`Hop.all_gather` of one payload [1, nbytes] for each hop, all over the same ranks, in one collective."""
    for hop, payload in zip(hops, payloads, strict=True):
        hop._count_gather(payload)
    gathered = hops[0]._all_gather(torch.cat(payloads, dim=1), label)
    return [part.contiguous() for part in gathered.split([payload.shape[1] for payload in payloads], dim=1)]


def hop_over(group: dist.ProcessGroup | None, kind: Kind, level: Level, traffic: Traffic) -> Hop | None:
    """The hop over ``group``, or None for a level that has one rank only and so nothing to send."""
    return None if group is None else Hop(group, kind, level, traffic)


def all_gather_single() -> Callable[..., Any]:
    """torch's collective of this kind, ``f(out, in, group=...)``."""
    # torch 2.13 renamed all_gather_into_tensor and deprecated the old name. Looked up at each call, so that
    # tools that wrap torch.distributed's functions see ours too.
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _reduce_scatter_single() -> Callable[..., Any]:
    """As :func:`all_gather_single`."""
    return getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
