"""Configurations of the study of Muon, and its table."""

from __future__ import annotations

from collections.abc import Sequence

from gaps import Runs, spread
from markdown_tables import markdown
from result_files import Result

OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}
UNSHARDED = "unsharded"
SHARDINGS = (UNSHARDED, "full_shard", "IGG", "III", "zeropp", "zeropp-III")
NAMES = [f"{optimizer}:{sharding}" for optimizer in OPTIMIZERS for sharding in SHARDINGS]
"""All configurations."""


def table(results: Sequence[Result]) -> str:
    """Return a table of losses and bytes; gaps are to the same optimizer without sharding, with the same seeds."""
    runs = Runs(results)
    sent = {row["name"]: row for result in results for row in result["rows"]}
    rows = []
    for name in (name for name in NAMES if name in runs.names):
        optimizer, sharding = name.split(":")
        reference = f"{optimizer}:{UNSHARDED}"
        losses = [runs.final(name, seed) for seed in runs.seeds(name)]
        gap = "" if name == reference else spread(runs.gaps(name, reference), "+.2f")
        model, own = sent[name]["sent_by_model"], sent[name]["sent_by_optimizer"]
        between = "" if model is None else _megabytes(model["inter"])
        cells = [spread(losses, ".4f"), gap, between, _megabytes(own["inter"]), _megabytes(own["intra"])]
        rows.append([OPTIMIZERS[optimizer], sharding, str(len(losses)), *cells])
    head = ("optimizer", "sharding", "seeds", "validation loss", "above unsharded, %")
    return markdown((*head, "model, inter-node", "optimizer, inter-node", "optimizer, intra-node"), rows)


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.2f} MB" if nbytes else "0"
