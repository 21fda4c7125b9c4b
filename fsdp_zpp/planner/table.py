"""A plan as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .choice import Estimate, seconds
from .conditions import GIB
from .model_size import ModelSize

if TYPE_CHECKING:
    from .plan import Plan

KNOWN_AS = {
    "NNN": "DDP",
    "III": "MiCS, HSDP",
    "NNG": "ZeRO-1",
    "NGG": "ZeRO-2",
    "IGG": "hpZ, ZeRO++",
    "IIG": "PaRO",
    "GGG": "ZeRO-3, FSDP",
}

_HEADER = (
    ("", "", "GiB a GPU:", "", "", "", "", "", "", "GB a step:", "", "predicted:", ""),
    (
        "",
        "known as",
        "weights",
        "shards",
        "optimizer",
        "gradients",
        "errors",
        "working",
        "total",
        "out of node",
        "in node, a GPU",
        "communication",
        "step",
    ),
)

_LEGEND = """\
weights: kept beside the shards. shards: what the optimizer updates, and frozen weights.
working: units unsharded for the moment, and a unit's gradient. total: with activations and reserve.
out of node: sent by all GPUs of a node together. in node: sent by one GPU, to others of its node.
communication: both, one after the other. step: the longer of communication and computation."""


def format_plan(plan: Plan) -> str:
    """The plan as a table, the choice first, the fastest next, what does not fit last; why; and how to read it."""
    ranked = sorted(
        plan.estimates,
        # Of those as fast as the choice, padding may put others a few bytes before it.
        key=lambda e: (e is not plan.choice, not e.fits, e.time.total, e.time.communication, e.memory.total),
    )
    rows = [*_HEADER, *(_row(estimate, estimate is plan.choice) for estimate in ranked)]
    if plan.at_work.error_feedback is None:
        errors = _HEADER[1].index("errors")
        rows = [row[:errors] + row[errors + 1 :] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(_aligned(row, widths)).rstrip() for row in rows]
    rule = "-" * max(map(len, lines))
    first_out = next((i for i, estimate in enumerate(ranked) if not estimate.fits), None)
    if first_out is not None and plan.budget.gpu_memory is not None:
        lines.insert(len(_HEADER) + first_out, f"does not fit in {plan.budget.gpu_memory:g} GiB:")
    lines.insert(len(_HEADER), rule)
    return "\n".join([*_title(plan), "", *lines, rule, plan.reason, "", _LEGEND, *plan.notes])


def _title(plan: Plan) -> list[str]:
    size, cluster, work = plan.size, plan.cluster, plan.work
    networks = [f"{_count(cluster.nodes, 'node')} x {_count(cluster.gpus_per_node, 'GPU')}"]
    if cluster.inter_gbps is not None:
        networks.append(f"{cluster.inter_gbps:,.4g} Gbit/s out of a node")
    if cluster.intra_gbps is not None:
        networks.append(f"{cluster.intra_gbps:,.4g} Gbit/s a GPU inside")
    strategy = plan.at_work
    intra, inter = strategy.gradient_codecs
    trainable = "all trainable" if not size.frozen else f"{size.trainable:,} ({_percent(size)}) trainable"
    active = size.active_trainable + size.active_frozen
    if active < size.params:
        trainable += f", {active:,} active for a token"
    units, micro_batches = _count(size.count, "unit"), _count(work.micro_batches, "micro-batch", "es")
    return [
        f"{size.params:,} parameters, {trainable}, in {units}; {micro_batches} a step",
        ", ".join(networks),
        f"weights {_codec(strategy.weights)}, gradients {_codec(inter)} between nodes and {_codec(intra)} inside"
        + (f", error feedback {strategy.error_feedback}" if strategy.error_feedback is not None else "")
        + (f", frozen weights {_codec(strategy.frozen or strategy.weights)}" if size.frozen else ""),
    ]


def _row(estimate: Estimate, chosen: bool) -> tuple[str, ...]:
    memory = estimate.memory
    states = (
        memory.parameters,
        memory.shard,
        memory.optimizer,
        memory.gradients,
        memory.errors,
        memory.working,
        memory.total,
    )
    return (
        ("-> " if chosen else "   ") + estimate.levels,
        KNOWN_AS.get(estimate.levels, ""),
        *(_number(state / GIB) for state in states),
        _number(estimate.inter_node_bytes / 1e9),
        _number(estimate.volume.intra / 1e9),
        seconds(estimate.time.communication),
        seconds(estimate.time.total),
    )


def _percent(size: ModelSize) -> str:
    return f"{100 * size.trainable / size.params:.3g} %"


def _aligned(row: tuple[str, ...], widths: list[int]) -> list[str]:
    names = [cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False)]
    return names + [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]


def _number(value: float) -> str:
    """Two decimals, or more where they would all be zero: small models have figures, too."""
    return f"{value:,.2f}" if value >= 0.1 or value == 0 else f"{value:.2g}"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{plural * (number != 1)}"


def _codec(codec: object) -> str:
    return "unencoded" if codec is None else f"as {codec}"
