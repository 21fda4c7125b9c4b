"""A fragment of elastic nodes: exchanges can be taken back, and who joins takes over what others have agreed on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from fsdp_zpp.collectives.elastic_outer_step import ElasticOuterStep, Snapshot
from fsdp_zpp.collectives.mesh import ProcessMesh
from fsdp_zpp.collectives.outer_optimizer import OuterFit
from fsdp_zpp.config.local_steps import LocalSteps

from .fragment import Fragment


def active_local_steps(local_steps: LocalSteps | None, ranks: ProcessMesh) -> LocalSteps | None:
    """Return the local steps that are active on ``ranks``; None on one node, which has nobody to exchange with.

    Raises:
        ValueError: If nodes are elastic and ``ranks`` are not those of one node, and all of them.
    """
    if local_steps is None or local_steps.elastic is None:
        return None if ranks.inter is None else local_steps
    if ranks.inter is not None or ranks.topology.world != dist.get_world_size():
        raise ValueError(
            f"elastic nodes are jobs of their own, but this job of {dist.get_world_size()} ranks has its model on "
            f"{ranks.topology}: start each node with torchrun --nnodes 1, shard over all of its ranks, and leave out "
            "gpus_per_node"
        )
    return local_steps


class BeforeExchange(NamedTuple):
    """What an exchange of a fragment changes."""

    exchanges: Snapshot
    changed: set[str]
    sent: list[str]
    exchanges_sent: int


class ElasticFragment(Fragment):
    """Weights of a unit, which nodes that come and go train on their own and exchange."""

    outer: ElasticOuterStep

    @property
    def has_loaded(self) -> bool:
        """Return whether it has a state from a checkpoint, until the next forward."""
        return self._loaded is not None

    def snapshot(self) -> BeforeExchange:
        """Return what :meth:`send` would change now."""
        kept = self.outer.snapshot(self._changed)
        return BeforeExchange(kept, set(self._changed), list(self._sent), self.progress.sent)

    def rollback(self, before: BeforeExchange) -> None:
        """Take back what was sent since ``before``."""
        self.outer.rollback(before.exchanges)
        self._changed, self._sent, self.progress.arrives = before.changed, before.sent, None
        self.progress.sent = before.exchanges_sent  # it may have failed before it was counted

    def numels(self) -> dict[str, int]:
        """Return how many values this rank exchanges of each parameter that has agreed weights."""
        return {name: agreed.numel() for name, agreed in self.outer.agreed.items()}

    def take_over(self, agreed: Mapping[str, Tensor], fit: OuterFit) -> None:
        """Continue from weights that other nodes have agreed on, with their fit. Collective over the node."""
        self.outer.take_over(agreed, fit, self._exchanged(agreed.keys()))
        self._changed, self._sent, self.progress.arrives = set(), [], None
        self.outer.receive(self._exchanged(agreed.keys()))
        self._after_write(agreed.keys())
