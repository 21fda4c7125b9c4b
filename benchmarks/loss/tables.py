"""Results as tables in Markdown: of the comparisons of examples/train.py, and of two computations."""

from __future__ import annotations

from collections.abc import Sequence

from result_files import Result, Row
from result_pages import markdown


def in_columns(table: str) -> str:
    """A table in Markdown with its columns aligned, for a terminal."""
    heading, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines())
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    lines = (heading, ["-" * width for width in widths], *rows)
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def comparison(runs: Sequence[Row]) -> str:
    """All that one call of ``compare`` has found; the first run is the one that others are compared with."""
    reference = runs[0]
    head = ["strategy", "train loss", "validation loss", "difference", "step", "tokens/s"]
    head += ["sent between nodes", "sent inside"]
    rows = []
    for run in runs:
        row = [run["label"], f"{train_loss(run):.4f}", f"{final(run):.4f}"]
        row += ["" if run is reference else difference(run, reference), milliseconds(run)]
        row += [f"{run['tokens_per_step'] / run['step_seconds']:,.0f}", *sent(run, reference)]
        rows.append(row + ([f"{run['peak_memory'] / 2**30:.2f} GiB"] if run["peak_memory"] else []))
    return markdown(head + (["peak memory"] if reference["peak_memory"] else []), rows)


def by_seed(results: Sequence[Result]) -> str:
    """A row for each result, of one strategy against FULL_SHARD with one seed.

    Args:
        results: As ``compare`` writes them, each with two runs.
    """
    head = ["seed", "full_shard", results[0]["rows"][1]["label"], "difference", "sent between nodes"]
    rows = []
    for result in results:
        reference, run = result["rows"]
        row = [str(result["arguments"]["seed"]), f"{final(reference):.4f}", f"{final(run):.4f}"]
        rows.append([*row, difference(run, reference), megabytes(run, reference, "inter")])
    return markdown(head, rows)


def times(results: Sequence[Result]) -> str:
    """The time of a step in each result, of one strategy against FULL_SHARD with one seed."""
    rows = []
    for result in results:
        reference, run = result["rows"]
        rows.append([run["label"], str(result["arguments"]["seed"]), milliseconds(reference), milliseconds(run)])
    return markdown(["strategy", "seed", "step, full_shard", "step, strategy"], rows)


def by_strategy(results: Sequence[Result]) -> str:
    """A row for each strategy of several results, each after the FULL_SHARD that it is compared with."""
    rows: dict[str, tuple[str, ...]] = {}
    for result in results:
        reference, *runs = result["rows"]
        # The same in every result: CPUs sum in a fixed order.
        rows[reference["label"]] = (f"{final(reference):.4f}", "", *sent(reference, reference))
        for run in runs:
            rows[run["label"]] = (f"{final(run):.4f}", difference(run, reference), *sent(run, reference))
    head = ("strategy", "validation loss", "difference", "sent between nodes", "sent inside")
    return markdown(head, ((label, *row) for label, row in rows.items()))


def small_parameters(rows: Sequence[Row]) -> str:
    """What codecs leave of gradients, if all are encoded and if small parameters are left as they are."""
    head = ("", "lowest cosine, all encoded", "as sent", "most new zeros of a small one, all encoded", "as sent")
    lines = []
    for row in rows:
        both = row["encoded"], row["spared"]
        cosines = (f"{each['cosine']:.3f} ({each['of']})" for each in both)
        zeros = (f"{100 * each['zeros']:.1f} %" for each in both)
        lines.append((row["model"], *cosines, *zeros))
    return markdown(head, lines)


def straddling(rows: Sequence[Row]) -> str:
    """Relative errors, by what is encoded."""
    lines = ((row["what"], *(f"{100 * error:.3f} %" for error in row["errors"].values())) for row in rows)
    return markdown(("", *rows[0]["errors"]), lines)


def final(run: Row) -> float:
    """The last validation loss."""
    loss: float = run["validation"][-1][1]
    return loss


def train_loss(run: Row) -> float:
    """The mean of the last ten training losses."""
    recent = run["losses"][-10:]
    return sum(recent) / len(recent)


def difference(run: Row, reference: Row) -> str:
    """By how much a run ends above another."""
    return f"{100 * (final(run) / final(reference) - 1):+.2f} %"


def milliseconds(run: Row) -> str:
    """The time of a step."""
    return f"{1e3 * run['step_seconds']:.0f} ms"


def sent(run: Row, reference: Row) -> tuple[str, str]:
    """What one rank sends in a step, over either hop."""
    return megabytes(run, reference, "inter"), megabytes(run, reference, "intra")


def megabytes(run: Row, reference: Row, hop: str) -> str:
    """What one rank sends in a step, and the share of the reference's."""
    nbytes, whole = run["sent_per_step"][hop], reference["sent_per_step"][hop]
    if not nbytes:
        return "torch's own, not counted" if whole else "nothing"  # on one node torch's collectives do it all
    return f"{nbytes / 1e6:,.2f} MB ({nbytes / whole:.0%})" if whole else f"{nbytes / 1e6:,.2f} MB"
