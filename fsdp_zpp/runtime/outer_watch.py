"""Watches the outer steps of a model: sums their figures, fits the momentum to them, and warns if steps overshoot.

[Note: Figures of exchanges]
Of a fragment's outer step, each rank knows the scalar products of its own chunk (:attr:`OuterStep.products`). These are
summed over all ranks when the fragment is due again, beside what ranks agree on then: the host waits there anyway,
training does not need the communicator meanwhile, and all ranks conclude the same from the same bits.

[Note: Overshooting]
A round is an exchange of each fragment; its figures are means over the fragments, weighted by <g, g>. Gradient descent
on a quadratic diverges if its steps are more than twice as long as the step that reaches the minimum. If the nodes'
mean change is about that long, an outer step of more than twice the mean change overshoots. If successive changes
correlate by less than -0.5, more than half of a change takes back what the steps before it did. A single round may be
chance; five in a row are not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from fsdp_zpp.collectives.devices import collective_device
from fsdp_zpp.collectives.mesh import ProcessMesh
from fsdp_zpp.collectives.ordered_sum import ordered_sum
from fsdp_zpp.collectives.outer_optimizer import OuterFigures
from fsdp_zpp.config.outer_momentum import TARGET_GAIN

from .fragment import Fragment

logger = logging.getLogger("fsdp_zpp")

Products = tuple[float, float]
"""<m, g> and <g, g> of an outer step; see the top of outer_momentum.py."""

MOST_GAIN = 2.0
"""Aligned gain above which an outer step overshoots."""
LEAST_CORRELATION = -0.5
"""Correlation of successive changes below which they point against each other."""
ROUNDS = 5
"""Rounds in a row after which there is a warning."""


class OuterWatch:
    """Fits the momentum of a model's outer steps, keeps their figures, and warns once if they overshoot.

    See [Note: Figures of exchanges] and [Note: Overshooting].

    Args:
        model: The model's name in logs.
        ranks: All ranks.
        other_axes: Returns the ranks along the axes over which another parallelism shards the model.

    Attributes:
        last: Figures of each fragment's latest outer step whose figures are known; a fragment that did not change has
            none.
    """

    def __init__(self, model: str, ranks: ProcessMesh, other_axes: Callable[[], Iterable[dist.ProcessGroup]]) -> None:
        self._model, self._ranks, self._other_axes = model, ranks, other_axes
        self.last: dict[Fragment, OuterFigures] = {}
        self._round: dict[Fragment, OuterFigures | None] = {}
        self._large = self._opposed = 0  # rounds in a row
        self._has_warned = False

    def fit(self, due: Sequence[Fragment], trained: Iterable[Fragment]) -> None:
        """Choose the momentum of the next outer steps of some fragments, by their last ones. Collective.

        Args:
            due: The fragments, at least one.
            trained: All fragments that are exchanged.
        """
        self.note({fragment: fragment.outer.fit(of) for fragment, of in self.products(due).items()}, trained)

    def products(self, fragments: Sequence[Fragment]) -> dict[Fragment, Products]:
        """Return what fragments' next outer steps are fitted to, summed over the ranks. Collective.

        Args:
            fragments: At least one.
        """
        groups = self._groups
        device = collective_device(groups[0]) if groups else torch.device("cpu")
        sums = ordered_sum(torch.cat([fragment.outer.products.to(device) for fragment in fragments]), groups)
        return dict(zip(fragments, zip(sums[::2], sums[1::2], strict=True), strict=True))

    def note(self, figures: Mapping[Fragment, OuterFigures | None], trained: Iterable[Fragment]) -> None:
        """Keep figures of fragments' last outer steps, and warn if a round of ``trained`` fragments ends with them."""
        self._round |= figures
        self.last |= {fragment: each for fragment, each in figures.items() if each is not None}
        if self._round.keys() >= set(trained):
            self._end_round(speaks=all(dist.get_rank(group) == 0 for group in self._groups))

    @property
    def _groups(self) -> list[dist.ProcessGroup]:
        """Return the groups of all ranks, one for each axis; none for a rank alone."""
        return [group for group in (self._ranks.group, *self._other_axes()) if group is not None]

    def _end_round(self, *, speaks: bool) -> None:
        figures = mean_of(each for each in self._round.values() if each is not None)
        config = next(iter(self._round)).config
        self._round = {}
        if figures is None:
            return
        correlation = figures.correlation
        if speaks:
            logger.debug(
                "%s: outer correlation %s, outer gain %.3f, outer momentum %.3f",
                self._model,
                "unknown" if correlation is None else f"{correlation:.3f}",
                figures.gain,
                figures.momentum,
            )
        self._large = self._large + 1 if figures.gain > MOST_GAIN else 0
        self._opposed = self._opposed + 1 if correlation is not None and correlation < LEAST_CORRELATION else 0
        if max(self._large, self._opposed) < ROUNDS or self._has_warned:
            return
        self._has_warned = True
        if speaks:
            remedy = f"outer_lr={config.outer_lr}"
            if config.outer_momentum not in ("auto", 0):
                remedy = f"outer_momentum={config.outer_momentum} or {remedy}"
                remedy += ", or pass outer_momentum='auto'" * (config.outer_lr < TARGET_GAIN)  # which else is refused
            logger.warning(
                "%s: outer steps overshoot: in %d exchanges in a row they were more than %g times the nodes' mean "
                "change, or successive changes pointed against each other (now %.2f times, correlation %.2f); lower %s",
                self._model,
                ROUNDS,
                MOST_GAIN,
                figures.gain,
                0.0 if correlation is None else correlation,
                remedy,
            )


def mean_of(figures: Iterable[OuterFigures]) -> OuterFigures | None:
    """Return the means of figures of several fragments, weighted by <g, g>; None if there are no figures."""
    every = list(figures)
    if not every:
        return None
    norm = sum(each.norm for each in every)
    correlated = [(each.norm, each.correlation) for each in every if each.correlation is not None]
    total = sum(weight for weight, _ in correlated)
    return OuterFigures(
        norm,
        sum(each.norm * each.momentum for each in every) / norm,
        sum(each.norm * each.gain for each in every) / norm,
        sum(weight * correlation for weight, correlation in correlated) / total if total else None,
    )


def named_figures(figures: OuterFigures | None) -> dict[str, float]:
    """Return figures of outer steps by their names in a monitor; none if there are no figures."""
    if figures is None:
        return {}
    correlation = {} if figures.correlation is None else {"outer/correlation": figures.correlation}
    return {"outer/gain": figures.gain, "outer/momentum": figures.momentum} | correlation
