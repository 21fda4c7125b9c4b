"""Table of the study of DiLoCo's recipe, with the losses that its authors published beside ours."""

from __future__ import annotations

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
    """Return a table of losses; gaps are to the best synchronous runs on as much data, with the paper's beside them."""
    runs: dict[tuple[int, int, str, float, int], list[float]] = {}
    for result in results:
        given, row = result["arguments"], result["rows"][0]
        key = given["tokens"], given["nodes"], row["name"], given["lr"], given["batch"]
        runs.setdefault(key, []).append(row["validation"][-1][1])
    best: dict[int, float] = {}
    for (data, _, name, *_), losses in runs.items():
        if name == SYNCHRONOUS:
            best[data] = min(sum(losses) / len(losses), best.get(data, float("inf")))
    rows = []
    for (data, nodes, name, lr, batch), losses in sorted(runs.items(), key=lambda run: (-run[0][0], *run[0][1:])):
        published = PUBLISHED.get(nodes) if data == TOKENS else None
        gaps = [] if data not in best or name == SYNCHRONOUS else [100 * (loss / best[data] - 1) for loss in losses]
        cells = [f"{data / 1e6:.0f} M", f"{lr:.4f}, {nodes * batch}", str(len(losses)), spread(losses, ".4f")]
        cells += [spread(gaps, "+.2f") if gaps else "", "" if published is None else f"{published:+.1f}"]
        rows.append([str(nodes), name, *cells])
    head = ("replicas", "configuration", "bytes read", "lr, sequences a step", "seeds", "validation loss")
    return markdown((*head, "above synchronous, %", "published, %"), rows)
