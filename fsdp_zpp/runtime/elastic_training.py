"""Local-update training on nodes that come and go.

    header              step, what is due, what each node has trained and how much, whether somebody waits
    meeting             after a change of members: who joins takes over the state of one that is current
    exchange            as ever, but tentative, each node's changes weighted by what it has trained
    decision            by all members, in the store: commit, or meet again and repeat

collectives/members.py has the nodes and their decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from fsdp_zpp.collectives.agreement import agree_on_use, from_each_rank
from fsdp_zpp.collectives.fingerprint import checksums
from fsdp_zpp.collectives.members import Members
from fsdp_zpp.collectives.mesh import ProcessMesh
from fsdp_zpp.collectives.outer_optimizer import OuterFigures
from fsdp_zpp.collectives.weights_of_nodes import relative_weights

from .elastic_fragment import ElasticFragment
from .elastic_header import Header, Request, check_alike, current_nodes
from .fragment import Fragment, Progress
from .local_training import LocalTraining
from .made_optimizers import optimizers_of
from .moments import OptimizerMoments
from .optimizer_state import OptimizerState
from .outer_watch import OuterWatch
from .step_reductions import StepReductions


class Membership(NamedTuple):
    """A node's place among those that train together.

    Attributes:
        node: Its number among them, from 0 on, which changes as nodes come and go.
        nodes: How many they are.
        step: Optimizer steps that the training has made, those before this node joined included.
    """

    node: int
    nodes: int
    step: int


class ElasticTraining(LocalTraining):
    """Counts the steps of the model under a root, and exchanges its fragments with whichever nodes there are.

    Args:
        model: The model's name in errors.
        fragments: Its fragments, at least one.
        reductions: As of :class:`LocalTraining`, like the next four; ``ranks`` are those of this node.
        parameters: Returns the model's parameters.

    Raises:
        ValueError: If ranks differ in how far they have trained.
    """

    def __init__(
        self,
        model: str,
        fragments: Sequence[ElasticFragment],
        reductions: Sequence[StepReductions],
        ranks: ProcessMesh,
        steps_are_announced: Callable[[], bool],
        outer: OuterWatch,
        moments: OptimizerMoments,
        parameters: Callable[[], Sequence[nn.Parameter]],
    ) -> None:
        super().__init__(model, fragments, reductions, ranks, steps_are_announced, outer, moments)
        assert self._config.elastic is not None
        self._fragments = fragments
        self._parameters = parameters
        self._members = Members(self._config.elastic, ranks, model)
        self._is_member = self._was_called = False
        self._steps = self._tokens = 0  # made by this node
        self._counts_tokens = False
        self._until_exchange = [0] * len(fragments)  # how many of these preceded each fragment's last exchange

    @property
    def _progress(self) -> Progress:
        return self._all[0].progress

    @property
    def membership(self) -> Membership:
        """Return this node's place among those that train together; alone before it has met others."""
        mesh = self._members.mesh
        node, nodes = (0, 1) if mesh is None else (mesh.rank, mesh.topology.nodes)
        return Membership(node, nodes, self._progress.made)

    def count_tokens(self, tokens: int) -> None:
        """Weight this node's changes by tokens, of which it has just trained some more."""
        self._counts_tokens = True
        self._tokens += tokens

    def end(self) -> None:
        """Let no node join any more. Collective over the node."""
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
        if was_loaded:  # from before others' last exchange, perhaps
            self._members.disconnect()

    def _restart_from_loaded(self) -> None:
        # Other nodes have not loaded the same at the same time. What was loaded is this node's own, and is exchanged
        # with its next changes.
        for fragment in self._all:
            fragment.was_reloaded = False

    def _catch_up(self) -> None:
        # FSDP may have set up the model for a state dict that is about to be loaded, which must not replace what a node
        # takes over. So it does not join before the next forward.
        if self._members.mesh is None and self._was_called:
            self._on_any_rank(False, f"{self._before(self._progress.made)}, where this node meets others")
            self._exchange(None)
        self._was_called = True
        super()._catch_up()

    def _exchange_after(self, step: int) -> None:
        due = [self._trained[index] for index in self._config.due(step, len(self._trained))]
        if due:
            self._on_any_rank(False, self._before(step))
            self._exchange(Request(step, tuple(at for at, each in enumerate(self._all) if each in due)))
            return
        for fragment in self._all:
            fragment.progress.exchanged = step

    def exchange_all(self) -> None:
        """Exchange all fragments now, after which all nodes hold the same weights; does nothing if they do.

        Collective over the node.

        Raises:
            RuntimeError: If the store can't be reached.
        """
        self._prepare()
        for fragment in self._trained:
            fragment.note_trained()
        while self._progress.settled != self._progress.made:
            trained = tuple(at for at, each in enumerate(self._all) if each in self._trained)
            self._exchange(Request(self._progress.made, trained, settles=True))

    # ---- an exchange

    def _exchange(self, request: Request | None) -> None:
        """Exchange what this node, or those that it joins, are about to, until members commit to it."""
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

    def _header(self, request: Request | None) -> Header:
        progress, group = self._progress, self._ranks.group
        flags = [(fragment, self._ranks, fragment.changed) for fragment in self._all]
        changed = tuple(tuple(on_any()) for _, on_any in agree_on_use(flags))
        start: object = None
        if progress.committed == 0:
            sums = [checksums(fragment.outer.agreed) for fragment in self._fragments]
            start = [sums] if group is None else from_each_rank(sums, group)
        total = self._tokens if self._counts_tokens else self._steps
        config = replace(self._config, elastic=None)
        return Header(
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
            tuple(self.outer.products(self._all).values()),
        )

    def _share_changes(self, headers: Sequence[Header]) -> None:
        """Have this node exchange what any of these nodes has trained."""
        for at, fragment in enumerate(self._all):
            flags = zip(*(header.changed[at] for header in headers), strict=True)
            fragment.changed = [any(on_nodes) for on_nodes in flags]

    def _exchange_with(self, headers: Sequence[Header]) -> bool:
        """Make the exchange that members are about to; return whether they commit to it."""
        request = headers[0].request
        assert request is not None
        weights = [relative_weights([header.trained[at] for header in headers]) for at in request.fragments]
        self._share_changes(headers)
        due = [self._fragments[at] for at in request.fragments]
        before = [fragment.snapshot() for fragment in due]
        # All members add the same numbers in the same order, so their momenta are the same, bit for bit.
        parts = [zip(*(header.products[at] for header in headers), strict=True) for at in request.fragments]
        sums = [(sum(along), sum(norm)) for along, norm in parts]
        figures: dict[Fragment, OuterFigures | None] = {
            fragment: fragment.outer.fit(of) for fragment, of in zip(due, sums, strict=True)
        }
        failure, node = "", self.membership.node
        try:
            for fragment, weight in zip(due, weights, strict=True):
                fragment.send(request.step, weight[node])
        except RuntimeError as error:  # of which losing a member is one
            failure = str(error) or type(error).__name__
        if not self._members.commit(failure):
            for fragment, snapshot in zip(due, before, strict=True):
                fragment.rollback(snapshot)
            return False
        self.outer.note(figures, self._trained)
        for fragment in due:
            fragment.receive(1.0 if request.settles else self._config.mix)
        self._count(request)
        return True

    def _count(self, request: Request) -> None:
        total = self._tokens if self._counts_tokens else self._steps
        for at in request.fragments:
            self._until_exchange[at] = total
        for fragment in self._all:
            fragment.progress.exchanged = request.step
            fragment.progress.committed += 1
            fragment.progress.round = self._members.round_number
            fragment.progress.settled = request.step if request.settles else fragment.progress.settled

    # ---- a change of members

    def _meet(self, headers: Sequence[Header]) -> bool:
        """Have nodes that join take over from one that is current; return whether members commit to it."""
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
                numels = fragment.numels() if state is None else {n: w.numel() for n, w in state["agreed"][at].items()}
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
        """Return what a node takes over that joins."""
        optimizers = [OptimizerState(each, self._all[0]) for each in optimizers_of(self._parameters())]
        return {
            "progress": asdict(self._progress),
            "agreed": [{name: each.cpu() for name, each in fragment.outer.agreed.items()} for fragment in self._all],
            "fits": [fragment.outer.last_fit for fragment in self._fragments],
            "optimizers": [each.state_dict()["state"] for each in optimizers],
        }

    def _take_over(self, state: dict[str, Any]) -> None:
        """Continue from the state of another node. Collective over the node.

        Raises:
            ValueError: If its optimizers are others than this node's, before anything is taken over.
        """
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
