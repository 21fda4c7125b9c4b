"""Gradient reductions of a unit: each step makes one of them, over all ranks or inside a node.

Without local steps, a unit has only the reduction over all ranks; with local steps and no synchronous ones, only that
inside the node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fsdp_zpp.collectives.error_state import ErrorFeedbackState
from fsdp_zpp.collectives.gradient_reduce import GradientReduce
from fsdp_zpp.collectives.hops import Traffic
from fsdp_zpp.collectives.mesh import ProcessMesh
from fsdp_zpp.config.local_steps import LocalSteps
from fsdp_zpp.config.resolve import ResolvedStrategy


class StepReductions:
    """Holds the gradient reductions of a unit, and knows which of them steps make now.

    Args:
        ranks: All ranks.
        resolved: The strategy as resolved on them.
        local_steps: Local steps of the nodes; None without, or on one node.
        traffic: Where bytes are counted.

    Attributes:
        is_synchronous: Whether steps reduce over all ranks now.
        mesh: The ranks over which steps reduce now.
        current: The reduction over these ranks; None if there is only one rank, or torch reduces.
        all: The reductions of all phases.
        have_two_hops: Whether any of them makes two hops.
    """

    def __init__(
        self, ranks: ProcessMesh, resolved: ResolvedStrategy, local_steps: LocalSteps | None, traffic: Traffic
    ) -> None:
        self.is_synchronous = local_steps is None or local_steps.is_synchronous(0)
        self._by_phase: dict[bool, tuple[ProcessMesh, GradientReduce | None]] = {}
        if local_steps is None or local_steps.has_synchronous_steps:
            self._by_phase[True] = ranks, _reduction(ranks, resolved, traffic)
        if local_steps is not None:
            node = ranks.own_node()
            self._by_phase[False] = node, _reduction(node, resolved.within_node(), traffic)
        self.mesh, self.current = self._by_phase[self.is_synchronous]
        self.all = [reduction for _, reduction in self._by_phase.values() if reduction is not None]
        self.have_two_hops = any(reduction.has_two_hops for reduction in self.all)

    def leave_to_torch(self) -> None:
        """Leave all reductions to torch."""
        self._by_phase = {phase: (mesh, None) for phase, (mesh, _) in self._by_phase.items()}
        self.current, self.all, self.have_two_hops = None, [], False

    def set_synchronous(self, synchronous: bool) -> None:
        """Let steps reduce over all ranks, or inside this node, from now on; drop the errors of the other reduction."""
        if synchronous == self.is_synchronous:
            return
        if self.current is not None and self.current.errors is not None:
            self.current.errors.reset()  # they are of another phase's gradients, and take memory
        self.is_synchronous = synchronous
        self.mesh, self.current = self._by_phase[synchronous]

    def error_states(self) -> Iterator[tuple[str, ErrorFeedbackState]]:
        """Yield the error states, each with its name in checkpoints."""
        for synchronous, (_, reduction) in self._by_phase.items():
            if reduction is not None and reduction.errors is not None:
                is_second = not synchronous and True in self._by_phase
                yield "errors in local steps" if is_second else "errors", reduction.errors


def set_synchronous(
    reductions: Sequence[StepReductions], synchronous: bool, on_any_rank: Callable[[bool], bool], step: str
) -> None:
    """Let the next step of a model reduce over all ranks, or inside nodes. Collective if that changes.

    Args:
        reductions: The reductions of the model's units, at least one.
        synchronous: Whether the step reduces over all ranks.
        on_any_rank: Returns whether something is true on any rank.
        step: Names the model and the step in errors.

    Raises:
        RuntimeError: If gradients of an earlier step wait for their reduction on any rank.
    """
    if synchronous == reductions[0].is_synchronous:
        return
    sums = (each.accumulated.sums for of_unit in reductions for each in of_unit.all)
    if on_any_rank(any(each is not None for each in sums)):
        raise RuntimeError(
            f"{step}: local_steps reduces gradients over other ranks from here on, but micro-batches of an earlier "
            "step have accumulated gradients that no backward has synchronized; synchronize the last micro-batch of "
            "each step, or clear gradients after it"
        )
    for of_unit in reductions:
        of_unit.set_synchronous(synchronous)


def _reduction(mesh: ProcessMesh, resolved: ResolvedStrategy, traffic: Traffic) -> GradientReduce | None:
    if mesh.intra is None and mesh.inter is None:
        return None
    intra, inter = resolved.gradient_codecs
    return GradientReduce(
        mesh,
        intra,
        inter,
        traffic,
        gradient_scope=resolved.scopes.gradients,
        optimizer_scope=resolved.scopes.optimizer,
        error_feedback=resolved.error_feedback,
        native=True,
    )
