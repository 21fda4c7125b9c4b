"""How far above synchronous training the runs of the study of local steps end, each at its best learning rate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gaps import REFERENCE, Runs, spread
from result_files import Result
from result_pages import markdown

LOCAL_NAMES = (
    "full_shard local32:int4+loco local32:int4 local32:none local32:int8 local8:int4+loco local128:int4+loco "
    "local8:int4 local128:int4 local8:none local128:none local32:int4+loco:at-once local32:int4+loco:overlap1 "
    "local32:int4+loco:overlap1:mix0.5 local32:int4+loco:outer1:momentum0 local8:int8 local128:int8"
).split()
"""Names of the study of local steps: ``every=32`` with int4 and error feedback, and that with one thing changed.

``localEVERY:CODEC[+loco][:CHANGE]...``, where a change is ``at-once`` (all fragments in the same step),
``overlapSTEPS``, ``mixSHARE``, ``outerLR`` or ``momentumVALUE``; what a name does not say is LocalSteps' default.
"""
NOT_COMPARED = ("nodes", "batch", "lr")
"""Settings in which runs of the study may differ: nodes share a step's tokens, and learning rates are tuned."""


class TunedRuns:
    """The runs on one number of nodes, of each configuration those at its best learning rate.

    That has the lowest loss on the seeds that all rates of the configuration were trained with; if these have no seed
    in common, it is the one with most seeds.

    Args:
        results: As the study writes them, all on the same nodes.

    Attributes:
        runs: Those at the best learning rates.
        rates: The best learning rates, by configuration.
        tried: The mean loss of each learning rate that was tried, over ``compared_on``, by configuration.
        compared_on: The seeds that all rates of a configuration were trained with, by configuration.
    """

    def __init__(self, results: Sequence[Result]) -> None:
        self._by_rate: dict[str, dict[float, list[Result]]] = {}
        for result in results:
            rates = self._by_rate.setdefault(result["rows"][0]["name"], {})
            rates.setdefault(result["arguments"]["lr"], []).append(result)
        self.rates: dict[str, float] = {}
        self.tried: dict[str, dict[float, float]] = {}
        self.compared_on: dict[str, list[int]] = {}
        for name, by_rate in self._by_rate.items():
            self._choose(name, {rate: Runs(of_rate) for rate, of_rate in sorted(by_rate.items())})
        chosen = [result for name, rate in self.rates.items() for result in self._by_rate[name][rate]]
        self.runs = Runs(chosen)

    def _choose(self, name: str, by_rate: dict[float, Runs]) -> None:
        common = set.intersection(*(set(runs.seeds(name)) for runs in by_rate.values()))
        self.compared_on[name] = sorted(common)
        if not common:
            self.tried[name] = {}
            self.rates[name] = max(by_rate, key=lambda rate: len(by_rate[rate].seeds(name)))
            return
        losses = {rate: statistics.fmean(runs.final(name, seed) for seed in common) for rate, runs in by_rate.items()}
        self.tried[name] = losses
        # What has diverged has no loss.
        self.rates[name] = min(losses, key=lambda rate: math.inf if math.isnan(losses[rate]) else losses[rate])

    @property
    def names(self) -> list[str]:
        """The reference, then by codec and what else is changed, from few steps between exchanges to many."""
        known = {variant(name): index for index, name in reversed(list(enumerate(LOCAL_NAMES))) if name != REFERENCE}
        local = sorted(
            self.rates.keys() - {REFERENCE},
            key=lambda name: (known.get(variant(name), len(known)), variant(name), every(name)),
        )
        return [*(name for name in (REFERENCE,) if name in self.rates), *local]

    def variants(self) -> dict[str, list[str]]:
        """The configurations of local steps that differ in nothing but ``every``."""
        found: dict[str, list[str]] = {}
        for name in self.names:
            if name != REFERENCE:
                found.setdefault(variant(name), []).append(name)
        return found


def every(name: str) -> int:
    """The steps between two exchanges."""
    return int(name.partition(":")[0].removeprefix("local"))


def variant(name: str) -> str:
    """A name without the number of steps."""
    return name.partition(":")[2]


def by_nodes(results: Sequence[Result]) -> dict[int, TunedRuns]:
    """The runs, by the number of nodes.

    Raises:
        ValueError: If they can't be compared, of different texts, say.
    """
    for result in results:
        different = comparable(result["arguments"]).items() ^ comparable(results[0]["arguments"]).items()
        if different:
            raise ValueError(f"runs with different settings can't be compared: {sorted(different)}")
    nodes = sorted({result["arguments"]["nodes"] for result in results})
    return {n: TunedRuns([result for result in results if result["arguments"]["nodes"] == n]) for n in nodes}


def comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same in runs that are compared."""
    return {name: value for name, value in settings.items() if name not in NOT_COMPARED}


def table(results: Sequence[Result]) -> str:
    """All configurations at their best learning rates: mean and standard deviation over the seeds.

    Gaps are of the same seeds of the reference on as many nodes.
    """
    rows = []
    for nodes, tuned in by_nodes(results).items():
        for name in tuned.names:
            losses = [tuned.runs.final(name, seed) for seed in tuned.runs.seeds(name)]
            has_gap = name != REFERENCE and REFERENCE in tuned.rates
            gap = spread(tuned.runs.gaps(name, REFERENCE), "+.2f") if has_gap else ""
            rate = rate_of(tuned.rates[name])
            rows.append([str(nodes), name, rate, str(len(losses)), spread(losses, ".4f"), gap])
    return markdown(("nodes", "configuration", "lr", "seeds", "validation loss", f"above {REFERENCE}, %"), rows)


def learning_rates(results: Sequence[Result]) -> str:
    """The losses at the learning rates that were tried, of configurations with more than one; the best in bold."""
    tuned_by_nodes = by_nodes(results)
    shown = {
        (nodes, name): tuned
        for nodes, tuned in tuned_by_nodes.items()
        for name in tuned.names
        if len(tuned.tried[name]) > 1
    }
    rates = sorted({rate for (_, name), tuned in shown.items() for rate in tuned.tried[name]})
    rows = []
    for (nodes, name), tuned in shown.items():
        losses = {rate: f"{loss:.4f}" for rate, loss in tuned.tried[name].items()}
        losses[tuned.rates[name]] = f"**{losses[tuned.rates[name]]}**"
        seeds = ", ".join(map(str, tuned.compared_on[name]))
        rows.append([str(nodes), name, seeds, *(losses.get(rate, "") for rate in rates)])
    return markdown(("nodes", "configuration", "seeds", *(f"lr {rate_of(rate)}" for rate in rates)), rows)


def rate_of(lr: float) -> str:
    """A learning rate as it is written in names of files and in tables."""
    return f"{lr:g}"
