"""Outer step of local-update training: one fragment's exchange between nodes that train on their own.

    this node's weights         of each parameter what this rank holds, in its own dtype
        | what has changed      the agreed weights less these, fp32, each parameter in a chunk for each node
    mean over nodes             encode, all-to-all among the ranks with this local index, decode and sum in fp32
        | outer step            SGD with momentum, each rank on its chunk: 1 / nodes of this rank's values
    update of the weights       encode, all-gather among the same ranks, decode
        | added to the agreed weights, from which all nodes go on

[Note: Agreed weights]
The agreed weights are those that the outer steps have made, in fp32, the same on all nodes bit for bit: every node, the
owner of a chunk too, adds the decoded update. A rank keeps its part of them, because only changes against them are
small enough for 4 bits. Nodes go on from the agreed weights as rounded to the dtype of the model, and changes are
measured from there, so that rounding is not sent as a change. The momentum is kept once, by the owners of the chunks.

All of this belongs to parameters ([Note: Identity] in flat_layout.py): an exchange is of some of them, and leaves the
others' agreed weights, momentum and errors as they are.

Copies that another parallelism has on its ranks stay equal bit for bit ([Note: Copies] in exact_places.py): parameters
that it has placed differently begin a new block, so that no copy is rounded as a neighbour demands that others lack.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from typing import NotRequired, TypedDict

import torch
from torch import Tensor

from fsdp_zpp.codecs.base import full_precision
from fsdp_zpp.config.local_steps import LocalSteps

from .devices import for_collectives
from .error_state import ErrorFeedbackState, SavedErrors
from .flat_layout import FlatLayout
from .gradient_reduce import GradientReduce
from .held_errors import Extent
from .hops import Hop, Traffic, decode, encode
from .mesh import ProcessMesh
from .node_chunks import NodeChunks, chunk_numel
from .outer_optimizer import OuterFigures, OuterFit, OuterOptimizer
from .streams import SideStream, keep_until_read, record_event, wait_for


class OuterStepState(TypedDict):
    """An :class:`OuterStep` in a checkpoint.

    Attributes:
        agreed: The agreed weights, by FQN.
        momentum: This rank's momentum, by FQN.
        fit: Figures from which the next momentum is chosen; older checkpoints lack them.
        errors: Errors on the way there; None without error feedback.
        errors_back: Errors on the way back.
    """

    agreed: dict[str, Tensor]
    momentum: dict[str, Tensor]
    fit: NotRequired[OuterFit]
    errors: SavedErrors | None
    errors_back: SavedErrors | None


class OuterStep:
    """Exchanges one fragment's weights between nodes, and keeps what that needs from one exchange to the next.

    Args:
        config: How.
        mesh: All ranks, on several nodes. With elastic nodes, those of this one to begin with.
        traffic: Where bytes are counted.
        label: Names the fragment in profiles and errors.

    Attributes:
        stream: Where exchanges travel; fragments may share it.

    Raises:
        ValueError: If there is one node.
    """

    def __init__(self, config: LocalSteps, mesh: ProcessMesh, traffic: Traffic, label: str = "fragment") -> None:
        if mesh.inter is None and config.elastic is None:
            raise ValueError(f"{label}: local steps exchange weights between nodes, and {mesh.topology} is one node")
        self._config, self._label, self.stream, self._traffic = config, label, SideStream(), traffic
        self._codec = config.codec or full_precision(torch.float32)
        self._agreed: dict[str, Tensor] = {}
        self._optimizer = OuterOptimizer(config)
        self._arrival: torch.cuda.Event | None = None
        self._device = torch.device("cpu")
        self._set_nodes(mesh)

    def _set_nodes(self, mesh: ProcessMesh) -> None:
        across, feedback = mesh.across_nodes(), self._config.error_feedback
        self._nodes, self._node = across.topology.nodes, across.rank
        self._codec_back = self._codec.for_sum_of(self._nodes)
        codecs = [self._codec, self._codec_back, None if feedback is None else feedback.dtype]
        # No block of any codec spans a multiple of it.
        self._block = math.lcm(*(codec.block_numel for codec in codecs if codec is not None and codec.block_numel))
        self._reduce = GradientReduce(across, None, self._codec, self._traffic, self._label, error_feedback=feedback)
        self._gather = None if across.inter is None else Hop(across.inter, "gather", "inter", self._traffic)
        self._back = None if feedback is None else ErrorFeedbackState(feedback, ["back"])

    @property
    def label(self) -> str:
        """Return the fragment's name in profiles and errors."""
        return self._label

    @label.setter
    def label(self, label: str) -> None:
        self._label = self._reduce.label = label

    @property
    def names(self) -> frozenset[str]:
        """Return the parameters that have agreed weights."""
        return frozenset(self._agreed)

    @property
    def agreed(self) -> dict[str, Tensor]:
        """Return the agreed weights that this rank holds of each parameter: fp32, flat, those on their way included."""
        wait_for(self._arrival, self._device)
        return self._agreed

    @torch.no_grad()
    def start(self, shards: Mapping[str, Tensor]) -> None:
        """Adopt weights of this rank, which must be the same on all nodes, as the agreed ones.

        Args:
            shards: What this rank holds of some parameters, by name.
        """
        self._settle()
        for name, shard in shards.items():
            # Parameters may be offloaded; exchanges travel from where collectives take them.
            empty = shard.new_empty(0)
            self._device = (empty if self._gather is None else for_collectives(empty, self._gather.group)).device
            kept_on = torch.device("cpu") if self._config.offload else self._device
            self._agreed[name] = shard.detach().to(kept_on, torch.float32, copy=True).view(-1)
            self._optimizer.start(name, chunk_numel(shard.numel(), self._nodes), self._device, kept_on)

    def _settle(self) -> None:
        """Wait in the current stream for what is on its way, before its memory is used otherwise."""
        wait_for(self._arrival, self._device)
        self._arrival = None

    def agrees_with(self, shards: Mapping[str, Tensor]) -> bool:
        """Return whether ``shards``, as in :meth:`start`, are the agreed weights."""
        beside = self._beside(shards)
        return all(torch.equal(agreed.to(shard.device, shard.dtype), shard) for agreed, shard in beside)

    @torch.no_grad()
    def adopt(self, shards: Mapping[str, Tensor], *, warms_up: bool = False) -> None:
        """Set the agreed weights to ``shards``, which must be the same on all nodes; nothing is communicated.

        Args:
            shards: Some of those that :meth:`start` was given.
            warms_up: Whether the momentum takes in how much they have changed since they were agreed on, as in the
                synchronous steps of Pier (arXiv 2511.17849). Otherwise it stays as it is.
        """
        self._settle()
        changes: dict[str, Tensor] = {}
        for (agreed, shard), name in zip(self._beside(shards), shards, strict=True):
            if warms_up:
                chunk = chunk_numel(shard.numel(), self._nodes)
                own = slice(self._node * chunk, min((self._node + 1) * chunk, shard.numel()))
                changes[name] = agreed.view(-1)[own] - shard.view(-1)[own].to(agreed.device, torch.float32)
            agreed.copy_(shard)
        if warms_up:
            self._optimizer.warm_up(changes)

    @torch.no_grad()
    def send(
        self, shards: Mapping[str, Tensor], placements: Mapping[str, Hashable] | None = None, weight: float = 1.0
    ) -> None:
        """Average the changes of ``shards`` over nodes, and make the outer step. :meth:`receive` follows.

        Collective among the ranks with this local index, unless these hold nothing of the parameters.

        Args:
            shards: Some of those that :meth:`start` was given, the same parameters on all nodes, changed by this node's
                steps. They may change again as soon as this returns.
            placements: How another parallelism has placed each parameter of the fragment, by name, in an order that is
                always the same; by default ``shards`` are all of them, placed alike.
            weight: How much this node's changes count, where the average node's count 1.

        Raises:
            ValueError: If ``shards`` have other shapes than :meth:`start` was given, before any communication.
        """
        held = {
            name: agreed for name, (agreed, shard) in zip(shards, self._beside(shards), strict=True) if shard.numel()
        }
        if not held:
            self._optimizer.clear_products()
            return
        assert self._gather is not None
        numels = {name: agreed.numel() for name, agreed in held.items()}
        chunks = NodeChunks(numels, placements or dict.fromkeys(shards), self._nodes, self._block)
        layout = chunks.layout
        # Zeros where chunks are padded.
        change = torch.zeros(self._nodes, layout.numel, dtype=torch.float32, device=self._device)
        for name, places, part in chunks.places(change):
            values = shards[name].view(-1)[places]
            torch.sub(
                held[name].view(-1)[places].to(part.device, values.dtype).float(), values.to(part.device), out=part
            )
        if weight != 1:
            change.mul_(weight)
        with self.stream.after_current(self._device):
            # A model may go while an exchange is on its way.
            agreed = (self._agreed[name] for name in held)
            for kept in (*agreed, *self._optimizer.momentum_of(held), self._optimizer.products):
                keep_until_read(kept)
            # In one expression, so that what is used up is freed.
            payload = self._encoded(
                self._optimizer.step(self._mean_over_nodes(keep_until_read(change).view(-1), layout), layout), layout
            )
            gathered = self._gather.all_gather(payload, self.label)
            decode(self._codec_back, gathered, change.view(-1), 1, self._nodes, self.label)  # in place of what was sent
            for name, places, part in chunks.places(change):
                kept = self._agreed[name][places]
                kept.add_(part.to(kept.device))
            self._arrival = record_event(change)

    @property
    def products(self) -> Tensor:
        """Return this rank's part of what :meth:`fit` takes."""
        wait_for(self._arrival, self._device)
        return self._optimizer.products

    def fit(self, products: tuple[float, float]) -> OuterFigures | None:
        """Return figures of the last outer step, and fit the next one; see :class:`OuterOptimizer`."""
        return self._optimizer.fit(products)

    @torch.no_grad()
    def receive(self, shards: Mapping[str, Tensor], mix: float = 1.0) -> None:
        """Set ``shards`` to the agreed weights, or to a mixture of these and their own.

        Args:
            shards: As in :meth:`send`.
            mix: Share of the agreed weights.
        """
        for agreed, shard in self._beside(shards):
            moved = agreed.to(shard.device)
            shard.copy_(moved if mix == 1 else shard.float().lerp(moved, mix))

    def exchange(self, shards: Mapping[str, Tensor]) -> None:
        """Call :meth:`send`, and :meth:`receive` at once."""
        self.send(shards)
        self.receive(shards)

    def _mean_over_nodes(self, change: Tensor, layout: FlatLayout) -> Tensor:
        mean = change.new_empty(layout.numel)
        self._reduce.start(change, mean, layout=layout).finish()
        if self._reduce.errors is not None:
            self._reduce.errors.step_made()
        return mean

    def _encoded(self, update: Tensor, layout: FlatLayout) -> Tensor:
        """Encode this rank's update, with the errors of earlier ones."""
        if self._back is None:
            return encode(self._codec_back, update, 1, 1, self.label)
        self._back.begin(update.device)
        errors = self._back.buffer("back")
        assert errors is not None
        prepared = errors.prepare(Extent(update.numel(), (0,), layout), update.device)
        payload = encode(self._codec_back, update, 1, 1, self.label, prepared)
        self._back.step_made()
        return payload

    def _beside(self, shards: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the agreed weights of each shard, in its shape, beside the shard.

        Raises:
            ValueError: If the shards have other sizes than those that :meth:`start` was given.
        """
        kept = self.agreed
        given, started = ({name: each[name].numel() for name in shards if name in each} for each in (shards, kept))
        if given != started:
            raise ValueError(f"{self.label}: got shards of {given} values, expected {started}")
        return ((kept[name].view(shard.shape), shard) for name, shard in shards.items())

    # ---- in checkpoints

    def state_dict(self) -> OuterStepState:
        """Return the agreed weights, this rank's momentum and its errors, on the CPU."""
        self._settle()
        errors, back = (None if each is None else each.state_dict() for each in self._errors)
        # Copies: on a CPU, those that are kept change in place with the next exchange.
        agreed = {name: value.to("cpu", copy=True) for name, value in self.agreed.items()}
        momentum, fit = self._optimizer.state_dict()
        return {"agreed": agreed, "momentum": momentum, "fit": fit, "errors": errors, "errors_back": back}

    def load_state_dict(self, state: OuterStepState, shards: Mapping[str, Tensor]) -> None:
        """Continue with what :meth:`state_dict` returned.

        Args:
            state: What it returned.
            shards: What this rank holds of all parameters, of which only sizes and device matter.

        Raises:
            ValueError: If ``state`` is of other parameters, or of another configuration of error feedback.
        """
        saved = {name: value.numel() for name, value in state["agreed"].items()}
        held = {name: shards[name].numel() for name in saved if name in shards}
        if saved != held:
            raise ValueError(f"{self.label}: the checkpoint has shards of {saved} values, but this rank holds {held}")
        if (state["errors"] is None) != (self._reduce.errors is None):
            saved_with, strategy_side = ("without", "has it") if state["errors"] is None else ("with", "has none")
            raise ValueError(
                f"{self.label}: the checkpoint was saved {saved_with} error feedback of exchanges, but this strategy "
                f"{strategy_side}; use the same LocalSteps(error_feedback=...)"
            )
        self.reset()
        for errors, of_hop in zip(self._errors, (state["errors"], state["errors_back"]), strict=True):
            if errors is not None and of_hop is not None:
                errors.load_state_dict(of_hop)  # first, since it may fail
        self.start({name: shards[name] for name in saved})
        for name in saved:
            self._agreed[name].copy_(state["agreed"][name])
        self._optimizer.load_state_dict(state["momentum"], state.get("fit"))

    def reset(self) -> None:
        """Forget the agreed weights and errors; :meth:`start` comes next."""
        self._settle()
        self._agreed = {}
        self._optimizer.reset()
        for errors in self._errors:
            if errors is not None:
                errors.reset()

    @property
    def _errors(self) -> tuple[ErrorFeedbackState | None, ErrorFeedbackState | None]:
        return self._reduce.errors, self._back
