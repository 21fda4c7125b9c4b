"""Outer step among nodes that come and go: whatever an exchange changes can be taken back, and chunks change owners.

[Note: Chunks of members]
The momentum is kept once, by the owners of chunks ([Note: Agreed weights] in outer_step.py). When members change, so do
the chunks: those who were members before put theirs together, and each of the new ones takes its own. What a lost
node owned is lost with it, and starts from zero, as the errors of error feedback do on all nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_zpp.config.local_steps import LocalSteps

from .hops import Traffic
from .mesh import ProcessMesh
from .node_chunks import chunk_numel
from .outer_optimizer import OuterFit
from .outer_step import OuterStep, OuterStepState


class Snapshot(NamedTuple):
    """What an exchange changes, apart from errors.

    Attributes:
        weights: Agreed weights and momentum of parameters, by name, on the CPU.
        fit: Figures from which the next momentum is chosen.
    """

    weights: dict[str, tuple[Tensor, Tensor]]
    fit: OuterFit


class OwnedState(OuterStepState):
    """An :class:`ElasticOuterStep` in a checkpoint.

    Attributes:
        owner: The node whose chunks of the momentum these are, and the number of nodes that it was one of.
    """

    owner: tuple[int, int]


class ElasticOuterStep(OuterStep):
    """Exchanges one fragment's weights between nodes that come and go; arguments are those of :class:`OuterStep`."""

    def __init__(self, config: LocalSteps, mesh: ProcessMesh, traffic: Traffic, label: str = "fragment") -> None:
        self._alone = mesh
        super().__init__(config, mesh, traffic, label)

    def momentum_among(self, mesh: ProcessMesh, numels: Mapping[str, int], *, owned: bool) -> dict[str, Tensor]:
        """Return this rank's chunks of the momentum among other nodes; see [Note: Chunks of members].

        Collective among the ranks with this local index.

        Args:
            mesh: Those ranks.
            numels: The number of values that they exchange of each parameter, the same on all of them.
            owned: Whether this node was a member before.

        Raises:
            RuntimeError: If a member is lost.
        """
        names = sorted(name for name, numel in numels.items() if numel)
        if not names:
            return {name: torch.zeros(0, dtype=torch.float32) for name in numels}
        self._settle()
        whole = torch.zeros(sum(numels[name] for name in names), dtype=torch.float32)
        parts = dict(zip(names, whole.split([numels[name] for name in names]), strict=True))
        for name, part in parts.items() if owned else ():
            (chunk,) = self._optimizer.momentum_of([name])
            own = part[self._node * chunk.numel() :][: chunk.numel()]
            own.copy_(chunk[: own.numel()])
        dist.all_reduce(whole, group=mesh.inter)
        chunks = {name: chunk_numel(numel, mesh.topology.nodes) for name, numel in numels.items()}
        momentum = {name: torch.zeros(chunk, dtype=torch.float32) for name, chunk in chunks.items()}
        for name, part in parts.items():
            own = part[mesh.rank * momentum[name].numel() :][: momentum[name].numel()]
            momentum[name][: own.numel()] = own
        return momentum

    def connect(self, mesh: ProcessMesh, momentum: Mapping[str, Tensor]) -> None:
        """Exchange with other nodes from now on.

        Args:
            mesh: The ranks with this local index, as nodes of one.
            momentum: This rank's chunks among them.
        """
        self._settle()
        self._set_nodes(mesh)
        for name, chunk in momentum.items():
            self._optimizer.start(name, chunk.numel(), self._device, self._agreed[name].device)
            (kept,) = self._optimizer.momentum_of([name])
            kept.copy_(chunk)
        self._optimizer.clear_products()  # a lost node's part would be missing from their sum

    def disconnect(self) -> None:
        """Let go of the other nodes, whose sockets close when nothing refers to them: they are waiting for that."""
        self._settle()
        owner = self._node, self._nodes
        self._set_nodes(self._alone)
        self._node, self._nodes = owner

    @property
    def last_fit(self) -> OuterFit:
        """Return the figures from which the next momentum is chosen."""
        self._settle()
        return self._optimizer.last_fit

    def take_over(self, agreed: Mapping[str, Tensor], fit: OuterFit, shards: Mapping[str, Tensor]) -> None:
        """Take over the agreed weights of other nodes; :meth:`connect` comes next.

        Args:
            agreed: The weights.
            fit: Another node's :attr:`last_fit`.
            shards: What this rank holds of at least these parameters, of which only sizes and device matter.
        """
        self.reset()
        self.start({name: shards[name] for name in agreed})
        for name, weights in agreed.items():
            self._agreed[name].copy_(weights)
        self._optimizer.last_fit = fit

    def snapshot(self, names: Collection[str]) -> Snapshot:
        """Return what an exchange of some parameters changes, apart from errors."""
        self._settle()
        weights = {}
        for name in names:
            (momentum,) = self._optimizer.momentum_of([name])
            weights[name] = self._agreed[name].to("cpu", copy=True), momentum.to("cpu", copy=True)
        return Snapshot(weights, self._optimizer.last_fit)

    def rollback(self, snapshot: Snapshot) -> None:
        """Take back an exchange; errors start from zero with the :meth:`connect` that comes next."""
        self._settle()
        for name, (agreed, momentum) in snapshot.weights.items():
            self._agreed[name].copy_(agreed)
            (kept,) = self._optimizer.momentum_of([name])
            kept.copy_(momentum)
        self._optimizer.last_fit = snapshot.fit

    def state_dict(self) -> OwnedState:
        """Return the agreed weights, this rank's momentum, its owner and its errors, on the CPU."""
        return {**super().state_dict(), "owner": (self._node, self._nodes)}

    def load_state_dict(self, state: OuterStepState, shards: Mapping[str, Tensor]) -> None:
        """Continue with what :meth:`state_dict` returned, once :meth:`connect` is called.

        Raises:
            ValueError: If ``state`` is of other parameters, or of another configuration.
        """
        owner = state.get("owner")
        if not isinstance(owner, tuple | list):
            raise ValueError(
                f"{self.label}: the checkpoint was saved by nodes of one job, but this strategy has elastic nodes; "
                "load weights alone, saved under agreed_weights"
            )
        self._node, self._nodes = owner
        super().load_state_dict(state, shards)
