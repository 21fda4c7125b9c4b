"""Table of the study of DiLoCo's recipe, with the losses that its authors published beside ours."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from gaps import spread
from markdown_tables import markdown
from result_files import Result

SYNCHRONOUS = "synchronous"
"""Name of the configuration of one replica that trains on the whole batch."""
PUBLISHED = {2: 0.7, 4: 2.0, 8: 3.9}
"""Percent above data-parallel training by replicas, for 35 M parameters (table 4)."""


TOKENS = 700_000_000
"""Tokens of the published runs, about 20 a parameter."""


def table(results: Sequence[Result]) -> str:
    """Return a table of losses, with the paper's gaps beside ours.

    A gap is to the best synchronous runs on as much data, seed by seed: losses of two seeds differ by more than those
    of many configurations.
    """
    runs: dict[tuple[int, int, str, float, int], dict[int, float]] = {}
    for result in results:
        given, row = result["arguments"], result["rows"][0]
        key = given["tokens"], given["nodes"], row["name"], given["lr"], given["batch"]
        runs.setdefault(key, {})[row["seed"]] = row["validation"][-1][1]
    synchronous: dict[int, list[dict[int, float]]] = {}
    for (data, _, name, *_), losses in runs.items():
        if name == SYNCHRONOUS:
            synchronous.setdefault(data, []).append(losses)
    best = {data: _best(rates) for data, rates in synchronous.items()}
    rows = []
    for (data, nodes, name, lr, batch), losses in sorted(runs.items(), key=lambda run: (-run[0][0], *run[0][1:])):
        published = PUBLISHED.get(nodes) if data == TOKENS else None
        compared = {} if name == SYNCHRONOUS else best.get(data, {})
        gaps = [100 * (losses[seed] / compared[seed] - 1) for seed in losses if seed in compared]
        cells = [f"{data / 1e6:.0f} M", f"{lr:.4f}, {nodes * batch}", str(len(losses))]
        cells += [spread(list(losses.values()), ".4f"), spread(gaps, "+.2f") if gaps else ""]
        rows.append([str(nodes), name, *cells, "" if published is None else f"{published:+.1f}"])
    head = ("replicas", "configuration", "bytes read", "lr, sequences a step", "seeds", "validation loss")
    return markdown((*head, "above synchronous, %", "published, %"), rows)


def _best(rates: Sequence[dict[int, float]]) -> dict[int, float]:
    """Return the losses, by seed, at the learning rate that is best on the seeds that all have, if there are any."""
    common = set.intersection(*map(set, rates))
    return min(rates, key=lambda losses: statistics.mean(losses[seed] for seed in common or losses))
