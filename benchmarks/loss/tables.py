"""Tables of losses: of the comparisons of examples/train.py, and of two computations."""

from __future__ import annotations

from collections.abc import Sequence

from markdown_tables import listed, markdown
from result_files import Result, Row


def comparison(runs: Sequence[Row]) -> str:
    """Return a table of one call of ``compare``; the first run is the one that others are compared with."""
    reference = runs[0]
    columns = {
        "strategy": "{label}",
        "train loss": lambda run: f"{train_loss(run):.4f}",
        "validation loss": final_text,
        "difference": lambda run: "" if run is reference else difference(run, reference),
        "step": milliseconds,
        "tokens/s": lambda run: f"{run['tokens_per_step'] / run['step_seconds']:,.0f}",
        "sent between nodes": lambda run: megabytes(run, reference, "inter"),
        "sent inside": lambda run: megabytes(run, reference, "intra"),
    }
    if reference["peak_memory"]:
        columns["peak memory"] = lambda run: f"{run['peak_memory'] / 2**30:.2f} GiB"
    return listed(runs, columns)


def by_seed(results: Sequence[Result]) -> str:
    """Return a table with a row for each result, of one strategy against FULL_SHARD with one seed.

    Args:
        results: Results of ``compare``, each with two runs.
    """
    rows = [{"seed": result["arguments"]["seed"], "pair": result["rows"]} for result in results]
    return listed(
        rows,
        {
            "seed": "{seed}",
            "full_shard": lambda row: final_text(row["pair"][0]),
            results[0]["rows"][1]["label"]: lambda row: final_text(row["pair"][1]),
            "difference": lambda row: difference(*row["pair"][::-1]),
            "sent between nodes": lambda row: megabytes(*row["pair"][::-1], "inter"),
        },
    )


def by_strategy(results: Sequence[Result]) -> str:
    """Return a table with a row for each strategy, after the FULL_SHARD that it is compared with."""
    rows: dict[str, tuple[str, ...]] = {}
    for result in results:
        reference, *_ = result["rows"]
        # The reference is the same in every result: CPUs sum in a fixed order.
        for run in result["rows"]:
            sent = (megabytes(run, reference, hop) for hop in ("inter", "intra"))
            rows[run["label"]] = (final_text(run), "" if run is reference else difference(run, reference), *sent)
    head = ("strategy", "validation loss", "difference", "sent between nodes", "sent inside")
    return markdown(head, ((label, *row) for label, row in rows.items()))


def small_parameters(rows: Sequence[Row]) -> str:
    """Return a table of gradients after codecs, if all are encoded and if small parameters are left as they are."""
    sent = {"all encoded": "encoded", "as sent": "spared"}
    cosines = {f"lowest cosine, {how}": f"{{{key}[cosine]:.3f}} ({{{key}[of]}})" for how, key in sent.items()}
    zeros = {f"most new zeros of a small one, {how}": f"{{{key}[zeros]:.1%}}" for how, key in sent.items()}
    return listed(rows, {"": "{model}", **cosines, **zeros})


def straddling(rows: Sequence[Row]) -> str:
    """Return a table of relative errors, by the encoded values."""
    errors = {name: f"{{errors[{name}]:.3%}}" for name in rows[0]["errors"]}
    return listed(rows, {"": "{what}", **errors})


def final(run: Row) -> float:
    """Return the last validation loss."""
    loss: float = run["validation"][-1][1]
    return loss


def final_text(run: Row) -> str:
    """Return the last validation loss as text."""
    return f"{final(run):.4f}"


def train_loss(run: Row) -> float:
    """Return the mean of the last ten training losses."""
    recent = run["losses"][-10:]
    return sum(recent) / len(recent)


def difference(run: Row, reference: Row) -> str:
    """Return by how much a run ends above another."""
    return f"{100 * (final(run) / final(reference) - 1):+.2f} %"


def gain(run: Row, reference: Row) -> str:
    """Return in words what a run sends between nodes and how long it takes, beside another."""
    sent, instead = (megabytes(each, reference, "inter") for each in (run, reference))
    faster = reference["step_seconds"] / run["step_seconds"]
    return (
        f"{run['label']} sends {sent} between nodes a step, {reference['label']} {instead}; a step takes "
        f"{milliseconds(run)} instead of {milliseconds(reference)}: {faster:.2f} times as fast"
    )


def milliseconds(run: Row) -> str:
    """Return the time of a step as text."""
    return f"{1e3 * run['step_seconds']:.0f} ms"


def megabytes(run: Row, reference: Row, hop: str) -> str:
    """Return the bytes that one rank sends in a step, and their share of the reference's."""
    nbytes, whole = run["sent_per_step"][hop], reference["sent_per_step"][hop]
    if not nbytes:
        return "torch's own, not counted" if whole else "nothing"  # on one node torch's collectives do it all
    return f"{nbytes / 1e6:,.2f} MB ({nbytes / whole:.0%})" if whole else f"{nbytes / 1e6:,.2f} MB"
