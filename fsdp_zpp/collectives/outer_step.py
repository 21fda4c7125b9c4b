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

from .error_state import ErrorFeedbackState
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
        feedback = config.error_feedback
        self._reduce = GradientReduce(mesh.across_nodes(), None, self._codec, traffic, label, error_feedback=feedback)
        self._gather = Hop(mesh.inter, "gather", "inter", traffic)
        self._back = None if feedback is None else ErrorFeedbackState(feedback, ["back"])
        self._shapes: list[torch.Size] = []
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
            shards: The weights that this rank holds of the fragment, at least one tensor.
        """
        self._shapes = [shard.shape for shard in shards]
        numel = sum(shard.numel() for shard in shards)
        chunk = -(-numel // self._nodes)  # a collective takes chunks of one size, so the last one is padded
        self._agreed = torch.zeros(self._nodes * chunk, dtype=torch.float32, device=shards[0].device)
        self._momentum = torch.zeros(chunk, dtype=torch.float32, device=shards[0].device)
        for agreed, shard in self._beside(shards):
            agreed.copy_(shard)

    @torch.no_grad()
    def exchange(self, shards: Sequence[Tensor]) -> None:
        """Average over nodes what ``shards`` have changed, make the outer step, and continue from its weights.

        Collective among the ranks with this local index.

        Args:
            shards: As in :meth:`start`, changed by this node's steps; receive the agreed weights.

        Raises:
            ValueError: If they have other shapes than those, before any communication.
        """
        change = torch.zeros_like(self.agreed)
        held = self._beside(shards)
        for (agreed, shard), (out, _) in zip(held, self._beside(shards, change), strict=True):
            torch.sub(agreed.to(shard.dtype).float(), shard, out=out)
        update = self._outer_step(self._mean_over_nodes(change))
        payload = self._encoded(update)
        gathered = self._gather.all_gather(payload, self._label)
        decode(self._codec, gathered, change, 1, self._nodes, self._label)  # in place of the changes, which were sent
        self.agreed.add_(change)
        for agreed, shard in held:
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

    def _encoded(self, update: Tensor) -> Tensor:
        """The payload of this rank's update, with what earlier ones left out."""
        if self._back is None:
            return encode(self._codec, update, 1, 1, self._label)
        self._back.begin(update.device)
        errors = self._back.buffer("back")
        assert errors is not None
        prepared = errors.prepare(1, update.numel(), update.device)
        payload = encode(self._codec, update, 1, 1, self._label, prepared)
        self._back.step_made()
        return payload

    def _beside(self, shards: Sequence[Tensor], flat: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
        """The shards' parts of ``flat``, by default of the agreed weights, each as its shard is shaped, and the shards.

        Raises:
            ValueError: If the shards have other shapes than those that :meth:`start` was given.
        """
        flat = self.agreed if flat is None else flat
        shapes = [shard.shape for shard in shards]
        if shapes != self._shapes:
            given, started = ([list(shape) for shape in each] for each in (shapes, self._shapes))
            raise ValueError(f"{self._label}: shards of {given} were given, but it started with {started}")
        sizes = [shard.numel() for shard in shards]
        parts = flat[: sum(sizes)].split(sizes)
        return [(part.view(shard.shape), shard) for part, shard in zip(parts, shards, strict=True)]

    # ---- in checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The agreed weights, this rank's momentum and its errors, on the CPU."""
        assert self._momentum is not None
        errors = {name: None if state is None else state.state_dict() for name, state in self._errors.items()}
        # Copies: on a CPU, those that are kept change in place with the next exchange.
        kept = {"agreed": self.agreed.to("cpu", copy=True), "momentum": self._momentum.to("cpu", copy=True)}
        return {"shapes": [list(shape) for shape in self._shapes], **kept, **errors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what :meth:`state_dict` gave, on the device of the weights that :meth:`start` was given.

        Raises:
            ValueError: If that was of other shards, or under another configuration of error feedback.
        """
        started = [list(shape) for shape in self._shapes]
        if state["shapes"] != started:
            raise ValueError(f"{self._label}: shards of {state['shapes']} were saved, but this rank holds {started}")
        if (state["errors"] is None) != (self._reduce.errors is None):
            kept = "without" if state["errors"] is None else "with"
            raise ValueError(f"{self._label}: the outer state was saved {kept} error feedback")
        for name, errors in self._errors.items():  # first, since it may fail
            if errors is not None:
                errors.load_state_dict(state[name])
        device = self.agreed.device
        self._agreed, self._momentum = (state[name].to(device, copy=True) for name in ("agreed", "momentum"))

    @property
    def _errors(self) -> dict[str, ErrorFeedbackState | None]:
        return {"errors": self._reduce.errors, "errors_back": self._back}
