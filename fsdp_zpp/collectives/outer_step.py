"""One exchange between nodes that train on their own: the outer step of local-update training, for one fragment.

    this node's weights         [numel] of this rank, in their own dtype
        | what has changed      the agreed weights less these, fp32
    mean over nodes             encode, all-to-all among the ranks with this local index, decode and sum in fp32
        | outer step            SGD with momentum, each rank on its chunk: 1 / nodes of this rank's values
    update of the weights       encode, all-gather among the same ranks, decode
        | added to the agreed weights, from which all nodes go on

[Note: Agreed weights]
The agreed weights are those that the outer steps have made, in fp32, the same on all nodes bit for bit: every node, the
owner of a chunk too, adds the decoded update. A rank keeps its part of them, because only changes against them are
small enough for 4 bits. Nodes go on from the agreed weights as rounded to the dtype of the model, and changes are
measured from there, so that rounding is not sent as a change. The momentum is kept once, by the owners of the chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_zpp.codecs.base import full_precision
from fsdp_zpp.config.local_steps import LocalSteps

from .devices import for_collectives
from .error_state import ErrorFeedbackState
from .gradient_reduce import GradientReduce
from .held_errors import Extent
from .hops import Hop, Traffic, decode, encode
from .mesh import ProcessMesh
from .streams import SideStream, keep_until_read, record_event, wait_for


class OuterStep:
    """Exchanges one fragment's weights between nodes, and keeps what that needs from one exchange to the next.

    Args:
        config: How.
        mesh: All ranks, on several nodes.
        traffic: Where bytes are counted.
        label: Names the fragment in profiles and errors.

    Attributes:
        stream: Where exchanges travel; fragments may share it.

    Raises:
        ValueError: If there is one node.
    """

    def __init__(self, config: LocalSteps, mesh: ProcessMesh, traffic: Traffic, label: str = "fragment") -> None:
        if mesh.inter is None:
            raise ValueError(f"{label}: local steps exchange weights between nodes, and {mesh.topology} is one node")
        self._config, self._label, self.stream = config, label, SideStream()
        self._nodes = mesh.topology.nodes
        self._codec = config.codec or full_precision(torch.float32)
        feedback = config.error_feedback
        self._reduce = GradientReduce(mesh.across_nodes(), None, self._codec, traffic, label, error_feedback=feedback)
        self._gather = Hop(mesh.inter, "gather", "inter", traffic)
        self._back = None if feedback is None else ErrorFeedbackState(feedback, ["back"])
        self._shapes: list[torch.Size] = []
        self._agreed: Tensor | None = None
        self._momentum: Tensor | None = None
        self._arrival: Any = None
        self._device = torch.device("cpu")

    @property
    def label(self) -> str:
        """The fragment's name in profiles and errors."""
        return self._label

    @label.setter
    def label(self, label: str) -> None:
        self._label = self._reduce.label = label

    @property
    def has_started(self) -> bool:
        """Whether there are agreed weights."""
        return self._agreed is not None

    @property
    def agreed(self) -> Tensor:
        """The agreed weights of this rank, fp32, flat, those on their way included; see [Note: Agreed weights]."""
        assert self._agreed is not None, f"{self.label}: start() comes first"
        wait_for(self._arrival, self._device)
        return self._agreed

    @torch.no_grad()
    def start(self, shards: Sequence[Tensor]) -> None:
        """Adopt the weights of this rank, which must be the same on all nodes, as the agreed ones.

        Args:
            shards: The weights that this rank holds of the fragment, at least one tensor.
        """
        self._settle()
        self._shapes = [shard.shape for shard in shards]
        # Parameters may be offloaded; exchanges travel from where collectives take them.
        self._device = for_collectives(shards[0].new_empty(0), self._gather.group).device
        numel = sum(shard.numel() for shard in shards)
        # A collective takes chunks of one size, so the last one is padded; and none is empty.
        chunk = max(-(-numel // self._nodes), 1)
        kept_on = torch.device("cpu") if self._config.offload else self._device
        kept = self._momentum
        if self._agreed is None or kept is None or (kept.numel(), kept.device) != (chunk, kept_on):
            self._agreed = torch.zeros(self._nodes * chunk, dtype=torch.float32, device=kept_on)
            self._momentum = torch.empty_like(self._agreed[:chunk])
        assert self._momentum is not None
        self._momentum.zero_()
        for agreed, shard in self._beside(shards, self._agreed):
            agreed.copy_(shard)

    def _settle(self) -> None:
        """Have the current stream wait for what is on its way, before anything else becomes of its memory."""
        wait_for(self._arrival, self._device)
        self._arrival = None

    def agrees_with(self, shards: Sequence[Tensor]) -> bool:
        """Whether ``shards``, as in :meth:`start`, are the agreed weights."""
        beside = self._beside(shards, self.agreed)
        return all(torch.equal(agreed.to(shard.device, shard.dtype), shard) for agreed, shard in beside)

    @torch.no_grad()
    def send(self, shards: Sequence[Tensor]) -> None:
        """Average over nodes what ``shards`` have changed, and make the outer step. :meth:`receive` follows.

        Collective among the ranks with this local index.

        Args:
            shards: As in :meth:`start`, changed by this node's steps; may change again as soon as this returns.

        Raises:
            ValueError: If they have other shapes than those, before any communication.
        """
        # Zeros where it is padded.
        change = torch.zeros(self.agreed.shape, dtype=torch.float32, device=self._device)
        held = self._beside(shards, self.agreed)
        for (agreed, shard), (out, _) in zip(held, self._beside(shards, change), strict=True):
            torch.sub(agreed.to(out.device, shard.dtype).float(), shard.to(out.device), out=out)
        with self.stream.after_current(self._device):
            for kept in (self._agreed, self._momentum):  # a model may go while an exchange is on its way
                assert kept is not None
                keep_until_read(kept)
            update = self._outer_step(self._mean_over_nodes(keep_until_read(change)))
            payload = self._encoded(update)
            gathered = self._gather.all_gather(payload, self.label)
            decode(self._codec, gathered, change, 1, self._nodes, self.label)  # in place of the changes: they are sent
            self.agreed.add_(change.to(self.agreed.device))
            self._arrival = record_event(change)

    @torch.no_grad()
    def receive(self, shards: Sequence[Tensor], mix: float = 1.0) -> None:
        """Have ``shards`` go on from the agreed weights, or from a mixture of these and their own.

        Args:
            shards: As in :meth:`start`.
            mix: Share of the agreed weights.
        """
        for agreed, shard in self._beside(shards, self.agreed):
            moved = agreed.to(shard.device)
            shard.copy_(moved if mix == 1 else shard.float().lerp(moved, mix))

    def exchange(self, shards: Sequence[Tensor]) -> None:
        """:meth:`send`, and wait to :meth:`receive`."""
        self.send(shards)
        self.receive(shards)

    def _mean_over_nodes(self, change: Tensor) -> Tensor:
        mean = change.new_empty(change.numel() // self._nodes)
        self._reduce(change, mean)
        if self._reduce.errors is not None:
            self._reduce.errors.step_made()
        return mean

    def _outer_step(self, gradient: Tensor) -> Tensor:
        """What SGD adds to this rank's chunk of the weights, given its outer gradient."""
        assert self._momentum is not None
        config, momentum = self._config, self._momentum.to(self._device)
        momentum.mul_(config.outer_momentum).add_(gradient)
        if momentum is not self._momentum:
            self._momentum.copy_(momentum)
        step = gradient.add_(momentum, alpha=config.outer_momentum) if config.nesterov else momentum
        return step.mul(-config.outer_lr)

    def _encoded(self, update: Tensor) -> Tensor:
        """The payload of this rank's update, with what earlier ones left out."""
        if self._back is None:
            return encode(self._codec, update, 1, 1, self.label)
        self._back.begin(update.device)
        errors = self._back.buffer("back")
        assert errors is not None
        prepared = errors.prepare(Extent(update.numel(), (0,)), update.device)
        payload = encode(self._codec, update, 1, 1, self.label, prepared)
        self._back.step_made()
        return payload

    def _beside(self, shards: Sequence[Tensor], flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The shards' parts of ``flat``, each as its shard is shaped, and the shards.

        Raises:
            ValueError: If the shards have other shapes than those that :meth:`start` was given.
        """
        shapes = [shard.shape for shard in shards]
        if shapes != self._shapes:
            given, started = ([list(shape) for shape in each] for each in (shapes, self._shapes))
            raise ValueError(f"{self.label}: got shards of shapes {given}, expected {started}")
        sizes = [shard.numel() for shard in shards]
        parts = flat[: sum(sizes)].split(sizes)
        return [(part.view(shard.shape), shard) for part, shard in zip(parts, shards, strict=True)]

    # ---- in checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The agreed weights, this rank's momentum and its errors, on the CPU."""
        self._settle()
        assert self._momentum is not None
        errors = {name: None if state is None else state.state_dict() for name, state in self._errors.items()}
        # Copies: on a CPU, those that are kept change in place with the next exchange.
        kept = {"agreed": self.agreed.to("cpu", copy=True), "momentum": self._momentum.to("cpu", copy=True)}
        return {"shapes": [list(shape) for shape in self._shapes], **kept, **errors}

    def load_state_dict(self, state: dict[str, Any], shards: Sequence[Tensor]) -> None:
        """Go on with what :meth:`state_dict` gave.

        Args:
            state: What it gave.
            shards: The weights that this rank holds of the fragment, of which only shapes and device matter.

        Raises:
            ValueError: If that was of other shards, or under another configuration of error feedback.
        """
        shapes = [list(shard.shape) for shard in shards]
        if state["shapes"] != shapes:
            raise ValueError(
                f"{self.label}: the checkpoint has shards of shapes {state['shapes']}, but this rank holds {shapes}"
            )
        if (state["errors"] is None) != (self._reduce.errors is None):
            saved, asked = ("without", "has it") if state["errors"] is None else ("with", "has none")
            raise ValueError(
                f"{self.label}: the checkpoint was saved {saved} error feedback of exchanges, but this strategy "
                f"{asked}; use the same LocalSteps(error_feedback=...)"
            )
        self._settle()
        for name, errors in self._errors.items():  # first, since it may fail
            if errors is not None:
                errors.load_state_dict(state[name])
        self.start(shards)
        assert self._momentum is not None
        self.agreed.copy_(state["agreed"])
        self._momentum.copy_(state["momentum"])

    def reset(self) -> None:
        """Forget the agreed weights and errors; :meth:`start` comes next."""
        self._settle()
        self._agreed = self._momentum = None
        for errors in self._errors.values():
            if errors is not None:
                errors.reset()

    @property
    def _errors(self) -> dict[str, ErrorFeedbackState | None]:
        return {"errors": self._reduce.errors, "errors_back": self._back}
