"""Local steps of nodes that come and go."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_zpp.comm.agreement import all_reduce_flags, checksums, from_each_rank
from fsdp_zpp.comm.hops import Traffic
from fsdp_zpp.comm.mesh import ProcessMesh
from fsdp_zpp.strategy.local_steps import LocalSteps

from ._torch_members import Members
from .fragment import Fragment
from .local_training import LocalTraining, OptimizerState, before_forward_of, optimizers_of
from .outer_step import OuterFit, OuterStep, OuterStepState, Products, chunk_numel, relative_weights

# ---- elastic outer step
#
# Outer step among nodes that come and go: an exchange can be rolled back, and chunks change owners.
#
# [Note: Chunks of members]
# Only the owner of a chunk keeps its momentum ([Note: Agreed weights] in outer_step.py). A new round has other chunks:
# members of the old round put their chunks together, and each member of the new round takes its own chunk from the
# whole. The momentum of a lost node's chunk starts from zero. So do the errors of error feedback, on all nodes.


class Snapshot(NamedTuple):
    """State for a rollback: agreed weights and momentum by name, and the outer fit. Errors restart from zero."""

    weights: dict[str, tuple[Tensor, Tensor]]
    fit: OuterFit


class OwnedState(OuterStepState):
    owner: tuple[int, int]  # the node that owns the saved chunks of the momentum, and the number of nodes at that time


class ElasticOuterStep(OuterStep):
    def __init__(self, config: LocalSteps, mesh: ProcessMesh, traffic: Traffic, label: str = "fragment") -> None:
        self._alone = mesh
        super().__init__(config, mesh, traffic, label)

    def momentum_among(self, mesh: ProcessMesh, numels: Mapping[str, int], *, owned: bool) -> dict[str, Tensor]:
        """Return this rank's chunks of the momentum, cut for the nodes of ``mesh``; see [Note: Chunks of members].

        Collective over ``mesh``; its ranks pass the same ``numels``. ``owned`` is True if this node has old chunks.
        """
        names = sorted(name for name, numel in numels.items() if numel)
        if not names:
            return {name: torch.zeros(0, dtype=torch.float32) for name in numels}
        self._wait_for_exchange()
        whole = torch.zeros(sum(numels[name] for name in names), dtype=torch.float32)
        parts = dict(zip(names, whole.split([numels[name] for name in names]), strict=True))
        for name, part in parts.items() if owned else ():
            chunk = self._optimizer.momentum[name]
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
        """Exchange over ``mesh`` from now on, with the ``momentum`` of :meth:`momentum_among`."""
        self._wait_for_exchange()
        self._set_nodes(mesh, self.label)
        for name, chunk in momentum.items():
            self._optimizer.start(name, chunk.numel(), self._device, self._agreed[name].device)
            self._optimizer.momentum[name].copy_(chunk)
        self._optimizer.products.zero_()  # without a lost node's part, their sum over ranks is wrong

    def disconnect(self) -> None:
        """Drop all references to groups with other nodes, which closes the sockets and ends other nodes' waits."""
        self._wait_for_exchange()
        owner = self._node, self._nodes
        self._set_nodes(self._alone, self.label)
        self._node, self._nodes = owner

    @property
    def last_fit(self) -> OuterFit:
        self._wait_for_exchange()
        return self._optimizer.last_fit

    def take_over(self, agreed: Mapping[str, Tensor], fit: OuterFit, shards: Mapping[str, Tensor]) -> None:
        """Continue from the agreed weights and the fit of other nodes; call :meth:`connect` next."""
        self.reset()
        self.start({name: shards[name] for name in agreed})
        for name, weights in agreed.items():
            self._agreed[name].copy_(weights)
        self._optimizer.last_fit = fit

    def snapshot(self, names: Collection[str]) -> Snapshot:
        agreed, momentum = self.agreed, self._optimizer.momentum
        weights = {name: (agreed[name].to("cpu", copy=True), momentum[name].to("cpu", copy=True)) for name in names}
        return Snapshot(weights, self.last_fit)

    def rollback(self, snapshot: Snapshot) -> None:
        """Undo an exchange. Call :meth:`connect` next, which restarts errors from zero."""
        self._wait_for_exchange()
        for name, (agreed, momentum) in snapshot.weights.items():
            self._agreed[name].copy_(agreed)
            self._optimizer.momentum[name].copy_(momentum)
        self._optimizer.last_fit = snapshot.fit

    def state_dict(self) -> OwnedState:
        return {**super().state_dict(), "owner": (self._node, self._nodes)}

    def load_state_dict(self, state: OuterStepState, shards: Mapping[str, Tensor]) -> None:
        owner = state.get("owner")
        if not isinstance(owner, tuple | list):
            raise ValueError(
                f"{self.label}: the checkpoint was saved by nodes of one job, but this strategy has elastic nodes; "
                "load weights alone, saved under agreed_weights"
            )
        self._node, self._nodes = owner
        super().load_state_dict(state, shards)


# ---- elastic fragment
#
# A fragment of elastic nodes: exchanges can be rolled back, and a node that joins takes over the agreed weights.


def active_local_steps(local_steps: LocalSteps | None, ranks: ProcessMesh) -> LocalSteps | None:
    """Return the local steps that ``ranks`` make, or None; raise a ValueError if an elastic node is not a whole job."""
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
    exchanges: Snapshot
    changed: set[str]
    sent: list[str]
    exchanges_sent: int


class ElasticFragment(Fragment):
    outer: ElasticOuterStep

    @property
    def has_loaded(self) -> bool:
        return self._loaded is not None

    def snapshot(self) -> BeforeExchange:
        kept = self.outer.snapshot(self._changed)
        return BeforeExchange(kept, set(self._changed), list(self._sent), self.progress.sent)

    def rollback(self, before: BeforeExchange) -> None:
        """Undo the exchanges since ``before``."""
        self.outer.rollback(before.exchanges)
        self._changed, self._sent, self.progress.arrives = before.changed, before.sent, None
        self.progress.sent = before.exchanges_sent  # an exchange may have failed before it was counted

    def take_over(self, agreed: Mapping[str, Tensor], fit: OuterFit) -> None:
        """Continue from the agreed weights and the fit of other nodes. Collective over the node."""
        self.outer.take_over(agreed, fit, self._of(agreed.keys()))
        self._changed, self._sent, self.progress.arrives = set(), [], None
        self.outer.receive(self._of(agreed.keys()))
        self._unit.invalidate()


# ---- elastic header
#
# Headers that elastic nodes send each other before an exchange; they show which nodes are current.
#
# [Note: Who is current]
# A node counts the exchanges to which it has committed. A node that was lost or suspended has missed some exchanges,
# and a new node has made none. When nodes meet, the current nodes are those with the most exchanges and, among these,
# the most steps. All other nodes take over the state of the first current node: agreed weights, optimizer states and
# the step. Their own changes since their last exchange are dropped, and have no weight in the next exchange.
#
# A node whose heartbeats are late may count as lost while it trains on. If nodes that wait to join see a whole round as
# lost, they begin a round from their own state, a fork. The new round closes the earlier one, so that the two rounds
# never commit side by side ([Note: One round at a time] in _torch_members.py). But the fork may reach the same number
# of exchanges with other weights, so nodes also compare the round of their last exchange.


@dataclass(frozen=True)
class Request:
    """The exchange that a node is about to make after a step; ``fragments`` are indices of the model's fragments.

    ``exchanges_all`` is True if all trained fragments are exchanged, so that nodes hold the same weights afterwards.
    """

    step: int
    fragments: tuple[int, ...]
    exchanges_all: bool = False


@dataclass(frozen=True)
class NodeHeader:
    model: str  # text that must be the same on all nodes
    committed: int  # exchanges that this node has committed to
    made: int  # optimizer steps of the training
    round: int  # the round of its last exchange
    start: object  # checksums of its agreed weights until it has committed to an exchange; None from then on
    round_is_over: bool  # nodes have to meet again, for example because a node waits to join
    request: Request | None  # the exchange that it is about to make; None if it only joins
    changed: tuple[tuple[bool, ...], ...]  # by fragment: whether each parameter was trained since its last exchange
    trained: tuple[int, ...]  # by fragment: steps or tokens since its last exchange
    counts_tokens: bool
    products: tuple[Products, ...]  # by fragment: this node's part of the products that adapt the momentum

    @property
    def knows(self) -> tuple[int, int, int]:
        return self.committed, self.made, self.round


def check_alike(headers: Sequence[NodeHeader], model: str) -> None:
    """Raise a ValueError on every node unless all have the same model, and all count tokens or all count steps."""
    for node, header in enumerate(headers):
        if header.model != headers[0].model:
            raise ValueError(
                f"{model}: nodes were given different models or local steps: {headers[0].model} on node 0, "
                f"{header.model} on node {node}; give all of them the same"
            )
    counts = {header.counts_tokens: node for node, header in enumerate(headers) if any(header.trained)}
    if len(counts) > 1:
        raise ValueError(
            f"{model}: node {counts[True]} counts tokens, but node {counts[False]} does not: call "
            "count_tokens on all nodes or on none"
        )


def current_nodes(headers: Sequence[NodeHeader]) -> list[int]:
    """Return the current nodes; see [Note: Who is current]. Before the first exchange, their weights are equal, too."""
    most = max(header.knows for header in headers)
    nodes = [node for node, header in enumerate(headers) if header.knows == most]
    return [node for node in nodes if headers[node].start == headers[nodes[0]].start]


# ---- elastic training
#
# Local-update training on nodes that come and go.
#
#     header              step, fragments due, what each node has trained and how much, whether a node waits to join
#     meeting             after a change of members: a node that joins takes over a current node's state
#     exchange            as among fixed nodes, but tentative; a node's changes are weighted by its steps or tokens
#     decision            by all members, in the store: commit, or meet again and repeat
#
# _torch_members.py finds the members and makes their decisions.


class Membership(NamedTuple):
    """A node's place among the nodes that train together.

    Attributes:
        node: Its number among them, from 0 on, which changes as nodes come and go.
        nodes: The number of these nodes.
        step: Optimizer steps that the training has made, including those before this node joined.
    """

    node: int
    nodes: int
    step: int


class ElasticTraining(LocalTraining):
    """Counts the steps of the model under a root, and exchanges the model's fragments with the other members."""

    def __init__(self, model: str, fragments: Sequence[ElasticFragment], *how: Any) -> None:
        super().__init__(model, fragments, *how)
        assert self._config.elastic is not None
        self._fragments = fragments
        self._members = Members(self._config.elastic, self._ranks, model)
        self._is_member = self._was_called = False
        self._steps = self._tokens = 0  # made by this node
        self._counts_tokens = False
        self._until_exchange = [0] * len(fragments)  # the steps or tokens before each fragment's last exchange

    @property
    def membership(self) -> Membership:
        mesh = self._members.mesh
        node, nodes = (0, 1) if mesh is None else (mesh.rank, mesh.topology.nodes)
        return Membership(node, nodes, self._progress.made)

    def count_tokens(self, tokens: int) -> None:
        self._counts_tokens = True
        self._tokens += tokens

    def end(self) -> None:
        for fragment in self._fragments:
            fragment.outer.disconnect()
        self._members.end()
        self._is_member = False

    def step_ended(self) -> None:
        before = self._progress.made
        super().step_ended()
        self._steps += self._progress.made - before

    def _prepare(self) -> None:
        was_loaded = any(fragment.has_loaded for fragment in self._fragments)
        super()._prepare()
        if was_loaded:  # the loaded state may be older than the other nodes' last exchange
            self._members.disconnect()

    def _restart_from_loaded(self) -> None:
        # Only this node has loaded weights. They count as its own changes, which its next exchange sends.
        for fragment in self._all:
            fragment.was_reloaded = False

    def _catch_up(self) -> None:
        # The first call may come from FSDP's set-up right before a state dict is loaded. A node that joined now would
        # take over other nodes' state, and the load would replace it. So a node joins at the next forward.
        if self._members.mesh is None and self._was_called:
            self._on_any_rank(False, f"{before_forward_of(self._progress.made)}, where this node meets others")
            self._exchange(None)
        self._was_called = True
        super()._catch_up()

    def _exchange_after(self, step: int) -> None:
        due = [self._trained[index] for index in self._config.due(step, len(self._trained))]
        if due:
            self._on_any_rank(False, before_forward_of(step))
            self._exchange(Request(step, tuple(at for at, each in enumerate(self._all) if each in due)))
            return
        for fragment in self._all:
            fragment.progress.exchanged = step

    def exchange_all(self) -> None:
        """Exchange all fragments now; all nodes hold the same weights afterwards. Collective over the node."""
        self._prepare()
        for fragment in self._trained:
            fragment.note_trained()
        while self._progress.settled != self._progress.made:
            trained = tuple(at for at, each in enumerate(self._all) if each in self._trained)
            self._exchange(Request(self._progress.made, trained, exchanges_all=True))

    # ---- an exchange

    def _exchange(self, request: Request | None) -> None:
        """Make the requested exchange, or that of the nodes that this node joins; repeat until the members commit."""
        done = False
        while not done:
            if self._members.mesh is None:
                self._is_member = False
                for fragment in self._fragments:
                    fragment.outer.disconnect()
                self._members.join()
            headers = self._members.gather(self._header(request))
            if headers is None:
                continue
            check_alike(headers, self.model)
            if not self._is_member:
                request = headers[current_nodes(headers)[0]].request
                done = self._meet(headers) and request is None
            elif any(each.round_is_over for each in headers) or len(current_nodes(headers)) < len(headers):
                self._members.disconnect()
            else:
                done = self._exchange_with(headers)

    def _header(self, request: Request | None) -> NodeHeader:
        progress, group = self._progress, self._ranks.group
        flags = [(fragment, self._ranks, fragment.changed) for fragment in self._all]
        changed = tuple(tuple(on_any()) for _, on_any in all_reduce_flags(flags))
        start: object = None
        if progress.committed == 0:
            sums = [checksums(fragment.outer.agreed) for fragment in self._fragments]
            start = [sums] if group is None else from_each_rank(sums, group)
        total = self._tokens if self._counts_tokens else self._steps
        config = replace(self._config, elastic=None)
        return NodeHeader(
            f"{sum(map(len, changed))} parameters in {len(changed)} units on {self._ranks.topology}, {config!r}",
            progress.committed,
            progress.made,
            progress.round,
            start,
            self._is_member and self._members.round_is_over(),
            request,
            changed,
            tuple(total - before for before in self._until_exchange),
            self._counts_tokens,
            tuple(self._products(self._all)),
        )

    def _share_changes(self, headers: Sequence[NodeHeader]) -> None:
        """Mark a parameter as changed if any of the nodes with these headers has trained it."""
        for at, fragment in enumerate(self._all):
            flags = zip(*(header.changed[at] for header in headers), strict=True)
            fragment.changed = [any(on_nodes) for on_nodes in flags]

    def _exchange_with(self, headers: Sequence[NodeHeader]) -> bool:
        request = headers[0].request
        assert request is not None
        weights = [relative_weights([header.trained[at] for header in headers]) for at in request.fragments]
        self._share_changes(headers)
        due = [self._fragments[at] for at in request.fragments]
        before = [fragment.snapshot() for fragment in due]
        # All members add the same products in the same order, so they adapt the momentum alike, bit for bit.
        parts = [zip(*(header.products[at] for header in headers), strict=True) for at in request.fragments]
        self._adapt_momentum(due, [(sum(along), sum(norm)) for along, norm in parts])
        failure, node = "", self.membership.node
        try:
            for fragment, weight in zip(due, weights, strict=True):
                fragment.send(request.step, weight[node])
        except RuntimeError as error:  # such as the loss of a member
            failure = str(error) or type(error).__name__
        if not self._members.commit(failure):
            for fragment, snapshot in zip(due, before, strict=True):
                fragment.rollback(snapshot)
            return False
        total = self._tokens if self._counts_tokens else self._steps
        for at, fragment in zip(request.fragments, due, strict=True):
            fragment.receive(1.0 if request.exchanges_all else self._config.mix)
            self._until_exchange[at] = total
        for progress in [fragment.progress for fragment in self._all]:
            progress.exchanged = request.step
            progress.committed += 1
            progress.round = self._members.round_number
            progress.settled = request.step if request.exchanges_all else progress.settled
        return True

    # ---- a change of members

    def _meet(self, headers: Sequence[NodeHeader]) -> bool:
        """Have nodes that join take over a current node's state; return whether the members commit to the new round."""
        mesh = self._members.mesh
        assert mesh is not None
        current = current_nodes(headers)
        joins, state, failure = mesh.rank not in current, None, ""
        if not joins:
            self._share_changes([headers[node] for node in current])
        momenta: list[dict[str, Tensor]] = []
        try:
            if len(current) < len(headers):
                own = self._state() if mesh.rank == current[0] else None
                state = self._members.send(own, current[0], needed=joins)
            for at, fragment in enumerate(self._fragments):
                agreed = fragment.outer.agreed if state is None else state["agreed"][at]
                numels = {name: weights.numel() for name, weights in agreed.items()}
                momenta.append(fragment.outer.momentum_among(mesh, numels, owned=not joins))
        except RuntimeError as error:
            failure = str(error) or type(error).__name__
        if not self._members.commit(failure):
            return False
        if state is not None:
            self._take_over(state)
        for fragment, momentum in zip(self._fragments, momenta, strict=True):
            fragment.outer.connect(mesh, momentum)
        self._is_member = True
        return True

    def _state(self) -> dict[str, Any]:
        optimizers = [OptimizerState(each, self._all[0]) for each in optimizers_of(self._parameters())]
        return {
            "progress": asdict(self._progress),
            "agreed": [{name: each.cpu() for name, each in fragment.outer.agreed.items()} for fragment in self._all],
            "fits": [fragment.outer.last_fit for fragment in self._fragments],
            "optimizers": [each.state_dict()["state"] for each in optimizers],
        }

    def _take_over(self, state: dict[str, Any]) -> None:
        """Continue from another node's state, or raise a ValueError if the optimizers differ. Collective."""
        optimizers = optimizers_of(self._parameters())
        if any(state["optimizers"]) and len(state["optimizers"]) != len(optimizers):
            raise ValueError(
                f"{self.model}: this node joins others that have {len(state['optimizers'])} optimizers, but it has "
                f"{len(optimizers)}: make them before the second forward"
            )
        states = [OptimizerState(each, self._all[0]) for each in optimizers]
        for own, saved in zip(states, state["optimizers"], strict=False):
            own.check(saved)
        for fragment, agreed, fit in zip(self._fragments, state["agreed"], state["fits"], strict=True):
            fragment.take_over(agreed, fit)
            vars(fragment.progress).update(state["progress"])
        for own, saved in zip(states, state["optimizers"], strict=False):
            own.restore(saved)
        self._trained = [fragment for fragment in self._all if fragment.was_trained]
        self._awaits_step = False
        self._until_exchange = [self._tokens if self._counts_tokens else self._steps] * len(self._all)
