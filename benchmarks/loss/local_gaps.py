"""Gaps of the study of local steps: how far above synchronous training runs end, each at its best learning rate.

A name is ``localEVERY:CODEC[+loco][:CHANGE]...``, where a change is ``at-once`` (all fragments in the same step),
``overlapSTEPS``, ``mixSHARE``, ``outerLR``, ``momentumVALUE``, ``momentum-auto``, ``startSTEPS`` or
``momentsEXCHANGES``. What a name leaves out is LocalSteps' default, except for the momentum, which is DiLoCo's 0.9.
``local8-1024-32`` exchanges every 8 steps, and from step 1024 on every 32. ``topk+loco`` has the outer step and the
errors of SparseLoCo (arXiv 2508.15706).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gaps import REFERENCE, Runs, spread
from markdown_tables import markdown
from result_files import Result

LOCAL_NAMES = (
    "full_shard local32:int4+loco local32:int4 local32:none local32:int8 local8:int4+loco local128:int4+loco "
    "local8:int4 local128:int4 local8:none local128:none local32:int4+loco:at-once local32:int4+loco:overlap1 "
    "local32:int4+loco:overlap1:mix0.5 local32:int4+loco:outer1:momentum0 local8:int8 local128:int8"
).split()
"""Names that are trained by default: ``every=32`` with int4 and error feedback, and that with one thing changed."""
NOT_COMPARED = ("nodes", "batch", "lr")
"""Settings in which runs of the study may differ: nodes share a step's tokens, and learning rates are tuned."""


class TunedRuns:
    """Runs on one number of nodes, of each configuration those at its best learning rate.

    The best has the lowest loss on the seeds that all rates of the configuration were trained with; if these have no
    seed in common, it is the rate with most seeds.

    Args:
        results: Results of the study, all on the same nodes.

    Attributes:
        runs: Runs at the best learning rates.
        rates: The best learning rates, by configuration.
        tried: The mean loss of each learning rate that was tried, over ``compared_on``, by configuration.
        compared_on: The seeds that all rates of a configuration were trained with, by configuration.
    """

    def __init__(self, results: Sequence[Result]) -> None:
        by_rate: dict[str, dict[float, list[Result]]] = {}
        for result in results:
            rates = by_rate.setdefault(result["rows"][0]["name"], {})
            rates.setdefault(result["arguments"]["lr"], []).append(result)
        self.rates: dict[str, float] = {}
        self.tried: dict[str, dict[float, float]] = {}
        self.compared_on: dict[str, list[int]] = {}
        for name, rates in by_rate.items():
            self._choose(name, {rate: Runs(of_rate) for rate, of_rate in sorted(rates.items())})
        self.runs = Runs([result for name, rate in self.rates.items() for result in by_rate[name][rate]])

    def _choose(self, name: str, by_rate: dict[float, Runs]) -> None:
        common = set.intersection(*(set(runs.seeds(name)) for runs in by_rate.values()))
        losses = {rate: [runs.final(name, seed) for seed in common] for rate, runs in by_rate.items()}
        self.compared_on[name] = sorted(common)
        self.tried[name] = {rate: statistics.fmean(of_rate) for rate, of_rate in losses.items() if of_rate}
        if common:
            # A run that diverged has no loss.
            self.rates[name] = min(
                losses, key=lambda rate: (math.isnan(self.tried[name][rate]), self.tried[name][rate])
            )
        else:
            self.rates[name] = max(by_rate, key=lambda rate: len(by_rate[rate].seeds(name)))

    @property
    def names(self) -> list[str]:
        """Return the reference, then names by codec and other changes, from few steps between exchanges to many."""
        known = {variant(name): index for index, name in reversed(list(enumerate(LOCAL_NAMES))) if name != REFERENCE}

        def place(name: str) -> tuple[int, str, int]:
            return known.get(variant(name), len(known)), variant(name), every(name)

        reference = [name for name in (REFERENCE,) if name in self.rates]
        return reference + sorted(self.rates.keys() - {REFERENCE}, key=place)

    def variants(self) -> dict[str, list[str]]:
        """Return the configurations of local steps that differ in nothing but ``every``, by variant."""
        variants: dict[str, list[str]] = {}
        for name in self.names:
            if name != REFERENCE:
                variants.setdefault(variant(name), []).append(name)
        return variants


def every(name: str) -> int:
    """Return the steps between two exchanges, in the end."""
    return int(name.partition(":")[0].removeprefix("local").split("-")[-1])


def variant(name: str) -> str:
    """Return a name without the number of steps."""
    return name.partition(":")[2]


def by_nodes(results: Sequence[Result]) -> dict[int, TunedRuns]:
    """Return the runs, by the number of nodes.

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
    """Return the settings that must be the same in runs that are compared."""
    return {name: value for name, value in settings.items() if name not in NOT_COMPARED}


def table(results: Sequence[Result]) -> str:
    """Return a table of all configurations at their best learning rates: mean and standard deviation over the seeds.

    Gaps are to the same seeds of the reference on as many nodes.
    """
    rows = []
    for nodes, tuned in by_nodes(results).items():
        for name in tuned.names:
            losses = [tuned.runs.final(name, seed) for seed in tuned.runs.seeds(name)]
            has_gap = name != REFERENCE and REFERENCE in tuned.rates
            gap = spread(tuned.runs.gaps(name, REFERENCE), "+.2f") if has_gap else ""
            rows.append([str(nodes), name, f"{tuned.rates[name]:g}", str(len(losses)), spread(losses, ".4f"), gap])
    return markdown(("nodes", "configuration", "lr", "seeds", "validation loss", f"above {REFERENCE}, %"), rows)


def learning_rates(results: Sequence[Result]) -> str:
    """Return a table of losses by learning rate, of configurations with more than one; the best is in bold."""
    shown = [
        (nodes, name, tuned)
        for nodes, tuned in by_nodes(results).items()
        for name in tuned.names
        if len(tuned.tried[name]) > 1
    ]
    rates = sorted({rate for _, name, tuned in shown for rate in tuned.tried[name]})
    rows = []
    for nodes, name, tuned in shown:
        losses = {rate: f"{loss:.4f}" for rate, loss in tuned.tried[name].items()}
        losses[tuned.rates[name]] = f"**{losses[tuned.rates[name]]}**"
        seeds = ", ".join(map(str, tuned.compared_on[name]))
        rows.append([str(nodes), name, seeds, *(losses.get(rate, "") for rate in rates)])
    return markdown(("nodes", "configuration", "seeds", *(f"lr {rate:g}" for rate in rates)), rows)
