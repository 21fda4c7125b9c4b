"""One exchange between nodes that train on their own: the outer step of local-update training, for one fragment.

    this node's weights         [numel] of this rank, in their own dtype
        | what has changed      the agreed weights less these, fp32
    mean over nodes             encode, all-to-all among the ranks with this local index, decode and sum in fp32
        | outer step            SGD with momentum, each rank on its chunk: 1 / nodes of this rank's values
    update of the weights       encode, all-gather among the same ranks, decode
        | added to the agreed weights, from which all nodes go on

[Note: Agreed weights]
The agreed weights are those that the outer steps have made, in fp32, the same on all nodes bit for bit: each of them,
the owner of a chunk too, adds the update as it decodes it. A rank keeps its part of them, since it is their change that
is small enough to be encoded in 4 bits. Nodes go on from the agreed weights as rounded to the dtype of the model, so
that rounding is no change of theirs. The momentum is kept once, by the owners of the chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_zpp.codecs.base import full_precision
from fsdp_zpp.config.local_steps import LocalSteps
from fsdp_zpp.config.topology import Topology

from .error_buffer import ErrorBuffer
from .gradient_reduce import GradientReduce
from .hops import Hop, Traffic, decode, encode
from .mesh import ProcessMesh


class OuterStep:
    """Exchanges one fragment's weights between nodes, and keeps what that needs from one exchange to the next.

    Args:
        config: How.
        mesh: All ranks, on several nodes.
        traffic: Where bytes are counted.
        label: Names the fragment in profiles and errors.

    Raises:
        ValueError: If there is one node.
    """

    def __init__(self, config: LocalSteps, mesh: ProcessMesh, traffic: Traffic, label: str = "fragment") -> None:
        if mesh.inter is None:
            raise ValueError(f"{label}: local steps exchange weights between nodes, and {mesh.topology} is one node")
        self._config, self._label = config, label
        self._nodes = mesh.topology.nodes
        self._codec = config.codec or full_precision(torch.float32)
        across = ProcessMesh(
            Topology(self._nodes, 1), mesh.rank // mesh.topology.gpus_per_node, None, mesh.inter, mesh.inter
        )
        feedback = config.error_feedback
        self._reduce = GradientReduce(across, None, self._codec, traffic, label, error_feedback=feedback)
        self._gather = Hop(mesh.inter, "gather", "inter", traffic)
        self._errors_back = None if feedback is None else ErrorBuffer(feedback.beta, feedback.dtype)
        self._agreed: Tensor | None = None
        self._momentum: Tensor | None = None

    @property
    def agreed(self) -> Tensor:
        """The agreed weights of this rank, fp32, flat; see [Note: Agreed weights]."""
        assert self._agreed is not None, f"{self._label}: start() comes first"
        return self._agreed

    @torch.no_grad()
    def start(self, shards: Sequence[Tensor]) -> None:
        """Take the weights of this rank, which must be the same on all nodes, for the agreed ones.

        Args:
            shards: The weights that this rank holds of the fragment.
        """
        numel = sum(shard.numel() for shard in shards)
        chunk = -(-numel // self._nodes)  # a collective takes chunks of one size, so the last one is padded
        device = shards[0].device
        self._agreed = torch.zeros(self._nodes * chunk, device=device)
        self._momentum = torch.zeros(chunk, device=device)
        for agreed, shard in self._beside(shards):
            agreed.copy_(shard)

    @torch.no_grad()
    def exchange(self, shards: Sequence[Tensor]) -> None:
        """Average over nodes what ``shards`` have changed, make the outer step, and continue from its weights.

        Collective among the ranks with this local index.

        Args:
            shards: As in :meth:`start`, changed by this node's steps; receive the agreed weights.
        """
        change = torch.zeros_like(self.agreed)
        for (agreed, shard), (out, _) in zip(self._beside(shards), self._beside(shards, change), strict=True):
            torch.sub(agreed.to(shard.dtype).float(), shard, out=out)
        update = self._outer_step(self._mean_over_nodes(change))
        payload = encode(self._codec, update, 1, 1, self._label, self._prepared_errors(update))
        gathered = self._gather.all_gather(payload, self._label)
        decode(self._codec, gathered, change, 1, self._nodes, self._label)  # which is not needed any more
        self.agreed.add_(change)
        for agreed, shard in self._beside(shards):
            shard.copy_(agreed)

    def _mean_over_nodes(self, change: Tensor) -> Tensor:
        mean = change.new_empty(change.numel() // self._nodes)
        self._reduce(change, mean)
        if self._reduce.errors is not None:
            self._reduce.errors.step_made()
        return mean

    def _outer_step(self, gradient: Tensor) -> Tensor:
        """What SGD adds to this rank's chunk of the weights, given its outer gradient."""
        assert self._momentum is not None
        config = self._config
        self._momentum.mul_(config.outer_momentum).add_(gradient)
        step = gradient.add_(self._momentum, alpha=config.outer_momentum) if config.nesterov else self._momentum
        return step.mul(-config.outer_lr)

    def _prepared_errors(self, update: Tensor) -> ErrorBuffer | None:
        errors = self._errors_back
        return None if errors is None else errors.prepare(1, update.numel(), update.device)

    def _beside(self, shards: Sequence[Tensor], flat: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
        """The shards' parts of ``flat``, by default of the agreed weights, each as its shard is shaped, and the shards.

        Raises:
            ValueError: If the shards are not those that :meth:`start` was given.
        """
        flat = self.agreed if flat is None else flat
        sizes = [shard.numel() for shard in shards]
        if not 0 <= flat.numel() - sum(sizes) < self._nodes:
            raise ValueError(f"{self._label}: {sum(sizes)} values are not the {flat.numel()} of the agreed weights")
        parts = flat[: sum(sizes)].split(sizes)
        return [(part.view(shard.shape), shard) for part, shard in zip(parts, shards, strict=True)]

    # ---- in checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The agreed weights, this rank's momentum and its errors, on the CPU."""
        assert self._momentum is not None
        errors = self._reduce.errors
        return {
            "agreed": self.agreed.cpu(),
            "momentum": self._momentum.cpu(),
            "errors": None if errors is None else errors.state_dict(),
            "errors_back": None if self._errors_back is None else self._errors_back.state_dict(None),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what :meth:`state_dict` gave, on the device of the weights that :meth:`start` was given.

        Raises:
            ValueError: If that was of another size, or under another configuration of error feedback.
        """
        if state["agreed"].shape != self.agreed.shape:
            raise ValueError(
                f"{self._label}: {state['agreed'].numel()} agreed weights were saved, but this rank holds "
                f"{self.agreed.numel()}"
            )
        if (state["errors"] is None) != (self._reduce.errors is None):
            kept = "without" if state["errors"] is None else "with"
            raise ValueError(f"{self._label}: the outer state was saved {kept} error feedback")
        device = self.agreed.device
        self._agreed, self._momentum = state["agreed"].to(device), state["momentum"].to(device)
        if self._reduce.errors is not None and self._errors_back is not None:
            self._reduce.errors.load_state_dict(state["errors"])
            self._errors_back.load_state_dict(state["errors_back"])
            self._errors_back.move(device)
