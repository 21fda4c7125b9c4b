"""The log line of a strategy: its active parts on a layout of ranks, its inactive parts, and why they are inactive."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fsdp_zpp.codecs import Codec
from fsdp_zpp.comm.mesh import ProcessMesh
from fsdp_zpp.strategy.error_feedback import LoCo, Topology, error_buffer_specs
from fsdp_zpp.strategy.strategy import ResolvedStrategy, Strategy

from .links import Links, known_links
from .unit import StrategyUnit

# ---- notes on slow links, which may determine the node size: see [Note: Links] in strategy.py


class LinksNote(NamedTuple):
    text: str
    is_warning: bool


def links_of(strategy: Strategy, mesh: ProcessMesh) -> Links | None:
    """Return the links that may determine the node size; None if unknown, or if ``strategy`` gives a node size."""
    return known_links(mesh.group) if strategy.gpus_per_node is None else None


def note_on_links(strategy: Strategy, mesh: ProcessMesh, members: Sequence[StrategyUnit]) -> LinksNote | None:
    """Return the note on slow links; None if no link is known to be slow, or the strategy sets gpus_per_node."""
    links = links_of(strategy, mesh)
    if links is None or not links.are_slow:
        return None
    if mesh.by_links:
        return note_on_nodes(mesh, _price(members))
    if links.launched.nodes > 1:
        return LinksNote(f"{links}: the hop inside nodes is slow, too", False)
    if links.node_size is None:
        return LinksNote(
            f"{links}: the host counts as one node; order GPUs by CUDA_VISIBLE_DEVICES so that equal sets of "
            "neighbours are joined, or pass gpus_per_node",
            True,
        )
    if strategy.follows_links:
        why, advice = "packed values stay sharded", ""
    elif strategy.optimizer != "G":
        why, advice = "smaller nodes would hold more of the optimizer state", ""
    elif strategy.error_feedback is not None:
        why, advice = "smaller nodes would hold more of the error state", ""
    else:
        why, advice = "not all that crosses them is encoded", " or choose Strategy.zeropp()"
    stays = f"the host still counts as one node, for {why}"
    return LinksNote(f"{links}: {stays}; pass gpus_per_node={links.node_size} to override{advice}", False)


def note_on_nodes(mesh: ProcessMesh, price: str = "") -> LinksNote | None:
    """Return the note that links have determined the node size, and at what ``price``; None if they have not."""
    links = known_links(mesh.group)
    if links is None or not mesh.by_links:
        return None
    size = mesh.topology.gpus_per_node
    each = "each counts" if size == 1 else f"each {size} count"
    return LinksNote(f"{links}: {each} as a node{price}; gpus_per_node={mesh.topology.world} to override", True)


def _price(members: Sequence[StrategyUnit]) -> str:
    """Return a clause on the memory that smaller nodes cost each GPU, beyond that with the host as one node."""
    copies, sums = sum(map(_copy_nbytes, members)), sum(map(_sum_nbytes, members))
    parts = []
    if copies:
        parts.append(f"{size_text(copies)} a GPU for encoded weights")
    if sums:
        parts.append(f"up to {size_text(sums)} a GPU for gradients while they accumulate")
    return f", which takes {' and '.join(parts)}" if parts else ""


def _copy_nbytes(unit: StrategyUnit) -> int:
    codec = unit.resolved.weights
    if codec is None or unit.gather is None or not unit.gather.secondary.keep:
        return 0
    return codec.nbytes(sum(shard.numel() for shard in unit.sharded.shards())) * unit.ranks.topology.nodes


def _sum_nbytes(unit: StrategyUnit) -> int:
    """Return a rank's bytes of a unit's fp32 gradient sums; 0 unless the host as one node would keep fewer."""
    topology, scope = unit.ranks.topology, unit.scopes.gradients
    on_one_node = unit.strategy.resolve(Topology(topology.world, topology.world)).scopes.gradients
    if scope == "G" or on_one_node != "G" or not unit.sharded.is_trained():
        return 0
    return 4 * unit.sharded.numel() // topology.shard_count(scope)


def size_text(nbytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes} bytes"


# ---- the log line: which parts of a strategy are active on a mesh, which are not, and why

logger = logging.getLogger("fsdp_zpp")

Groups = dict[tuple[Strategy, ProcessMesh], list[StrategyUnit]]
"""Units of a model by their strategies and ranks."""

_ALONE = "one rank: nothing is sent"
_FAST_LINKS = "one node: no gain on fast links; on slow ones, say gpus_per_node=1"
_NO_INTRA_NODE_HOP = "one GPU a node: no intra-node hop"


class Part(NamedTuple):
    """A part of a strategy; ``why_not`` is the reason why it is inactive on a mesh, None if it is active."""

    text: str
    why_not: str | None = None

    def during(self, steps: str) -> Part:
        return self if self.why_not else Part(f"{self.text} in {steps} steps")


@dataclass(frozen=True)
class StrategySummary:
    """Parts of a strategy that are ``active`` on a mesh, and parts that the user asked for but are ``inactive``."""

    active: tuple[str, ...]
    inactive: tuple[str, ...]

    @classmethod
    def of(cls, parts: Iterable[Part]) -> StrategySummary:
        """Group parts by the reason why they are inactive, so that each reason is given once."""
        by_reason: dict[str | None, list[str]] = {None: []}
        for text, why_not in parts:
            by_reason.setdefault(why_not, []).append(text)
        active = tuple(by_reason.pop(None))
        return cls(active, tuple(f"{', '.join(texts)} ({why_not})" for why_not, texts in by_reason.items()))

    def __str__(self) -> str:
        words = "; ".join(self.active) or "nothing to communicate"
        return words + (f"; NOT active: {'; '.join(self.inactive)}" if self.inactive else "")


@dataclass(frozen=True)
class Coverage:
    units: int
    numel: int
    of_units: int
    of_numel: int

    def __str__(self) -> str:
        if self.units == self.of_units:
            return f"{self.units} unit{'' if self.units == 1 else 's'}"
        share = 100 * self.numel / max(self.of_numel, 1)
        # Don't say 0 or 100 % if that is not exact.
        percent = "under 1" if 0 < share < 0.5 else "over 99" if 99.5 <= share < 100 else f"{share:.0f}"
        return f"{self.units} of {self.of_units} units, {percent} % of parameters"


def summarize(
    strategy: Strategy,
    resolved: ResolvedStrategy,
    error_nbytes: int = 0,
    encoded: Coverage | None = None,
    links: Links | None = None,
    own: Coverage | None = None,
    packed: bool = False,
) -> StrategySummary:
    """Sort the parts of a strategy into active and inactive ones.

    ``encoded`` counts the units whose weights a codec encodes; None means all units. ``own`` counts the units whose
    parameters encode themselves for FSDP's gather, as torchao's float8 does. ``packed`` is True if there are further
    units, which hold packed values. ``resolved`` is ``strategy`` on the ranks of the units that a codec encodes.
    """
    no_gain = f"one node, {links}: no gain from codecs" if links is not None and not links.are_slow else _FAST_LINKS
    codecs, scopes, topology = resolved.gradient_codecs, resolved.scopes, resolved.topology
    local_steps = strategy.local_steps
    parts = list(_weights(strategy, resolved, encoded, no_gain, own, packed))
    if local_steps is None or topology.nodes == 1:
        reduction = _reduction(codecs, topology)
    elif local_steps.start:
        node = resolved.within_node()
        inside = (part for part in _reduction(node.gradient_codecs, node.topology) if part.why_not is None)
        reduction = [part.during("synchronous") for part in _reduction(codecs, topology)]
        reduction += [part.during("local") for part in inside]
    else:
        topology = resolved.within_node().topology  # gradients stay inside the node
        reduction = _reduction(codecs, topology)
    # "auto", the default, does not ask for a codec on the intra-node hop, so don't report that the hop is missing.
    is_auto = strategy.intra_gradients == "auto"
    parts += [part for part in reduction if not (is_auto and part.why_not == _NO_INTRA_NODE_HOP)]
    if local_steps is not None:
        alone = resolved.topology.nodes == 1 and local_steps.elastic is None
        why_not = "one node: nothing to exchange" if alone else None
        parts.append(Part(f"local steps, weights exchanged between nodes {local_steps}", why_not))
    if strategy.gradients is not None and codecs[1] is None:
        parts.append(Part(f"gradients reduced as {strategy.gradients}", no_gain))
    parts += _feedback(strategy.error_feedback, codecs, scopes.optimizer, topology, error_nbytes)
    accumulated = {"N": "on each rank", "I": "inside nodes", "G": None}[scopes.gradients]
    if topology.world > 1 and accumulated is not None:
        parts.append(Part(f"micro-batches accumulated {accumulated}"))
    return StrategySummary.of(parts)


def _weights(
    strategy: Strategy,
    resolved: ResolvedStrategy,
    encoded: Coverage | None,
    no_gain: str,
    own: Coverage | None,
    packed: bool,
) -> Iterator[Part]:
    """Yield the parts on gathering parameters; ``no_gain`` is the reason why a codec is inactive on one node."""
    scopes, topology, codec = resolved.scopes, resolved.topology, resolved.weights
    why_not = _ALONE if topology.world == 1 else None
    if scopes.optimizer == "N" and why_not is None:
        why_not = "every rank has all of them"
    if strategy.weights is not None:
        left_off = no_gain if codec is None else None
        where = f" ({encoded})" if encoded is not None and encoded.units else ""
        # Leave an active codec out if it encodes no unit: packed values take as few bytes as its codes would.
        if encoded is None or encoded.units or why_not or left_off:
            yield Part(f"weights gathered as {strategy.weights}{where}", why_not or left_off)
        if packed and not (why_not or left_off):
            yield Part(f"packed values gathered as they are, not as {strategy.weights}")
    if why_not is None:
        if codec is None and (own is None or own.units < own.of_units):
            yield Part("weights gathered in full precision")
        if own is not None:
            instead = "" if codec is None else f", not as {strategy.weights}"
            yield Part(f"weights that encode themselves gathered in their own bytes{instead} ({own})")
        if scopes.parameters == "N":
            yield Part("weights kept gathered until they change")
    if strategy.keeps_secondary:
        _, (_, _, no_inter_node_hop) = _hops(topology)
        yield Part("secondary shard of the weights kept in each node", no_inter_node_hop)


def _hops(topology: Topology) -> list[tuple[str, str, str | None]]:
    """Return for each hop its key among error buffers, its name in prose, and the reason why it is missing."""
    no_intra = _NO_INTRA_NODE_HOP if topology.gpus_per_node == 1 else None
    no_inter = "one node: no inter-node hop" if topology.nodes == 1 else None
    if topology.world == 1:
        no_intra = no_inter = _ALONE
    return [("intra", "on the intra-node hop", no_intra), ("inter", "on the inter-node hop", no_inter)]


def _reduction(codecs: tuple[Codec | None, Codec | None], topology: Topology) -> list[Part]:
    if codecs == (None, None):
        return [Part("gradients reduced in full precision")] if topology.world > 1 else []
    parts = []
    for codec, (_, where, why_not) in zip(codecs, _hops(topology), strict=True):
        if codec is not None:
            parts.append(Part(f"gradients reduced as {codec} {where}", why_not))
        elif why_not is None:
            parts.append(Part(f"gradients reduced in full precision {where}"))
    return parts


def _feedback(
    config: LoCo | None,
    codecs: tuple[Codec | None, Codec | None],
    optimizer_scope: str,
    topology: Topology,
    nbytes: int,
) -> Iterator[Part]:
    if config is None:
        return
    # The keys tell which hops have error buffers; their sizes don't matter here, so the number of values is 0.
    fed_back = error_buffer_specs(config, codecs, optimizer_scope, topology, 0)
    hops = _hops(topology)
    for hop, where, why_not in hops:
        if hop not in fed_back and (hop == "inter" or config.hops == "both"):
            yield Part(f"error feedback {where}", why_not or "full precision: no error")
    places = [where for hop, where, _ in hops if hop in fed_back]
    if places:
        where = places[0] if len(places) == 1 else "on both hops"
        yield Part(f"error feedback {where} ({config}; {size_text(nbytes)} a rank)")


def log_summaries(model: str, groups: Groups, others: Sequence[int]) -> None:
    """Log the active parts of each strategy once, on the model's first rank; as a warning if any part is inactive."""
    if any(mesh.rank for _, mesh in groups):  # rank 0 of a mesh of experts may not be rank 0 of all
        return
    numels = [*(unit.sharded.numel() for members in groups.values() for unit in members), *others]
    for (strategy, mesh), members in groups.items():
        encoded = [unit for unit in members if not unit.packed]
        resolved = strategy.resolve(mesh.topology)  # not unit.resolved, which has no codec if values are packed
        coverage = None if len(encoded) == len(members) else _coverage(encoded, numels)
        by_themselves = [unit for unit in members if unit.encodes_itself]
        own = _coverage(by_themselves, numels) if by_themselves else None
        packed = len(encoded) + len(by_themselves) < len(members)
        nbytes, links = sum(map(_error_nbytes, members)), links_of(strategy, mesh)
        summary = summarize(strategy, resolved, nbytes, coverage, links, own, packed)
        note = note_on_links(strategy, mesh, members)
        _log(f"{model}: {strategy.levels}", mesh, _coverage(members, numels), summary, note)


def _coverage(members: Sequence[StrategyUnit], numels: Sequence[int]) -> Coverage:
    return Coverage(len(members), sum(unit.sharded.numel() for unit in members), len(numels), sum(numels))


def _error_nbytes(unit: StrategyUnit) -> int:
    if not unit.sharded.is_trained():
        return 0
    held = sum(shard.numel() for shard in unit.sharded.shards())
    # With local steps, each phase has its own reduction, and only the current phase's reduction keeps errors.
    return max((reduction.error_nbytes(held) for reduction in unit.reductions.all), default=0)


def log_reduction(
    codecs: tuple[Codec | None, Codec | None],
    error_feedback: LoCo | None,
    mesh: ProcessMesh,
    model: str,
    units: int,
    error_nbytes: int,
) -> None:
    """Log the active parts of a comm hook, which reduces gradients and gathers nothing."""
    # Under torch's strategies each rank's optimizer has a shard of its own, which is the scope G.
    feedback = _feedback(error_feedback, codecs, "G", mesh.topology, error_nbytes)
    summary = StrategySummary.of([*_reduction(codecs, mesh.topology), *feedback])
    _log(f"{model}: quantized_reduce_hook", mesh, Coverage(units, 0, units, 0), summary, note_on_nodes(mesh))


def _log(subject: str, mesh: ProcessMesh, coverage: Coverage, report: StrategySummary, note: LinksNote | None) -> None:
    if mesh.rank == 0:
        level = logging.WARNING if report.inactive or (note is not None and note.is_warning) else logging.INFO
        of_links = "" if note is None else f"; {note.text}"
        logger.log(level, "%s on %s, %s: %s%s", subject, mesh.topology, coverage, report, of_links)
