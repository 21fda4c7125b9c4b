"""Table of the study of DiLoCo's recipe, with the losses that its authors published beside ours."""

from __future__ import annotations

from collections.abc import Sequence

from gaps import Runs, spread
from local_gaps import TunedRuns
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
    alike: dict[tuple[int, int, str, float, int], list[Result]] = {}
    for result in results:
        given = result["arguments"]
        key = given["tokens"], given["nodes"], result["rows"][0]["name"], given["lr"], given["batch"]
        alike.setdefault(key, []).append(result)
    rows = []
    for (data, nodes, name, lr, batch), own in sorted(alike.items(), key=lambda run: (-run[0][0], *run[0][1:])):
        published = PUBLISHED.get(nodes) if data == TOKENS else None
        runs = Runs([*own, *([] if name == SYNCHRONOUS else _best_synchronous(results, data))])
        losses = [runs.final(name, seed) for seed in runs.seeds(name)]
        gaps = [] if name == SYNCHRONOUS else runs.gaps(name, SYNCHRONOUS)
        cells = [f"{data / 1e6:.0f} M", f"{lr:.4f}, {nodes * batch}", str(len(losses)), spread(losses, ".4f")]
        cells += [spread(gaps, "+.2f") if gaps else "", "" if published is None else f"{published:+.1f}"]
        rows.append([str(nodes), name, *cells])
    head = ("replicas", "configuration", "bytes read", "lr, sequences a step", "seeds", "validation loss")
    return markdown((*head, "above synchronous, %", "published, %"), rows)


def _best_synchronous(results: Sequence[Result], data: int) -> list[Result]:
    """Return the synchronous runs on so many tokens at the best learning rate."""
    runs = [r for r in results if r["arguments"]["tokens"] == data and r["rows"][0]["name"] == SYNCHRONOUS]
    rate = TunedRuns(runs).rates.get(SYNCHRONOUS)
    return [run for run in runs if run["arguments"]["lr"] == rate]
