"""Reports of a plan: as text with its notes, as a chart, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdp_zpp.strategy.error_feedback import Topology, error_buffer_specs
from fsdp_zpp.strategy.local_steps import LocalSteps
from fsdp_zpp.strategy.strategy import ResolvedStrategy, Strategy

from .chart import OURS, PEER, Bar, save, steps_figure
from .choice import TOLERANCE, Estimate, aligned, choose, count, number, seconds, with_levels, with_local_steps
from .cluster import GIB, Cluster, MemoryBudget, Offload
from .memory import Memory, Volume
from .model_size import Axes, Case, ModelSize, Unit
from .step_time import StepTime

# ---- chart


def draw_plan(plan: Plan, path: Path) -> None:
    bars = []
    for row in shown_rows(plan)[0]:
        ms = row.time.total * 1e3
        figures = {"step_ms": ms, "fastest_ms": ms, "slowest_ms": ms, "peak_gib": row.gib}
        said = "the choice" if row is plan.choice else "" if row.fits else "does not fit"
        bars.append(Bar(row.name, seconds(row.time.total), said, PEER if row.torch else OURS, [figures]))
    save(steps_figure(bars, "Predicted time of a step"), path)


# ---- notes


def notes_on(case: Case, codecs: Strategy, local_steps: LocalSteps | None, rows: Sequence[Estimate]) -> Iterator[str]:
    """Yield what was assumed, and which arguments have no effect; ``codecs`` are those of the letters."""
    yield from _on_case(case, codecs)
    yield from _on_links(case.cluster, rows)
    yield from _on_experts(case)
    if local_steps is not None:
        yield from _on_local_steps(case.cluster, codecs, local_steps)
    if case.budget.offload is not None:
        yield from _on_offload(case.budget.offload)


def _on_case(case: Case, codecs: Strategy) -> list[str]:
    cluster, work, budget = case.cluster, case.work, case.budget
    topologies = [part.topology for part in case.parts if part.strategy is None]
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
    if cluster.nodes == 1:
        notes.append("A single node sends nothing to other nodes.")
    elif all(topology.nodes == 1 for topology in topologies):
        notes.append("Each strategy's ranks share a node, so it sends nothing to other nodes.")
    if cluster.gpus_per_node == 1:
        notes.append("Nodes of one GPU send nothing inside.")
    return notes + _idle_codecs(case.size, topologies, codecs)


def _on_local_steps(cluster: Cluster, codecs: Strategy, local_steps: LocalSteps) -> list[str]:
    if cluster.nodes == 1:
        return ["Local steps have no effect: there is only one node."]
    notes = []
    if local_steps.has_synchronous_steps:
        phases = [f"the first {local_steps.start}"] * (local_steps.start > 0)
        phases += [f"those from {local_steps.stop} on"] * (local_steps.stop is not None)
        notes.append(
            f"Synchronous steps ({' and '.join(phases)}) send what the same letters send without local steps. Memory "
            "figures suffice for all steps."
        )
    return notes + _left_out(codecs, local_steps)


def _left_out(codecs: Strategy, local_steps: LocalSteps) -> list[str]:
    kept = with_local_steps(with_levels(codecs, "III"), local_steps)
    idle = [
        f"{name}={requested}"
        for name, requested in (("gradients", codecs.gradients), ("error_feedback", codecs.error_feedback))
        if requested is not None and getattr(kept, name) is None
    ]
    if not idle:
        return []
    unencoded = ", unencoded unless intra_gradients names a codec" * (kept.gradient_codecs[0] is None)
    return [f"Local steps ignore {' and '.join(idle)}: gradients stay inside nodes{unencoded}."]


def _on_experts(case: Case) -> Iterator[str]:
    routing, (_, *experts) = case.size.routing, case.parts
    if routing is None or not experts:
        return
    ranks, held = experts[0].topology.world, routing.experts // case.axes.ep
    if ranks > held:
        yield (
            f"Experts are sharded over {ranks} ranks, and a layer has {held} for them: fully_shard pads a stack of "
            "fewer experts than ranks, which is left out here. Have shard_placement_fn cut another dimension."
        )


def _idle_codecs(size: ModelSize, topologies: Sequence[Topology], codecs: Strategy) -> list[str]:
    one_node = all(topology.nodes == 1 for topology in topologies)
    idle = []
    if codecs.frozen is not None and size.frozen == 0:
        idle.append(f"frozen={codecs.frozen} has no effect: all parameters are trainable.")
    for name, codec in (("weights", codecs.weights), ("gradients", codecs.gradients)):
        if codec is not None and one_node:
            idle.append(f"{name}={codec} has no effect: it encodes what is sent between nodes.")
    resolved = [codecs.resolve(topology) for topology in topologies]
    if all((each.weights, each.gradient_codecs) != (codecs.weights, codecs.gradient_codecs) for each in resolved):
        idle.append(
            "If the links inside the node are slow, name them: link='pcie4' plans each GPU as a node, as training does."
        )
    intra = codecs.gradient_codecs[0]
    if intra is not None and all(topology.gpus_per_node == 1 for topology in topologies):
        idle.append(f"intra_gradients={intra} has no effect: it encodes what is sent inside a node.")
    feedback = codecs.error_feedback
    hops = {"inter": "between nodes", "intra": "inside a node"} if feedback is not None else {}
    if feedback is not None and feedback.hops == "inter":
        del hops["intra"]
    # Which of the two hops have errors does not depend on the optimizer scope or the size.
    fed_back = {
        hop for each in resolved for hop in error_buffer_specs(feedback, each.gradient_codecs, "G", each.topology, 0)
    }
    idle += [
        f"error_feedback has no effect {where}: nothing encoded is sent there."
        for hop, where in hops.items()
        if hop not in fed_back
    ]
    return idle


def _on_links(cluster: Cluster, rows: Sequence[Estimate]) -> Iterator[str]:
    """Yield what counts as a node if the links inside nodes are slow, and the better size of one on several."""
    if not cluster.slow_links or cluster.gpus_per_node == 1:
        return
    if cluster.nodes == 1:
        yield (
            "Links of the machine are slow: strategies with codecs and optimizer scope G count each GPU as a node, and "
            "their bytes are shown as sent inside it. A quantized base stays sharded over the machine."
        )
        return
    fitting = [row for row in rows if row.fits and row.torch is None]
    by_size: dict[bool, list[Estimate]] = {False: [], True: []}
    for row in fitting:
        by_size[row.candidate.strategy.gpus_per_node == 1].append(row)
    machine, gpu = (choose(each, slow_links=True) for each in by_size.values())
    if machine is None or gpu is None:
        return
    # Ties go to the machine, which keeps less on each GPU.
    better = "pass gpus_per_node=1" if gpu.time.total * (1 + TOLERANCE) < machine.time.total else "keep the machine"
    one, other = (f"{row.name} takes {seconds(row.time.total)} and {row.gib:.1f} GiB" for row in (machine, gpu))
    yield f"Three levels of links: with a machine as a node, {one}; with each GPU as a node, {other}: {better}."


ANY_HOST = Offload(gbps=1.0, optimizer_gbs=1.0)
"""A host of which no figure matters but that it has enough memory: what fits does not depend on its speed."""


def _on_offload(offload: Offload) -> Iterator[str]:
    yield (
        "Parameters, their gradients and optimizer state are offloaded: pass offload_policy=CPUOffloadPolicy() to "
        "fully_shard, or cpu_offload=CPUOffload(offload_params=True) to FullyShardedDataParallel. A quantized base, "
        "secondary shards, accumulated gradients and errors stay on the GPU."
    )
    yield (
        f"A GPU is taken to copy {offload.gbps:,.4g} Gbit/s from and to the host, and the CPUs of a node to move "
        f"{offload.optimizer_gbs:,.4g} GB/s in a fused optimizer's step, which comes after the backward."
    )
    if not offload.assumed:
        return
    options = " and ".join(f"{name} (--{name.replace('_', '-')})" for name in offload.assumed)
    which, them = ("That is", "them") if len(offload.assumed) == 2 else ("Of these, one is", "it")
    yield f"{which} assumed, not measured: pass {options} as benchmarks/step/offload.py prints {them} on your machine."


def hint_at_offload(offloaded: Sequence[Estimate]) -> list[str]:
    """Return a note on the smallest of the rows with CPU offload that fits, if any does."""
    fitting = [estimate for estimate in offloaded if estimate.fits]
    if not fitting:
        return []
    # Exact mathematics first: local steps are never the answer to a lack of memory.
    smallest = min(fitting, key=lambda each: (each.strategy.local_steps is not None, each.memory.total))
    hint = (
        f"With CPU offload (cpu_offload=True, --cpu-offload), {len(fitting)} of {len(offloaded)} would fit: "
        f"{smallest.name} takes {smallest.gib:.1f} GiB a GPU, and {smallest.memory.host / GIB:.1f} GiB of its host for "
        "each."
    )
    return [hint]


# ---- axes


def _title_of_axes(plan: Plan) -> str:
    estimate = plan["IGG"]
    degrees, experts = ", ".join(f"{name} {degree}" for name, degree in asdict(plan.axes).items()), estimate.experts
    if experts is None:
        return f"{degrees}; sharded over {_ranks(estimate.topology)}"
    own = f", by {experts.strategy.levels}" * (experts.strategy.levels != estimate.levels)
    dense = f"dense parameters sharded over {_ranks(estimate.topology)}"
    return f"{degrees}; {dense}, experts over {_ranks(experts.topology)}{own}"


def _ranks(topology: Topology) -> str:
    return f"{count(topology.world, 'rank')}, {topology.gpus_per_node:,} a node"


def _table_of_axes(plan: Plan, estimate: Estimate) -> list[str]:
    experts = estimate.experts
    volumes = {"dp" if experts is None else "dp, dense parameters": estimate.dense_volume}
    if experts is not None:
        volumes[f"dp, experts ({experts.strategy.levels})"] = experts.volume
    volumes |= {f"{axis}, activations *": volume for axis, volume in plan.activations}
    rows = [(f"GB a step under {estimate.name}:", "out of node", "in node, a GPU")]
    for name, volume in volumes.items():
        out = plan.cluster.gpus_per_node * volume.inter
        rows.append((f"   {name}", number(out / 1e9), number(volume.intra / 1e9)))
    estimated = "* estimated from the shape of a layer; no time above includes them."
    return [*aligned(rows, names=1), *([estimated] if plan.activations else []), ""]


# ---- json


def plan_to_json(plan: Plan) -> str:
    """Return all inputs and figures as JSON: bytes, seconds, and GiB for inputs that were given in GiB."""
    report: dict[str, Any] = {
        "choice": None if plan.choice is None else plan.choice.name,
        "reason": plan.reason,
        "notes": plan.notes,
        "model": {
            "params": plan.size.params,
            "trainable": plan.size.trainable,
            "active": plan.size.active_trainable + plan.size.active_frozen,
            "units": [_without(unit, () if plan.has_axes else _OF_EXPERTS) for unit in plan.size.units],
        },
        "cluster": asdict(plan.cluster),
        "work": asdict(plan.work),
        "budget_gib": _without(plan.budget, ("offload",)),
        "precision": asdict(plan.precision),
        "codecs": _codecs(plan),
        "paste": None if plan.choice is None else plan.choice.paste,
        "strategies": {estimate.name: _figures(estimate, plan) for estimate in plan.rows},
    }
    if plan.has_axes:
        report["axes"] = asdict(plan.axes)
        report["estimated_activation_bytes_per_gpu"] = {axis: asdict(volume) for axis, volume in plan.activations}
    if plan.budget.offload is not None:
        report["offload"] = asdict(plan.budget.offload)
    if plan.local_steps is not None:
        # Codecs as text: asdict would leave of them no more than their blocks.
        report["local_steps"] = vars(plan.local_steps)
    return json.dumps(report, indent=1, default=str)


_OF_EXPERTS = ("expert_trainable", "expert_frozen")
_OF_LOCAL_STEPS = ("outer", "exchange", "wait")
_OF_OFFLOAD = ("host", "optimizer")


def _without(record: Unit | MemoryBudget | Memory | StepTime, left_out: Sequence[str]) -> dict[str, Any]:
    return {name: figure for name, figure in asdict(record).items() if name not in left_out}


def _codecs(plan: Plan) -> dict[str, str | None]:
    strategy = plan.resolved
    intra, inter = strategy.gradient_codecs
    codecs: dict[str, object] = {"weights": strategy.weights, "gradients": inter, "intra_gradients": intra}
    codecs |= {"frozen": strategy.frozen, "error_feedback": strategy.error_feedback}
    return {name: None if codec is None else str(codec) for name, codec in codecs.items()}


def _figures(estimate: Estimate, plan: Plan) -> dict[str, Any]:
    out_of_memory: tuple[str, ...] = _OF_LOCAL_STEPS if estimate.strategy.local_steps is None else ()
    out_of_time = out_of_memory
    if plan.budget.offload is None:
        out_of_memory, out_of_time = (*out_of_memory, "host"), (*out_of_time, *_OF_OFFLOAD)
    memory, time = estimate.memory, estimate.time
    totals = {"communication": time.communication, "step": time.total}
    return (_ranks_of(estimate) if plan.has_axes else {}) | {
        "torch": estimate.torch,
        "paste": estimate.paste,
        "levels": estimate.levels,
        "gpus_per_node": estimate.topology.gpus_per_node,
        "fits": estimate.fits,
        "memory_bytes": _without(memory, out_of_memory) | {"total": memory.total},
        "inter_node_bytes": estimate.inter_node_bytes,
        "sent_bytes_per_gpu": asdict(estimate.volume),
        "seconds": _without(time, out_of_time) | totals,
    }


def _ranks_of(estimate: Estimate) -> dict[str, Any]:
    figures: dict[str, Any] = {"ranks": asdict(estimate.topology)}
    if (experts := estimate.experts) is not None:
        figures["experts"] = {
            "levels": experts.strategy.levels,
            "ranks": asdict(experts.topology),
            "sent_bytes_per_gpu": asdict(experts.volume),
            "memory_bytes": experts.memory.total,
        }
    return figures


# ---- report


@dataclass(frozen=True, kw_only=True)
class Plan(Case):
    """A plan, the result of ``plan``: the case, and figures of strategies for it.

    The case is in ``size``, ``cluster``, ``work``, ``budget``, ``precision``, ``axes`` and ``experts_strategy``.

    Attributes:
        estimates: All 14 strategies, in the order of ``LEGAL_LEVELS``; then those with local steps, if they were given
            and there are several nodes.
        choice: The best strategy that fits; None if none does.
        reason: A sentence or two that say why.
        notes: Sentences that explain the figures.
        local_steps: The local steps of the strategies that have them; None if none has.
        activations: Estimated bytes that one GPU sends in a step along each axis, as far as they are known.
        rows: All that the plan compares: torch's strategies and presets if they are planned, then ``estimates``. Each
            has a ``name``, a ``strategy`` or torch's name (``torch``), ``memory``, ``time``, and a line to ``paste``.
    """

    estimates: tuple[Estimate, ...]
    choice: Estimate | None
    reason: str
    notes: tuple[str, ...]
    local_steps: LocalSteps | None
    activations: tuple[tuple[str, Volume], ...]
    rows: tuple[Estimate, ...]

    def __getitem__(self, name: str) -> Estimate:
        """Return the row of a name: ``IIG``, ``III every 64``, a preset or ``FULL_SHARD``; or raise KeyError."""
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

_COLUMNS: dict[str, Callable[[Estimate], str]] = {
    "known as": lambda row: _known_as(row),
    "weights": lambda row: number(row.memory.parameters / GIB),
    "shards": lambda row: number(row.memory.shard / GIB),
    "optimizer": lambda row: number(row.memory.optimizer / GIB),
    "outer": lambda row: number(row.memory.outer / GIB),
    "gradients": lambda row: number(row.memory.gradients / GIB),
    "errors": lambda row: number(row.memory.errors / GIB),
    "working": lambda row: number(row.memory.working / GIB),
    "total": lambda row: number(row.memory.total / GIB),
    "on host": lambda row: number(row.memory.host / GIB),
    "out of node": lambda row: number(row.inter_node_bytes / 1e9),
    "in node": lambda row: number(row.volume.intra / 1e9),
    "communication": lambda row: seconds(row.time.communication),
    "step": lambda row: seconds(row.time.total),
}
_UNITS = {"weights": "GiB a GPU:", "out of node": "GB a step:", "communication": "predicted:"}
"""Text above columns, from the named one to the next that is named."""

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
    zeros = _columns_of_zeros(plan)
    columns = {name: cell for name, cell in _COLUMNS.items() if name not in zeros}
    rows = [("", *columns)]
    for row in ranked:
        name = ("-> " if row is plan.choice else "   ") + row.name
        rows.append((name, *(cell(row) for cell in columns.values())))
    header, *lines = aligned(rows, names=2)
    rule = "-" * max(map(len, [header, *lines]))
    first_out = next((i for i, estimate in enumerate(ranked) if not estimate.fits), None)
    if first_out is not None:
        lines.insert(first_out, f"does not fit in {_limits(plan.budget)}:")
    units = ""
    for column, unit in _UNITS.items():
        units = units.ljust(header.index(column)) + unit
    lines = [units, header, rule, *lines]
    more = [f"{count(left_out, 'combination')} of letters not shown; --json has all."] if left_out else []
    verdict = [plan.reason] if plan.choice is None else [plan.reason, "", plan.choice.paste]
    by_axis = _table_of_axes(plan, ranked[0]) if plan.has_axes else []
    legend = [_LEGEND if plan.budget.offload is None else _OFFLOAD_LEGEND]
    legend += [] if plan.local_steps is None else [_LOCAL_STEPS_LEGEND]
    return "\n".join([*_title(plan), "", *lines, *more, rule, *verdict, "", *by_axis, *legend, *plan.notes])


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


def _title(plan: Plan) -> list[str]:
    size, cluster, work = plan.size, plan.cluster, plan.work
    networks = [f"{count(cluster.nodes, 'node')} x {count(cluster.gpus_per_node, 'GPU')}"]
    if cluster.inter_gbps is not None:
        networks.append(f"{cluster.inter_gbps:,.4g} Gbit/s out of a node")
    if cluster.intra_gbps is not None:
        networks.append(f"{cluster.intra_gbps:,.4g} Gbit/s a GPU inside")
    strategy = plan.resolved
    intra, inter = strategy.gradient_codecs
    trainable = (
        "all trainable"
        if not size.frozen
        else f"{size.trainable:,} ({100 * size.trainable / size.params:.3g} %) trainable"
    )
    active = size.active_trainable + size.active_frozen
    if active < size.params:
        trainable += f", {active:,} active for a token"
    units, micro_batches = count(size.count, "unit"), count(work.micro_batches, "micro-batch", "es")
    return [
        f"{size.params:,} parameters, {trainable}, in {units}; {micro_batches} a step",
        ", ".join(networks),
        *([_title_of_axes(plan)] if plan.has_axes else []),
        *(["presets with their own codecs; for letters:"] if plan.rows != plan.estimates else []),
        f"weights {_codec(strategy.weights)}, gradients {_codec(inter)} between nodes and {_codec(intra)} inside"
        + (f", error feedback {strategy.error_feedback}" if strategy.error_feedback is not None else "")
        + (f", frozen weights {_codec(strategy.frozen or strategy.weights)}" if size.frozen else ""),
        *([] if plan.local_steps is None else [f"*: weights exchanged between nodes {plan.local_steps}"]),
    ]


def _known_as(estimate: Estimate) -> str:
    if estimate.strategy.local_steps is not None:
        return "local steps *"
    if estimate.torch is not None:
        return "torch's FSDP"
    return KNOWN_AS.get(estimate.levels, "") if estimate.title is None else estimate.levels


def _codec(codec: object) -> str:
    return "unencoded" if codec is None else f"as {codec}"
