"""A plan and its report as text; ``json_report`` has it as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp_zpp.config.local_steps import LocalSteps
from fsdp_zpp.config.resolve import ResolvedStrategy

from .axes import Axes
from .axes_report import table_of_axes, title_of_axes
from .config import GIB, Cluster, MemoryBudget, Precision, StepConfig
from .estimate import Estimate
from .model_size import ModelSize
from .table import aligned, count, number, seconds
from .volume import Volume


@dataclass(frozen=True)
class Plan:
    """A plan, the result of ``plan``.

    Attributes:
        size: The size of the model.
        cluster: The cluster it trains on.
        work: The work of a step.
        budget: The memory of a GPU.
        precision: The dtypes.
        estimates: All 14 strategies, in the order of ``LEGAL_LEVELS``; then those with local steps, if they were given
            and there are several nodes.
        choice: The best strategy that fits; None if none does.
        reason: A sentence or two that say why.
        notes: Sentences that explain the figures.
        local_steps: The local steps of the strategies that have them; None if none has.
        axes: The other parallelisms.
        activations: Estimated bytes that one GPU sends in a step along each of their axes, as far as they are known.
        rows: All that the plan compares: torch's strategies and presets if they are planned, then ``estimates``. Each
            has a ``name``, a ``strategy`` or torch's name (``torch``), ``memory``, ``time``, and a line to ``paste``.
    """

    size: ModelSize
    cluster: Cluster
    work: StepConfig
    budget: MemoryBudget
    precision: Precision
    estimates: tuple[Estimate, ...]
    choice: Estimate | None
    reason: str
    notes: tuple[str, ...]
    local_steps: LocalSteps | None = None
    axes: Axes = field(default_factory=Axes)
    activations: tuple[tuple[str, Volume], ...] = ()
    rows: tuple[Estimate, ...] = ()

    def __getitem__(self, name: str) -> Estimate:
        """Return a row by its name: letters (``IIG``, ``III every 64``), a preset or ``FULL_SHARD``.

        Raises:
            KeyError: If there is no such row.
        """
        for estimate in self.rows:
            if estimate.name == name:
                return estimate
        raise KeyError(f"{name!r}; there are {', '.join(estimate.name for estimate in self.rows)}")

    @property
    def resolved(self) -> ResolvedStrategy:
        """Describe the strategies' codecs on this cluster, shown by the letters that take any codec."""
        return self["IGG"].strategy.resolve(self["IGG"].topology)

    @property
    def has_axes(self) -> bool:
        """Return whether there is any other parallelism, or experts have a strategy of their own."""
        return self.axes != Axes() or self["IGG"].experts is not None

    def __str__(self) -> str:
        return format_plan(self)


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
    "",
    "known as",
    "weights",
    "shards",
    "optimizer",
    "outer",
    "gradients",
    "errors",
    "working",
    "total",
    "on host",
    "out of node",
    "in node",
    "communication",
    "step",
)
_UNITS = {"weights": "GiB a GPU:", "out of node": "GB a step:", "communication": "predicted:"}
"""What stands above columns, from the named one to the next that is named."""

_LEGEND = """\
weights: kept beside the shards. shards: what the optimizer updates, and frozen weights.
working: units that are gathered at a time, and a unit's gradient. total: with activations and reserve.
out of node: sent by all GPUs of a node together. in node: sent by one GPU, to others of its node.
communication: both, one after the other. step: the longest of communication, computation
and the CPU's launches."""

_OFFLOAD_LEGEND = """\
weights: kept on the GPU beside the shards. on host: a GPU's shards, their gradients and the optimizer state, offloaded.
working: units that are gathered at a time with copies of their shards, and a unit's gradient. total: with activations
and reserve.
out of node: sent by all GPUs of a node together. in node: sent by one GPU, to others of its node.
communication: both and copies from and to the host, one after the other. step: the longest of communication,
computation and the CPU's launches, and then the optimizer's step on the CPU."""

_LOCAL_STEPS_LEGEND = """\
outer: agreed weights and momentum of local steps. Bytes and times of exchanges are averaged over the steps, and
communication includes them; a step takes what training waits for them longer than without.
* changes the mathematics (local-update training): nodes step on their own and exchange weights every few steps."""


_LETTERS = 4
"""Letters that are shown beside presets: the fastest ones that fit."""


def format_plan(plan: Plan) -> str:
    """Return a table (the choice first, then by speed, those that do not fit last), the reason, and a legend."""
    ranked, left_out = shown_rows(plan)
    rows = [_HEADER, *(_row(estimate, estimate is plan.choice) for estimate in ranked)]
    zeros = {_HEADER.index(name) for name in _columns_of_zeros(plan)}
    rows = [tuple(cell for column, cell in enumerate(row) if column not in zeros) for row in rows]
    header, *lines = aligned(rows, names=2)
    rule = "-" * max(map(len, [header, *lines]))
    first_out = next((i for i, estimate in enumerate(ranked) if not estimate.fits), None)
    if first_out is not None:
        lines.insert(first_out, f"does not fit in {_limits(plan.budget)}:")
    lines = [_units_above(header), header, rule, *lines]
    more = [f"{count(left_out, 'combination')} of letters not shown; --json has all."] if left_out else []
    verdict = [plan.reason] if plan.choice is None else [plan.reason, "", plan.choice.paste]
    by_axis = table_of_axes(ranked[0], plan.activations, plan.cluster) if plan.has_axes else []
    return "\n".join([*_title(plan), "", *lines, *more, rule, *verdict, "", *by_axis, *_legend(plan), *plan.notes])


def shown_rows(plan: Plan) -> tuple[list[Estimate], int]:
    """Return the rows to show in their order, and how many are left out."""
    ranked = sorted(
        plan.rows,
        # The choice is the fastest only within a tolerance, so it goes first by name.
        key=lambda e: (e is not plan.choice, not e.fits, e.time.total, e.time.communication, e.memory.total),
    )
    if plan.rows == plan.estimates:
        return ranked, 0
    lettered = [each for each in ranked if each.title is None and each.strategy.local_steps is None]
    hidden = [each for each in lettered[_LETTERS:] if each is not plan.choice]
    return [each for each in ranked if not any(each is other for other in hidden)], len(hidden)


def _units_above(header: str) -> str:
    line = ""
    for column, unit in _UNITS.items():
        line = line.ljust(header.index(column)) + unit
    return line


def _columns_of_zeros(plan: Plan) -> list[str]:
    offloads = plan.budget.offload is not None
    in_use = {"errors": any(row.memory.errors for row in plan.rows), "outer": plan.local_steps is not None}
    in_use |= {"on host": offloads, "shards": not offloads, "optimizer": not offloads}
    return [name for name, shown in in_use.items() if not shown]


def _limits(budget: MemoryBudget) -> str:
    limits = [] if budget.gpu_memory is None else [f"{budget.gpu_memory:g} GiB"]
    if budget.offload is not None and budget.offload.memory is not None:
        limits.append(f"{budget.offload.memory:g} GiB of a node's host")
    return ", or in ".join(limits)


def _legend(plan: Plan) -> list[str]:
    legends = [_LEGEND if plan.budget.offload is None else _OFFLOAD_LEGEND]
    return legends if plan.local_steps is None else [*legends, _LOCAL_STEPS_LEGEND]


def _title(plan: Plan) -> list[str]:
    size, cluster, work = plan.size, plan.cluster, plan.work
    networks = [f"{count(cluster.nodes, 'node')} x {count(cluster.gpus_per_node, 'GPU')}"]
    if cluster.inter_gbps is not None:
        networks.append(f"{cluster.inter_gbps:,.4g} Gbit/s out of a node")
    if cluster.intra_gbps is not None:
        networks.append(f"{cluster.intra_gbps:,.4g} Gbit/s a GPU inside")
    strategy = plan.resolved
    intra, inter = strategy.gradient_codecs
    trainable = "all trainable" if not size.frozen else f"{size.trainable:,} ({_percent(size)}) trainable"
    active = size.active_trainable + size.active_frozen
    if active < size.params:
        trainable += f", {active:,} active for a token"
    units, micro_batches = count(size.count, "unit"), count(work.micro_batches, "micro-batch", "es")
    return [
        f"{size.params:,} parameters, {trainable}, in {units}; {micro_batches} a step",
        ", ".join(networks),
        *([title_of_axes(plan.axes, plan["IGG"])] if plan.has_axes else []),
        *(["presets with their own codecs; for letters:"] if plan.rows != plan.estimates else []),
        f"weights {_codec(strategy.weights)}, gradients {_codec(inter)} between nodes and {_codec(intra)} inside"
        + (f", error feedback {strategy.error_feedback}" if strategy.error_feedback is not None else "")
        + (f", frozen weights {_codec(strategy.frozen or strategy.weights)}" if size.frozen else ""),
        *([] if plan.local_steps is None else [f"*: weights exchanged between nodes {plan.local_steps}"]),
    ]


def _row(estimate: Estimate, chosen: bool) -> tuple[str, ...]:
    memory = estimate.memory
    states = (
        memory.parameters,
        memory.shard,
        memory.optimizer,
        memory.outer,
        memory.gradients,
        memory.errors,
        memory.working,
        memory.total,
        memory.host,
    )
    return (
        ("-> " if chosen else "   ") + estimate.name,
        _known_as(estimate),
        *(number(state / GIB) for state in states),
        number(estimate.inter_node_bytes / 1e9),
        number(estimate.volume.intra / 1e9),
        seconds(estimate.time.communication),
        seconds(estimate.time.total),
    )


def _known_as(estimate: Estimate) -> str:
    if estimate.strategy.local_steps is not None:
        return "local steps *"
    if estimate.torch is not None:
        return "torch's FSDP"
    return KNOWN_AS.get(estimate.levels, "") if estimate.title is None else estimate.levels


def _percent(size: ModelSize) -> str:
    return f"{100 * size.trainable / size.params:.3g} %"


def _codec(codec: object) -> str:
    return "unencoded" if codec is None else f"as {codec}"
