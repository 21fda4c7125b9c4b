"""Tables of losses: of the comparisons of examples/train.py, of gaps between runs of studies, and of computations.

A name of the convergence study is ``FAMILY`` or ``FAMILY+CHANGE``; ``w8:`` before it means that weights travel as
int8(256), ``d4:`` that their changes travel as int4(256), ``d2:`` as int2(256).

A name of the study of local steps is ``localEVERY:CODEC[+loco][:CHANGE]...``, where a change is ``at-once`` (all
fragments in the same step), ``overlapSTEPS``, ``mixSHARE``, ``outerLR``, ``momentumVALUE``, ``momentum-auto`` or
``startSTEPS``. What a name leaves out is LocalSteps' default, except for the momentum, which is
DiLoCo's 0.9. ``topk+loco`` has the outer
step and the errors of SparseLoCo (arXiv 2508.15706).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from markdown_tables import listed, markdown
from result_files import Result, Row

# ---- comparisons, and computations


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


def entropy(results: Iterable[Result]) -> str:
    """Return a table of what a lossless stage could save, by payload and step."""
    rows = [row | payload for result in results for row in result["rows"] for payload in row.get("payloads", [])]
    columns: dict[str, str | Callable[[Row], str]] = {
        "": "{name}: {what}, {codec}",
        "step": "{step}",
        "bits a code": "{bits_a_code:.2f}",
        "bits a scale": "{bits_a_scale:.1f}",
        "bytes that are scales": lambda row: percent(row["scale_bytes"], row),
        "saved by entropy": lambda row: percent(row["bytes"] - row["ideal_bytes"], row),
        "by zlib": lambda row: percent(row["bytes"] - row["zlib_bytes"], row),
        "by LZMA": lambda row: percent(row["bytes"] - row["lzma_bytes"], row),
        "zlib, MB/s": lambda row: f"{row['bytes'] / row['zlib_seconds'] / 1e6:.0f}",
        "error": "{error:.3%}",
        "with bf16 scales": "{error_growth_bf16:+.2%}",
        "mantissa bits": "{mantissa_bits}",
    }
    return listed(rows, columns)


def entropy_rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Return rows of a page's table: what is sent at the end of a training, and codecs of normal values."""
    every = [payload for result in results for row in result["rows"] for payload in row.get("payloads", [])]
    last = max((row["step"] for row in every), default=0)
    shown: dict[tuple[str, str], Row] = {}
    for row in every:  # gradients are alike with and without deltas
        if row["step"] == last:
            shown.setdefault((row["what"], row["codec"]), row)
    normal = [row for result in results for row in result["rows"] if str(row.get("what")).startswith("int")]
    return [
        (
            f"{row['what']}, {row['codec']}",
            f"{row['step']}",
            f"{row['bits_a_code']:.2f}",
            *(percent(row["bytes"] - row[f"{stage}_bytes"], row) for stage in ("ideal", "zlib", "lzma")),
            percent(row["scale_bytes"], row),
            f"{row['error']:.2%}",
            f"{row['error_growth_bf16']:+.2%}",
        )
        for _, row in sorted(shown.items(), key=lambda item: (-ord(item[0][0][0]), item[0][1]))
    ] + [(f"normal values, {row['what']}", "", f"{row['bits_a_code']:.2f}", *[""] * 6) for row in normal]


def percent(nbytes: float, payload: Row) -> str:
    """Return bytes as a share of those of a payload."""
    return f"{nbytes / payload['bytes']:.1%}"


def gaussian_codes(rows: Sequence[Row]) -> str:
    """Return a table of the entropy of codes of normally distributed values."""
    return listed(rows, {"": "{what}", "bits a code": "{bits_a_code:.3f}", "by theory": "{theory:.3f}"})


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


# ---- gaps: how far above a reference runs end, with the standard error of the mean over seeds

REFERENCE = "full_shard"
LORA_REFERENCE = "bf16"


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


def convergence(results: Sequence[Result], reference: str = REFERENCE) -> str:
    """Return a table of all configurations of the convergence study, or of another with this reference."""
    runs, rows = Runs(results), []
    for name in sorted(runs.names, key=lambda name: (name != reference, name)):
        losses = [runs.final(name, seed) for seed in runs.seeds(name)]
        gap = "" if name == reference else with_error(runs.gaps(name, reference), "+.2f")
        rows.append([name, str(len(losses)), with_error(losses, ".4f"), gap])
    return markdown(("configuration", "seeds", "validation loss", f"above {reference}, %"), rows)


def beside_reference(results: Sequence[Result], reference: str) -> dict[int, Runs]:
    """Return a study's runs by nodes, of each configuration those at its best learning rate, with the reference's.

    Where the reference was not trained on as many nodes, its runs on the fewest stand for it: nodes share the tokens of
    a step, so full precision computes the same.
    """
    by_number: dict[int, list[Result]] = {}
    for result in results:
        by_number.setdefault(result["arguments"]["nodes"], []).append(result)
    references = {nodes: [r for r in own if r["rows"][0]["name"] == reference] for nodes, own in by_number.items()}
    fewest = min(nodes for nodes, own in references.items() if own)
    return {
        nodes: TunedRuns([*own, *([] if references[nodes] else references[fewest])]).runs
        for nodes, own in sorted(by_number.items())
    }


def gap_rows(results: Sequence[Result], shown: Mapping[str, str], reference: str = REFERENCE) -> list[tuple[str, ...]]:
    """Return rows of configurations: model and data, nodes, words, seeds, and gaps with their standard errors.

    Args:
        results: Results of a study.
        shown: Configurations that are shown, with what is said of them.
        reference: Configuration that they are compared with, with the same seeds.
    """
    gpus_per_node = results[0]["arguments"]["gpus_per_node"]
    rows = []
    for nodes, runs in beside_reference(results, reference).items():
        for name in (name for name in shown if name in runs.names):
            gaps = runs.gaps(name, reference)
            first = runs.row(name, runs.seeds(name)[0])
            cells = (f"{nodes}x{gpus_per_node}", shown[name], str(len(gaps)), with_error(gaps, "+.2f"))
            rows.append((size_of(first, first["validation"][-1][0], brief=True), *cells))
    return rows


def compared_rows(results: Sequence[Result], words: str) -> list[tuple[str, ...]]:
    """Return the same for one strategy of the comparison, whose results have the reference and it."""
    pairs = [result["rows"] for result in results]
    gaps = [100 * (final(run) / final(reference) - 1) for reference, run in pairs]
    first = pairs[0][0]
    size = size_of(first, len(first["losses"]) * first["tokens_per_step"], brief=True)
    gpus_per_node = results[0]["arguments"]["gpus_per_node"]
    layout = f"{results[0]['manifest']['machine']['gpus'] // gpus_per_node}x{gpus_per_node}"
    return [(size, layout, words, str(len(gaps)), with_error(gaps, "+.2f"))]


def size_of(row: Row, tokens: float, brief: bool = False) -> str:
    """Return the size of a run's model and data, ``brief`` under a heading that has the units; a token is a byte."""
    parameters, size = f"{row['parameters'] / 1e6:.3g}", f"{tokens / 1e6:.3g}"
    return f"{parameters}M, {size}M" if brief else f"{parameters} M parameters, {size} M bytes"


def with_error(values: Sequence[float], form: str) -> str:
    """Return mean and standard error of the mean as text; one value has no error."""
    if not values:
        return ""
    mean = f"{statistics.fmean(values):{form}}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values) / len(values) ** 0.5:{form.lstrip('+')}}"


# ---- local steps: how far above synchronous training runs end, each at its best learning rate

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


def every(name: str) -> int:
    """Return the steps between two exchanges."""
    return int(name.partition(":")[0].removeprefix("local"))


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


def local_steps(results: Sequence[Result]) -> str:
    """Return a table of all configurations at their best learning rates: mean and standard error over the seeds.

    Gaps are to the same seeds of the reference on as many nodes.
    """
    rows = []
    for nodes, tuned in by_nodes(results).items():
        for name in tuned.names:
            losses = [tuned.runs.final(name, seed) for seed in tuned.runs.seeds(name)]
            has_gap = name != REFERENCE and REFERENCE in tuned.rates
            gap = with_error(tuned.runs.gaps(name, REFERENCE), "+.2f") if has_gap else ""
            rows.append([str(nodes), name, f"{tuned.rates[name]:g}", str(len(losses)), with_error(losses, ".4f"), gap])
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


# ---- DiLoCo's recipe, with the losses that its authors published beside ours

SYNCHRONOUS = "synchronous"
"""Name of the configuration of one replica that trains on the whole batch."""
PUBLISHED = {2: 0.7, 4: 2.0, 8: 3.9}
"""Percent above data-parallel training by replicas, for 35 M parameters (table 4)."""


TOKENS = 700_000_000
"""Tokens of the published runs, about 20 a parameter."""


def diloco(results: Sequence[Result]) -> str:
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
        cells = [f"{data / 1e6:.0f} M", f"{lr:.4f}, {nodes * batch}", str(len(losses)), with_error(losses, ".4f")]
        cells += [with_error(gaps, "+.2f") if gaps else "", "" if published is None else f"{published:+.1f}"]
        rows.append([str(nodes), name, *cells])
    head = ("replicas", "configuration", "bytes read", "lr, sequences a step", "seeds", "validation loss")
    return markdown((*head, "above synchronous, %", "published, %"), rows)


def _best_synchronous(results: Sequence[Result], data: int) -> list[Result]:
    """Return the synchronous runs on so many tokens at the best learning rate."""
    runs = [r for r in results if r["arguments"]["tokens"] == data and r["rows"][0]["name"] == SYNCHRONOUS]
    rate = TunedRuns(runs).rates.get(SYNCHRONOUS)
    return [run for run in runs if run["arguments"]["lr"] == rate]


# ---- Muon

OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}
UNSHARDED = "unsharded"
SHARDINGS = (UNSHARDED, "full_shard", "IGG", "III", "zeropp", "zeropp-III")
MUON_NAMES = [f"{optimizer}:{sharding}" for optimizer in OPTIMIZERS for sharding in SHARDINGS]
"""All configurations."""


def muon(results: Sequence[Result]) -> str:
    """Return a table of losses and bytes; gaps are to the same optimizer without sharding, with the same seeds."""
    runs = Runs(results)
    sent = {row["name"]: row for result in results for row in result["rows"]}
    rows = []
    for name in (name for name in MUON_NAMES if name in runs.names):
        optimizer, sharding = name.split(":")
        reference = f"{optimizer}:{UNSHARDED}"
        losses = [runs.final(name, seed) for seed in runs.seeds(name)]
        gap = "" if name == reference else with_error(runs.gaps(name, reference), "+.2f")
        model, own = sent[name]["sent_by_model"], sent[name]["sent_by_optimizer"]
        between = "" if model is None else _megabytes(model["inter"])
        cells = [with_error(losses, ".4f"), gap, between, _megabytes(own["inter"]), _megabytes(own["intra"])]
        rows.append([OPTIMIZERS[optimizer], sharding, str(len(losses)), *cells])
    head = ("optimizer", "sharding", "seeds", "validation loss", "above unsharded, %")
    return markdown((*head, "model, inter-node", "optimizer, inter-node", "optimizer, intra-node"), rows)


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.2f} MB" if nbytes else "0"
