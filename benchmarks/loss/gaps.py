"""Gaps of the convergence study: how far above the reference runs end, and the share of a gap that a change closes.

A name is ``FAMILY`` or ``FAMILY+CHANGE``, so that the plain member of a family is the one without a change; ``w8:``
before it means that weights travel as int8(256).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from markdown_tables import markdown
from result_files import Result, Row

REFERENCE = "full_shard"
FAMILIES = {
    "int4": "4 bits in blocks of 128 between nodes, 8 bits inside",
    "int4c": "4 bits in blocks of 2048 between nodes, 8 bits inside",
    "int4x2": "4 bits in blocks of 2048 on both hops",
    "int2": "2 bits in blocks of 128 between nodes, 8 bits inside",
}
"""The plain configurations whose gap is to be closed."""
CHANGES = ("", "+loco", "+loco-beta0", "+hadamard", "+stochastic")


class Runs:
    """Finished runs by configuration and seed.

    Args:
        results: Results of the study, all with the same settings.

    Attributes:
        names: Configurations that were trained.
    """

    def __init__(self, results: Sequence[Result]) -> None:
        self._rows = {(row["name"], row["seed"]): row for result in results for row in result["rows"]}
        self.names = {name for name, _ in self._rows}

    def seeds(self, *names: str) -> list[int]:
        """Return the seeds that all ``names`` have been trained with."""
        return sorted(set.intersection(*({seed for name, seed in self._rows if name == each} for each in names)))

    def row(self, name: str, seed: int) -> Row:
        """Return a run's row of its result."""
        return self._rows[name, seed]

    def curve(self, name: str, seed: int) -> list[tuple[int, float]]:
        """Return validation losses, each with the tokens trained on before it."""
        return self._rows[name, seed]["validation"]

    def final(self, name: str, seed: int) -> float:
        """Return the last validation loss."""
        return self.curve(name, seed)[-1][1]

    def gaps(self, name: str, reference: str) -> list[float]:
        """Return by how many percent ``name`` ends above ``reference``, seed by seed."""
        return [
            100 * (self.final(name, seed) / self.final(reference, seed) - 1) for seed in self.seeds(name, reference)
        ]

    def members(self, family: str) -> list[str]:
        """Return a family's configurations that were trained, the plain one first."""
        return [family + change for change in CHANGES if family + change in self.names]


def table(runs: Runs, prefix: str = "") -> str:
    """Return a table of all configurations with one kind of weights: mean and standard deviation over the seeds.

    Args:
        runs: Runs, whose seeds are compared with the same seeds of the reference.
        prefix: ``w8:`` for int8 weights.
    """
    references = [REFERENCE, *([prefix + REFERENCE] if prefix else [])]
    head = ["configuration", "seeds", "validation loss", *(f"above {name}, %" for name in references)]
    plain = {name: prefix + family for family in FAMILIES for name in runs.members(prefix + family)}
    rows = []
    for name in [*(prefix + name for name in (REFERENCE, "int8") if prefix + name in runs.names), *plain]:
        losses = [runs.final(name, seed) for seed in runs.seeds(name)]
        above = ["" if name == reference else spread(runs.gaps(name, reference), "+.2f") for reference in references]
        changed = plain.get(name, name) != name
        share = closed(runs, name, plain[name], references[-1]) if changed else ""
        rows.append([name, str(len(losses)), spread(losses, ".4f"), *above, share])
    return markdown([*head, "of the gap closed"], rows)


def closed(runs: Runs, name: str, plain: str, reference: str) -> str:
    """Return the share of ``plain``'s mean gap to ``reference`` that ``name`` closes, and the extremes of the seeds."""
    seeds = runs.seeds(name, plain, reference)
    if not seeds:
        return "plain is missing"
    to_close = [runs.final(plain, seed) - runs.final(reference, seed) for seed in seeds]
    left = [runs.final(name, seed) - runs.final(reference, seed) for seed in seeds]
    noise = statistics.stdev(to_close) / len(seeds) ** 0.5 if len(seeds) > 1 else 0.0
    if not statistics.fmean(to_close) > 2 * noise:
        return "no gap"
    shares = [100 * (1 - remaining / gap) for remaining, gap in zip(left, to_close, strict=True) if gap]
    share = 100 * (1 - statistics.fmean(left) / statistics.fmean(to_close))
    return f"{share:.0f} % ({min(shares):.0f} to {max(shares):.0f} %)"


def spread(values: Sequence[float], form: str) -> str:
    """Return mean and standard deviation as text."""
    if not values:
        return ""
    mean = f"{statistics.fmean(values):{form}}"
    return f"{mean} ± {statistics.stdev(values):{form.lstrip('+')}}" if len(values) > 1 else mean
