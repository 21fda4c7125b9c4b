"""Reports of a plan: as text with its notes, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from fsdp_zpp.strategy.strategy import ResolvedStrategy, Strategy

from .choice import Estimate, aligned, count, number, seconds
from .cluster import GIB
from .model_size import Case

# ---- notes


def notes_on(case: Case, codecs: Strategy, resolved: ResolvedStrategy) -> list[str]:
    """Return notes on the plan's assumptions, and on each codec of ``codecs`` that is inactive in ``resolved``."""
    cluster, work, budget = case.cluster, case.work, case.budget
    notes = [
        f"Activations are assumed to take {budget.activations:g} GiB a GPU, and {budget.reserve:g} GiB are in reserve."
    ]
    if budget.gpu_memory is None:
        notes.append("No memory limit was given, so everything fits.")
    if work.tokens is None:
        notes.append("Computation is left out (tokens and tflops were not given): the step is communication alone.")
    elif work.launch_ms:
        notes.append(
            f"A GPU is taken to achieve {work.tflops:,.4g} TFLOP/s, and the CPU to launch a unit in {work.launch_ms:g} "
            "ms."
        )
    if cluster.nodes == 1 and cluster.gpus_per_node > 1 and cluster.slow_links:
        notes.append(
            "Links of the machine are slow: strategies with codecs and optimizer scope G count each GPU as a node, and "
            "their bytes are shown as sent inside it. A quantized base stays sharded over the machine."
        )
    intra, inter = resolved.gradient_codecs
    in_effect = {
        "weights": resolved.weights if resolved.topology.nodes > 1 else None,
        "gradients": inter,
        "intra_gradients": intra,
        "error_feedback": resolved.error_feedback,
        "frozen": resolved.frozen if case.size.frozen else None,
    }
    asked = {name: getattr(codecs, name) for name in in_effect}
    idle = [f"{name}={codec}" for name, codec in asked.items() if codec not in (None, "auto") and not in_effect[name]]
    if idle:
        notes.append(
            f"No effect here: {', '.join(idle)}. Codecs encode what is sent between nodes, intra_gradients what is "
            "sent inside, and frozen what is not trained; link='pcie4' plans each GPU of a machine as a node."
        )
    return notes


# ---- json


def plan_to_json(plan: Plan) -> str:
    """Return all inputs and results as JSON, in bytes and seconds; inputs that were given in GiB stay in GiB."""
    report: dict[str, Any] = {
        "choice": None if plan.choice is None else plan.choice.name,
        "reason": plan.reason,
        "notes": plan.notes,
        "model": {
            "params": plan.size.params,
            "trainable": plan.size.trainable,
            "active": plan.size.active_trainable + plan.size.active_frozen,
            "units": [asdict(unit) for unit in plan.size.units],
        },
        "cluster": asdict(plan.cluster),
        "work": asdict(plan.work),
        "budget_gib": asdict(plan.budget),
        "precision": asdict(plan.precision),
        "codecs": _codecs(plan),
        "paste": None if plan.choice is None else plan.choice.paste,
        "strategies": {estimate.name: _figures(estimate) for estimate in plan.rows},
    }
    return json.dumps(report, indent=1, default=str)


def _codecs(plan: Plan) -> dict[str, str | None]:
    strategy = plan.resolved
    intra, inter = strategy.gradient_codecs
    codecs: dict[str, object] = {"weights": strategy.weights, "gradients": inter, "intra_gradients": intra}
    codecs |= {"frozen": strategy.frozen, "error_feedback": strategy.error_feedback}
    return {name: None if codec is None else str(codec) for name, codec in codecs.items()}


def _figures(estimate: Estimate) -> dict[str, Any]:
    memory, time = estimate.memory, estimate.time
    return {
        "torch": estimate.torch,
        "paste": estimate.paste,
        "levels": estimate.levels,
        "gpus_per_node": estimate.topology.gpus_per_node,
        "fits": estimate.fits,
        "memory_bytes": asdict(memory) | {"total": memory.total},
        "inter_node_bytes": estimate.inter_node_bytes,
        "sent_bytes_per_gpu": asdict(estimate.volume),
        "seconds": asdict(time) | {"communication": time.communication, "step": time.total},
    }


# ---- report


@dataclass(frozen=True, kw_only=True)
class Plan(Case):
    """The result of ``plan``: the case, and estimates of memory and time for each strategy.

    The case is in ``size``, ``cluster``, ``work``, ``budget`` and ``precision``.

    Attributes:
        estimates: All 14 strategies, in the order of ``LEGAL_LEVELS``.
        choice: The best strategy that fits; None if none does.
        reason: Why ``choice`` is best, in one or two sentences.
        notes: Sentences that explain the figures.
        rows: All rows: torch's strategies and presets, if they are planned, then ``estimates``. A row has ``name``,
            ``strategy``, ``memory``, ``time``, ``torch`` (torch's name for it, or None) and ``paste`` (code to paste).
    """

    estimates: tuple[Estimate, ...]
    choice: Estimate | None
    reason: str
    notes: tuple[str, ...]
    rows: tuple[Estimate, ...]

    def __getitem__(self, name: str) -> Estimate:
        """Return the row of a name such as ``IIG``, ``zeropp`` or ``FULL_SHARD``; raise KeyError if there is none."""
        for estimate in self.rows:
            if estimate.name == name:
                return estimate
        raise KeyError(f"{name!r}; there are {', '.join(estimate.name for estimate in self.rows)}")

    @property
    def resolved(self) -> ResolvedStrategy:
        """Return IGG, resolved on this cluster: its scopes allow every codec, so it shows which codecs are active."""
        return self["IGG"].strategy.resolve(self["IGG"].topology)

    def __str__(self) -> str:
        ranked, left_out = shown_rows(self)
        columns = dict(_COLUMNS)
        if not any(row.memory.errors for row in self.rows):
            del columns["errors"]
        rows = [("", *columns)]
        for row in ranked:
            name = ("-> " if row is self.choice else "   ") + row.name
            rows.append((name, *(cell(row) for cell in columns.values())))
        header, *lines = aligned(rows, names=2)
        rule = "-" * max(map(len, [header, *lines]))
        first_out = next((i for i, estimate in enumerate(ranked) if not estimate.fits), None)
        if first_out is not None:
            lines.insert(first_out, f"does not fit in {self.budget.gpu_memory:g} GiB:")
        units = ""
        for column, unit in _UNITS.items():
            units = units.ljust(header.index(column)) + unit
        lines = [units, header, rule, *lines]
        more = [f"{count(left_out, 'combination')} of letters not shown; --json has all."] if left_out else []
        verdict = [self.reason] if self.choice is None else [self.reason, "", self.choice.paste]
        return "\n".join([*_title(self), "", *lines, *more, rule, *verdict, "", _LEGEND, *self.notes])


KNOWN_AS = {
    "NNN": "DDP",
    "III": "MiCS, HSDP",
    "NNG": "ZeRO-1",
    "NGG": "ZeRO-2",
    "IGG": "hpZ, ZeRO++",
    "IIG": "PaRO",
    "GGG": "ZeRO-3, FSDP",
}

_COLUMNS: dict[str, Callable[[Estimate], str]] = {
    "known as": lambda row: _known_as(row),
    "weights": lambda row: number(row.memory.parameters / GIB),
    "shards": lambda row: number(row.memory.shard / GIB),
    "optimizer": lambda row: number(row.memory.optimizer / GIB),
    "gradients": lambda row: number(row.memory.gradients / GIB),
    "errors": lambda row: number(row.memory.errors / GIB),
    "working": lambda row: number(row.memory.working / GIB),
    "total": lambda row: number(row.memory.total / GIB),
    "out of node": lambda row: number(row.inter_node_bytes / 1e9),
    "in node": lambda row: number(row.volume.intra / 1e9),
    "communication": lambda row: seconds(row.time.communication),
    "step": lambda row: seconds(row.time.total),
}
_UNITS = {"weights": "GiB a GPU:", "out of node": "GB a step:", "communication": "predicted:"}
"""Text above groups of columns, by the first column of each group."""

_LEGEND = """\
weights: kept beside the shards. shards: what the optimizer updates, and frozen weights.
working: units that are gathered at a time, and a unit's gradient. total: with activations and reserve.
out of node: sent by all GPUs of a node together. in node: sent by one GPU, to others of its node.
communication: both, one after the other. step: the longest of communication, computation
and the CPU's launches."""

_LETTERS = 4
"""Number of scope combinations, such as IIG, to show beside presets; fast ones that fit are preferred."""


def shown_rows(plan: Plan) -> tuple[list[Estimate], int]:
    """Return the rows to show, in order, and the number of rows left out."""
    ranked = sorted(
        plan.rows,
        # The choice comes first even if another row is faster within the tolerance of choosing.
        key=lambda e: (e is not plan.choice, not e.fits, e.time.total, e.time.communication, e.memory.total),
    )
    hidden = [each for each in ranked if each.candidate.title is None][_LETTERS:] if plan.rows != plan.estimates else []
    return [each for each in ranked if not any(each is other for other in hidden)], len(hidden)


def _title(plan: Plan) -> list[str]:
    size, cluster, work = plan.size, plan.cluster, plan.work
    networks = [f"{count(cluster.nodes, 'node')} x {count(cluster.gpus_per_node, 'GPU')}"]
    if cluster.inter_gbps is not None:
        networks.append(f"{cluster.inter_gbps:,.4g} Gbit/s out of a node")
    if cluster.intra_gbps is not None:
        networks.append(f"{cluster.intra_gbps:,.4g} Gbit/s a GPU inside")
    strategy = plan.resolved
    intra, inter = strategy.gradient_codecs
    trained = f"{size.trainable:,} ({100 * size.trainable / size.params:.3g} %)" if size.frozen else "all"
    active = size.active_trainable + size.active_frozen
    idle = f", {active:,} active for a token" if active < size.params else ""
    units, micro_batches = count(size.count, "unit"), count(work.micro_batches, "micro-batch", "es")
    return [
        f"{size.params:,} parameters, {trained} trainable{idle}, in {units}; {micro_batches} a step",
        ", ".join(networks),
        *(["presets with their own codecs; for letters:"] if plan.rows != plan.estimates else []),
        f"weights {_codec(strategy.weights)}, gradients {_codec(inter)} between nodes and {_codec(intra)} inside"
        + (f", error feedback {strategy.error_feedback}" if strategy.error_feedback is not None else "")
        + (f", frozen weights {_codec(strategy.frozen or strategy.weights)}" if size.frozen else ""),
    ]


def _known_as(estimate: Estimate) -> str:
    own = KNOWN_AS.get(estimate.levels, "") if estimate.candidate.title is None else estimate.levels
    return own if estimate.torch is None else "torch's FSDP"


def _codec(codec: object) -> str:
    return "unencoded" if codec is None else f"as {codec}"
