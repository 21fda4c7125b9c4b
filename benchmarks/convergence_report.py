"""The table of the convergence benchmark: final losses, gaps, and the share of plain's gap that each change closes."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from convergence_configs import FAMILIES, NAMES
from convergence_figure import draw
from convergence_records import Record, read

WEIGHTS = {"": "16-bit weights", "w8:": "int8(256) weights"}
"""What the prefix of a name means."""


class Runs:
    """Finished runs by configuration and seed.

    Args:
        records: As read from the lines of JSON; all with the same settings.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = {(record["name"], record["seed"]): record for record in records}
        self.names = [name for name in NAMES if any(name == other for other, _ in self._records)]

    def seeds(self, *names: str) -> list[int]:
        """The seeds that all ``names`` have been trained with."""
        trained = [{seed for name, seed in self._records if name == wanted} for wanted in names]
        return sorted(set.intersection(*trained))

    def curve(self, name: str, seed: int) -> list[tuple[int, float]]:
        """Validation losses, each with the tokens trained on before it."""
        return [(tokens, loss) for tokens, loss in self._records[name, seed]["validation"]]

    def final(self, name: str, seed: int) -> float:
        """The last validation loss."""
        return self.curve(name, seed)[-1][1]

    def gaps(self, name: str, reference: str) -> list[float]:
        """By how many percent ``name`` ends above ``reference``, seed by seed."""
        return [
            100 * (self.final(name, seed) / self.final(reference, seed) - 1) for seed in self.seeds(name, reference)
        ]


def write_report(out: Path) -> None:
    """Write convergence.md, convergence.json and the figures from ``out``'s convergence.jsonl."""
    records = read(out / "convergence.jsonl")
    if not records:
        print(f"nothing to report in {out}")
        return
    runs = Runs(records)
    text = "\n\n".join([header(records), *sections(runs)])
    (out / "convergence.md").write_text(text + "\n")
    (out / "convergence.json").write_text(json.dumps(as_json(records), indent=1) + "\n")
    for prefix, weights in WEIGHTS.items():
        families = [family for family in FAMILIES if members(runs, prefix, family)]
        if families and prefix + "full_shard" in runs.names:
            file = out / f"convergence-{weights.split('(')[0].replace(' weights', '')}-weights.png"
            draw(runs, {prefix + family: f"{weights}; {family}" for family in families}, prefix + "full_shard", file)
    print(text)


def as_json(records: Sequence[Record]) -> dict[str, Any]:
    """All runs, and once what they have in common."""
    places = distinct(record["about"] for record in records)
    commands = distinct(record["command"] for record in records)
    kept = ("name", "seed", "validation", "training", "seconds")
    runs = [
        {key: record[key] for key in kept}
        | {"machine": places.index(record["about"]), "command": commands.index(record["command"])}
        for record in sorted(records, key=lambda record: (NAMES.index(record["name"]), record["seed"]))
    ]
    first = records[0]
    common = {"settings": first["settings"], "text": first["text"], "parameters": first["parameters"]}
    return {"machines": places, "commands": commands, **common, "runs": runs}


def distinct(values: Iterable[Any]) -> list[Any]:
    """Each once, in the order in which they come; they need no hash."""
    once: list[Any] = []
    for value in values:
        if value not in once:
            once.append(value)
    return once


def header(records: Sequence[Record]) -> str:
    """What was trained, on what, and how."""
    settings, text = records[0]["settings"], records[0]["text"]
    tokens = records[0]["validation"][-1][0]
    model = (
        f"GPT-2 of {records[0]['parameters']:,} parameters on bytes, {tokens:,} tokens a run "
        f"({settings['batch']} x {settings['sequence']} a rank and step), bf16 with fp32 master weights, AdamW at "
        f"{settings['lr']:g}, cosine, clipped at 1; {settings['nodes']} nodes x {settings['gpus_per_node']} ranks."
    )
    source = (
        f"Text: {text['files']:,} files, {text['training_bytes']:,} bytes for training (each seen at most "
        f"{math.ceil(tokens / text['training_bytes'])}x) and {text['held_out_bytes']:,} held out, SHA-256 "
        f"{text['sha256']}."
    )
    lines = [model, source]
    for about in distinct(record["about"] for record in records):
        gpus = f"{len(about['gpus'])} x {about['gpus'][0]}" if about["gpus"] else "no GPU"
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        lines.append(f"Machine: {gpus}, {about['cpus']} CPU cores, {about['platform']}; {versions}.")
    lines += [f"    {command}" for command in distinct(record["command"] for record in records)]
    lines.append(
        "Losses are in nats a byte. Gaps and shares are of the same seeds, mean ± standard deviation over them; "
        "shares are of the mean gaps, in brackets those of single seeds. A share of a gap that is less than two "
        "standard errors from zero says nothing and is left out."
    )
    return "\n\n".join(lines)


def members(runs: Runs, prefix: str, family: str) -> list[str]:
    """A family's configurations, the plain one first."""
    return [name for name in runs.names if name.split("+")[0] == prefix + family]


def sections(runs: Runs) -> list[str]:
    """A table for every family under either kind of weights."""
    tables = []
    for prefix, weights in WEIGHTS.items():
        references = [name for name in (prefix + "full_shard", prefix + "IGG", prefix + "int8") if name in runs.names]
        for family, what in FAMILIES.items():
            if names := members(runs, prefix, family):
                tables.append(f"## {weights}, {what}\n\n{table(runs, references + names, prefix, prefix + family)}")
        if references and not any(members(runs, prefix, family) for family in FAMILIES):
            tables.append(f"## {weights}\n\n{table(runs, references, prefix, '')}")
    return tables


def table(runs: Runs, names: Sequence[str], prefix: str, plain: str) -> str:
    """A row for each of ``names``; ``plain`` is the one whose gap is to be closed."""
    baselines = ["full_shard", *([prefix + "full_shard"] if prefix else [])]
    heads = ["configuration", "seeds", "final validation loss", *(f"above {name}, %" for name in baselines)]
    heads.append("of plain's gap closed")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in names:
        losses = [runs.final(name, seed) for seed in runs.seeds(name)]
        cells = [name, str(len(losses)), spread(losses, ".4f")]
        cells += [spread(runs.gaps(name, baseline), "+.3f") for baseline in baselines]
        cells.append(closed(runs, name, plain, baselines[-1]) if name.startswith(f"{plain}+") else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def closed(runs: Runs, name: str, plain: str, reference: str) -> str:
    """The share of ``plain``'s mean gap to ``reference`` that ``name`` does not have."""
    seeds = runs.seeds(name, plain, reference)
    if not seeds:
        return "plain is missing"
    to_close = [runs.final(plain, seed) - runs.final(reference, seed) for seed in seeds]
    left = [runs.final(name, seed) - runs.final(reference, seed) for seed in seeds]
    noise = statistics.stdev(to_close) / len(seeds) ** 0.5 if len(seeds) > 1 else 0.0
    if not statistics.fmean(to_close) > 2 * noise:
        return "gap within noise"
    shares = [1 - remaining / gap for remaining, gap in zip(left, to_close, strict=True) if gap]
    share = 1 - statistics.fmean(left) / statistics.fmean(to_close)
    return f"{share:.0%} ({min(shares):.0%} to {max(shares):.0%})"


def spread(values: Sequence[float], form: str) -> str:
    """Mean and standard deviation."""
    if not values:
        return ""
    mean = f"{statistics.fmean(values):{form}}"
    return f"{mean} ± {statistics.stdev(values):{form.lstrip('+')}}" if len(values) > 1 else mean
