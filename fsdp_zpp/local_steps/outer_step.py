"""The outer step: nodes exchange the changes of their weights, and apply them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from math import isfinite
from typing import TypedDict

import torch
from torch import Tensor

from fsdp_zpp.codecs import full_precision
from fsdp_zpp.comm.error_feedback import ErrorFeedbackState, SavedErrors
from fsdp_zpp.comm.flat_layout import Extent, FlatLayout, Piece
from fsdp_zpp.comm.gradient_reduce import GradientReduce
from fsdp_zpp.comm.hops import (
    Hop,
    SideStream,
    Traffic,
    decode,
    encode,
    keep_until_read,
    label_of,
    record_event,
    wait_for,
)
from fsdp_zpp.comm.mesh import ProcessMesh, for_collectives
from fsdp_zpp.strategy.local_steps import LocalSteps, aligned_gain, correlation_of_changes, fitting_momentum

# ---- node chunks
#
# Chunks of a rank's tensors, one for each node, as exchanges between nodes send them.


class NodeChunks:
    """Cuts this rank's part of some parameters into a chunk for each node.

    ``placements`` always have the same order, and may have more parameters than ``numels``. A parameter placed
    unlike its predecessor begins at a multiple of ``block``, so no codec's block spans both. See [Note: Copies].
    """

    def __init__(self, numels: Mapping[str, int], placements: Mapping[str, Hashable], nodes: int, block: int) -> None:
        self._numels = numels
        # Each parameter is cut by itself, so that the owners of its chunks do not depend on what else is sent.
        order = {name: place for place, name in enumerate(placements)}
        pieces = [Piece(order[name], name, chunk_numel(numel, nodes)) for name, numel in numels.items()]
        self.layout = FlatLayout.aligned(pieces, [placements[name] for name in numels], block)

    def places(self, flat: Tensor) -> Iterator[tuple[str, slice, Tensor]]:
        """Yield each parameter's name, a slice of its values, and the view of ``flat`` [nodes, numel] for them."""
        if len(self._numels) == 1:  # the chunks of a single parameter are adjacent in ``flat``
            ((name, numel),) = self._numels.items()
            yield name, slice(0, numel), flat.view(-1)[:numel]
            return
        for piece, part in self.layout.split(flat).items():
            numel = self._numels[piece.name]
            for row, start in zip(part, range(0, numel, piece.numel), strict=False):
                stop = min(start + piece.numel, numel)
                yield piece.name, slice(start, stop), row[: stop - start]


def chunk_numel(numel: int, nodes: int) -> int:
    return -(-numel // nodes)


def relative_weights(trained: Sequence[int]) -> list[float]:
    """Return each node's weight w * nodes / sum(w), where w is its tokens or steps; all 1 if no node has trained."""
    total = sum(trained)
    return [each * len(trained) / total if total else 1.0 for each in trained]


# ---- outer optimizer
#
# Outer optimizer of local-update training: SGD with Nesterov momentum, on the chunks of weights that a rank owns.
#
# [Note: Overshooting]
# Gradient descent on a quadratic diverges if its steps are more than twice as long as the step that reaches the
# minimum. If the nodes' mean change about reaches the minimum, an outer step of more than twice that change overshoots.
# One such step may be chance; five in a row of one fragment are not.

Products = tuple[float, float]  # <m, g> and <g, g>; see [Note: Automatic momentum] in strategy/local_steps.py

MOST_GAIN = 2.0  # the aligned gain above which an outer step overshoots
MOST_IN_A_ROW = 5  # this many overshooting steps in a row cause a warning
_MOST_AT_ONCE = 2**30  # the most values in one scalar product: cuBLAS counts them in 32 bits


class OuterFit(TypedDict):
    """Numbers in a checkpoint that determine the momentum of the next step."""

    products: Tensor  # this rank's part of <m, g> and <g, g> in the last step
    coefficient: float  # the momentum mu of the last step
    correlation: float  # the last known correlation of successive changes


class OuterOptimizer:
    """Makes outer steps, and keeps their ``momentum`` by parameter.

    ``products``, fp32 [2], are <m, g> and <g, g> of the last step over this rank's values: m is the momentum before the
    step, g the mean change. Summed over all ranks, ``products`` are the products of the whole fragment.
    """

    def __init__(self, config: LocalSteps) -> None:
        self._config = config
        self.momentum: dict[str, Tensor] = {}
        self.reset()

    def reset(self) -> None:
        """Forget all momentum; :meth:`start` comes next."""
        self.momentum = {}
        self.products = torch.zeros(2, dtype=torch.float32)
        self._correlation = 1.0  # as long as it is unknown: with 1, "auto" chooses its lowest momentum
        self._last = self._coefficient
        self._overshot = 0  # steps in a row

    @property
    def _coefficient(self) -> float:
        config = self._config
        if config.outer_momentum != "auto":
            return config.outer_momentum
        return fitting_momentum(config.outer_lr, self._correlation)

    def start(self, name: str, numel: int, device: torch.device, kept_on: torch.device) -> None:
        """Start a parameter's chunk with a momentum of zero on ``kept_on``; steps are made on ``device``."""
        self.momentum[name] = torch.zeros(numel, dtype=torch.float32, device=kept_on)
        self.products = self.products.to(device)

    def step(self, gradient: Tensor, layout: FlatLayout) -> Tensor:
        """Make an outer step by the mean change, fp32 and flat; return the update of weights, in its memory."""
        config, device = self._config, gradient.device
        self._last = coefficient = self._coefficient
        parts = {piece: self.momentum[piece.name].to(device).view(1, -1) for piece in layout.pieces}
        # The momentum of a single parameter is updated in place.
        momentum = next(iter(parts.values())).view(-1) if len(parts) == 1 else layout.join(parts, 1, gradient)
        for product, other in zip(self.products, (momentum, gradient), strict=True):
            _set_to_product(product, gradient, other)
        momentum.mul_(coefficient).add_(gradient)
        for piece, new in layout.split(momentum).items():
            if (kept := self.momentum[piece.name]).data_ptr() != new.data_ptr():
                kept.copy_(new[0])
        return gradient.add_(momentum, alpha=coefficient).mul_(-config.outer_lr)

    def warm_up(self, changes: Mapping[str, Tensor]) -> None:
        """Add changes to the momentum without an outer step, as Pier does in synchronous steps (arXiv 2511.17849).

        ``changes`` are those of this rank's chunks, fp32, flat, by FQN; the padding of a chunk may be left out.
        """
        self.products.zero_()
        self._last = coefficient = self._coefficient
        for name, change in changes.items():
            momentum = self.momentum[name]
            for product, other in zip(self.products, (momentum[: change.numel()], change), strict=True):
                own = torch.empty((), dtype=torch.float32, device=change.device)
                _set_to_product(own, change, other)
                product.add_(own.to(product.device))
            momentum.mul_(coefficient)[: change.numel()].add_(change)

    def adapt_momentum(self, products: Products) -> float | None:
        """Adapt the next momentum to the last step's ``products``, summed over ranks, unless the mean change was zero.

        Returns the last step's gain if enough steps in a row have overshot, else None; see [Note: Overshooting].
        """
        along, norm = products
        if not (isfinite(along) and isfinite(norm) and norm > 0):
            return None
        gain = aligned_gain(self._config.outer_lr, self._last, along / norm)
        if along:  # exactly 0 only while there is no momentum
            self._correlation = correlation_of_changes(self._last, along / norm)
        self._overshot = self._overshot + 1 if gain > MOST_GAIN else 0
        return gain if self._overshot >= MOST_IN_A_ROW else None

    # ---- in checkpoints

    def state_dict(self) -> tuple[dict[str, Tensor], OuterFit]:
        return {name: value.to("cpu", copy=True) for name, value in self.momentum.items()}, self.last_fit

    @property
    def last_fit(self) -> OuterFit:
        products = self.products.to("cpu", copy=True)
        return {"products": products, "coefficient": self._last, "correlation": self._correlation}

    @last_fit.setter
    def last_fit(self, fit: OuterFit) -> None:
        self.products.copy_(fit["products"])
        self._last, self._correlation = fit["coefficient"], fit["correlation"]

    def load_state_dict(self, momentum: Mapping[str, Tensor], fit: OuterFit) -> None:
        """Continue with a saved momentum of parameters that were started."""
        for name, value in momentum.items():
            self.momentum[name].copy_(value)
        self.last_fit = fit


def _set_to_product(product: Tensor, one: Tensor, other: Tensor) -> None:
    product.zero_()
    for pair in zip(one.split(_MOST_AT_ONCE), other.split(_MOST_AT_ONCE), strict=True):
        product.add_(torch.dot(*pair))


# ---- outer step
#
# Outer step of local-update training: one fragment's exchange between nodes that train on their own.
#
#     this node's weights         this rank's part of each parameter, in its own dtype
#         | changes               the agreed weights minus this node's, fp32, each parameter cut into one chunk per node
#     mean over nodes             encode, all-to-all among the ranks with this local index, decode and sum in fp32
#         | outer step            SGD with momentum, each rank on its chunk: 1 / nodes of this rank's values
#     update of the weights       encode, all-gather among the same ranks, decode
#         | added to the agreed weights, from which all nodes go on
#
# [Note: Agreed weights]
# Outer steps make the agreed weights, in fp32. These are the same on all nodes bit for bit, since every node adds the
# decoded update, even a chunk's owner, who has the exact one. Each rank keeps its part of the agreed weights. Nodes
# send changes from them, since only changes are small enough for 4 bits. Nodes go on from agreed weights rounded to the
# model's dtype, and measure changes from the rounded ones, so rounding is not sent. Only a chunk's owner has momentum.
#
# Agreed weights, momentum and errors belong to parameters ([Note: Identity] in flat_layout.py): an exchange of some
# parameters leaves the state of the other parameters as it is.
#
# Another parallelism may have copies of a parameter on several ranks. These stay equal bit for bit ([Note: Copies] in
# flat_layout.py), since a new block begins wherever the placement changes: the rounding of a copy never depends
# on neighbours that differ between these ranks.


class OuterStepState(TypedDict):
    """An :class:`OuterStep` in a checkpoint; tensors are by FQN."""

    agreed: dict[str, Tensor]
    momentum: dict[str, Tensor]
    fit: OuterFit
    errors: SavedErrors | None  # of the hop to the chunks' owners
    errors_back: SavedErrors | None  # of the hop back


class OuterStep:
    """Exchanges one fragment's weights between several nodes, and keeps the state of these exchanges."""

    def __init__(self, config: LocalSteps, mesh: ProcessMesh, traffic: Traffic, label: str = "fragment") -> None:
        if mesh.inter is None and config.elastic is None:
            raise ValueError(f"{label}: local steps exchange weights between nodes, and {mesh.topology} is one node")
        self._config, self.stream, self._traffic = config, SideStream(), traffic
        self._codec = config.codec or full_precision(torch.float32)
        self._agreed: dict[str, Tensor] = {}
        self._optimizer = OuterOptimizer(config)
        self._arrival: torch.cuda.Event | None = None
        self._device = torch.device("cpu")
        self._set_nodes(mesh, label)

    def _set_nodes(self, mesh: ProcessMesh, label: str) -> None:
        across, feedback = mesh.across_nodes(), self._config.error_feedback
        self._nodes, self._node = across.topology.nodes, across.rank
        self._codec_back = self._codec.for_sum_of(self._nodes)
        codecs = [self._codec, self._codec_back, None if feedback is None else feedback.dtype]
        # No codec's block spans a multiple of this number.
        self._block = math.lcm(*(codec.block_numel for codec in codecs if codec is not None and codec.block_numel))
        self._reduce = GradientReduce(across, None, self._codec, self._traffic, label, error_feedback=feedback)
        self._gather = None if across.inter is None else Hop(across.inter, "gather", "inter", self._traffic)
        self._back = None if feedback is None else ErrorFeedbackState(feedback, ["back"])

    label = label_of("_reduce")

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._agreed)

    @property
    def agreed(self) -> dict[str, Tensor]:
        """Return this rank's part of the agreed weights of each parameter, fp32 and flat, after exchanges under way."""
        wait_for(self._arrival, self._device)
        return self._agreed

    @torch.no_grad()
    def start(self, shards: Mapping[str, Tensor]) -> None:
        """Make ``shards`` the agreed weights. They must be the same on all nodes."""
        self._wait_for_exchange()
        for name, shard in shards.items():
            # Parameters may be offloaded; exchanges start on a device that collectives accept.
            empty = shard.new_empty(0)
            self._device = (empty if self._gather is None else for_collectives(empty, self._gather.group)).device
            kept_on = torch.device("cpu") if self._config.offload else self._device
            self._agreed[name] = shard.detach().to(kept_on, torch.float32, copy=True).view(-1)
            self._optimizer.start(name, chunk_numel(shard.numel(), self._nodes), self._device, kept_on)

    def _wait_for_exchange(self) -> None:
        """Have the current stream wait for an exchange under way, before the exchange's memory is reused."""
        wait_for(self._arrival, self._device)
        self._arrival = None

    def agrees_with(self, shards: Mapping[str, Tensor]) -> bool:
        beside = self._beside(shards)
        return all(torch.equal(agreed.to(shard.device, shard.dtype), shard) for agreed, shard in beside)

    @torch.no_grad()
    def adopt(self, shards: Mapping[str, Tensor], *, warms_up: bool = False) -> None:
        """Set the agreed weights to ``shards``, which must be the same on all nodes; nothing is communicated.

        ``warms_up`` adds the changes of the agreed weights to the momentum; otherwise the momentum stays as it is.
        """
        self._wait_for_exchange()
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

        Collective among the ranks with this local index if they hold values of these parameters.

        Args:
            shards: Shards of some parameters that :meth:`start` was given, the same parameters on all nodes. They may
                change again as soon as this returns.
            placements: How another parallelism has placed each parameter of the fragment, always in the same order. By
                default ``shards`` has all parameters, all placed in the same way.
            weight: Weight of this node's changes; the mean of all nodes' weights is 1.
        """
        beside = zip(shards, self._beside(shards), strict=True)
        held = {name: agreed for name, (agreed, shard) in beside if shard.numel()}
        if not held:
            self._optimizer.products.zero_()
            return
        assert self._gather is not None
        numels = {name: agreed.numel() for name, agreed in held.items()}
        chunks = NodeChunks(numels, placements or dict.fromkeys(shards), self._nodes, self._block)
        layout = chunks.layout
        # Zeros where chunks are padded.
        change = torch.zeros(self._nodes, layout.numel, dtype=torch.float32, device=self._device)
        for name, places, part in chunks.places(change):
            values = shards[name].view(-1)[places]
            # A local variable would keep the last part's copy until the end of the exchange.
            torch.sub(
                held[name].view(-1)[places].to(part.device, values.dtype).float(), values.to(part.device), out=part
            )
        if weight != 1:
            change.mul_(weight)
        with self.stream.after_current(self._device):
            # A model may be freed while an exchange is under way, which still reads and writes these.
            keep_until_read(self._optimizer.products)
            for name in held:
                keep_until_read(self._agreed[name])
                keep_until_read(self._optimizer.momentum[name])
            # One expression frees each temporary once it is used.
            payload = self._encoded(
                self._optimizer.step(self._mean_over_nodes(keep_until_read(change).view(-1), layout), layout), layout
            )
            gathered = self._gather.all_gather(payload, self.label)
            decode(self._codec_back, gathered, change.view(-1), 1, self._nodes, self.label)  # overwrites the changes
            for name, places, part in chunks.places(change):
                kept = self._agreed[name][places]
                kept.add_(part.to(kept.device))
            self._arrival = record_event(change)

    @property
    def products(self) -> Tensor:
        """Return this rank's part of the products for :meth:`adapt_momentum`."""
        wait_for(self._arrival, self._device)
        return self._optimizer.products

    def adapt_momentum(self, products: Products) -> float | None:
        return self._optimizer.adapt_momentum(products)

    @torch.no_grad()
    def receive(self, shards: Mapping[str, Tensor], mix: float = 1.0) -> None:
        """Move ``shards`` toward the agreed weights, by the share ``mix`` of the distance; 1 sets them."""
        for agreed, shard in self._beside(shards):
            moved = agreed.to(shard.device)
            shard.copy_(moved if mix == 1 else shard.float().lerp(moved, mix))

    def _mean_over_nodes(self, change: Tensor, layout: FlatLayout) -> Tensor:
        mean = change.new_empty(layout.numel)
        finish = self._reduce.start(change, mean, layout=layout)
        finish()
        if self._reduce.errors is not None:
            self._reduce.errors.step_made()
        return mean

    def _encoded(self, update: Tensor, layout: FlatLayout) -> Tensor:
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
        """Return each shard's agreed weights, in its shape, and the shard; raise a ValueError if sizes differ."""
        kept = self.agreed
        given, started = ({name: each[name].numel() for name in shards if name in each} for each in (shards, kept))
        if given != started:
            raise ValueError(f"{self.label}: got shards of {given} values, expected {started}")
        return ((kept[name].view(shard.shape), shard) for name, shard in shards.items())

    # ---- in checkpoints

    def state_dict(self) -> OuterStepState:
        self._wait_for_exchange()
        errors, back = (None if each is None else each.state_dict() for each in self._errors)
        # Copy them: on a CPU, the agreed weights change in place with the next exchange.
        agreed = {name: value.to("cpu", copy=True) for name, value in self.agreed.items()}
        momentum, fit = self._optimizer.state_dict()
        return {"agreed": agreed, "momentum": momentum, "fit": fit, "errors": errors, "errors_back": back}

    def load_state_dict(self, state: OuterStepState, shards: Mapping[str, Tensor]) -> None:
        """Continue with a saved state. ``shards`` are those of all parameters; only their sizes and device matter."""
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
        self._optimizer.load_state_dict(state["momentum"], state["fit"])

    def reset(self) -> None:
        """Forget the agreed weights and errors; :meth:`start` comes next."""
        self._wait_for_exchange()
        self._agreed = {}
        self._optimizer.reset()
        for errors in self._errors:
            if errors is not None:
                errors.reset()

    @property
    def _errors(self) -> tuple[ErrorFeedbackState | None, ErrorFeedbackState | None]:
        return self._reduce.errors, self._back
