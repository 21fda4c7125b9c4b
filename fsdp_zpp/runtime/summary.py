"""One log line of a model: which parts of its strategy are active on a mesh, which are not, and why."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.collectives.links import Links
from fsdp_zpp.collectives.mesh import ProcessMesh
from fsdp_zpp.config.error_feedback import LoCo, error_buffer_specs
from fsdp_zpp.config.resolve import ResolvedStrategy
from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.config.topology import Topology

from .links_note import LinksNote, links_of, note_on_links, note_on_nodes, size_text
from .unit import StrategyUnit

logger = logging.getLogger("fsdp_zpp")

Groups = dict[tuple[Strategy, ProcessMesh], list[StrategyUnit]]
"""Units of a model by their strategies and ranks."""

_INTRA, _INTER = "on the intra-node hop", "on the inter-node hop"
_ALONE = "one rank: nothing is sent"
_FAST_LINKS = "one node: no gain on fast links; on slow ones, say gpus_per_node=1"
_NO_INTRA_NODE_HOP = "one GPU a node: no intra-node hop"


@dataclass(frozen=True)
class StrategySummary:
    """Parts of a strategy that are ``active`` on a mesh, and those that were asked for but are ``inactive``."""

    active: tuple[str, ...]
    inactive: tuple[str, ...]

    def __str__(self) -> str:
        words = "; ".join(self.active) or "nothing to communicate"
        return words + (f"; NOT active: {'; '.join(self.inactive)}" if self.inactive else "")


@dataclass(frozen=True)
class Coverage:
    """Some units out of all that FSDP has made of a model.

    Attributes:
        units: Their number.
        numel: The number of values of their parameters.
        of_units: The number of all units.
        of_numel: The number of values of all parameters in units.
    """

    units: int
    numel: int
    of_units: int
    of_numel: int

    def __str__(self) -> str:
        if self.units == self.of_units:
            return f"{self.units} unit{'' if self.units == 1 else 's'}"
        share = 100 * self.numel / max(self.of_numel, 1)
        # Neither 0 nor 100 % if that is not exact.
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

    Args:
        strategy: The strategy.
        resolved: As resolved where its weights are encoded.
        error_nbytes: Bytes of error state on a rank.
        encoded: The units whose weights are encoded. Default: all.
        links: The links of the ranks, if they are known.
        own: The units of weights that encode themselves, if there are any.
        packed: Whether other units hold packed values.
    """
    no_gain = f"one node, {links}: no gain from codecs" if links is not None and not links.are_slow else _FAST_LINKS
    codecs, scopes, topology = resolved.gradient_codecs, resolved.scopes, resolved.topology
    local_steps = strategy.local_steps
    exchanges: list[tuple[str, str | None]] = []
    if local_steps is not None:
        alone = topology.nodes == 1 and local_steps.elastic is None
        why_not = "one node: nothing to exchange" if alone else None
        exchanges = [(f"local steps, weights exchanged between nodes {local_steps}", why_not)]
    if local_steps is None or topology.nodes == 1:
        reduction = _reduction(*codecs, topology)
    elif local_steps.has_synchronous_steps:
        reduction = _reduction_in_phases(resolved)
    else:
        topology = resolved.within_node().topology  # gradients stay there
        reduction = _reduction(*codecs, topology)
    if strategy.intra_gradients == "auto":  # nobody has asked for it: without the hop, nothing is missing
        reduction = [part for part in reduction if part[1] != _NO_INTRA_NODE_HOP]
    parts = _weights(strategy, resolved, encoded, no_gain, own, packed) + reduction + exchanges
    if strategy.gradients is not None and codecs[1] is None:
        parts.append((f"gradients reduced as {strategy.gradients}", no_gain))
    parts += _feedback(strategy.error_feedback, codecs, scopes.optimizer, topology, error_nbytes)
    accumulated = {"N": "on each rank", "I": "inside nodes", "G": None}[scopes.gradients]
    if topology.world > 1 and accumulated is not None:
        parts.append((f"micro-batches accumulated {accumulated}", None))
    return _summary(parts)


def _weights(
    strategy: Strategy,
    resolved: ResolvedStrategy,
    encoded: Coverage | None,
    no_gain: str,
    own: Coverage | None,
    packed: bool,
) -> list[tuple[str, str | None]]:
    """Return texts on how parameters are gathered, each with the reason why it is inactive, or None.

    ``no_gain`` is the reason for which codecs are inactive on one node; the rest is as for :func:`summarize`.
    """
    parts: list[tuple[str, str | None]] = []
    scopes, topology, codec = resolved.scopes, resolved.topology, resolved.weights
    why_not = _ALONE if topology.world == 1 else None
    if scopes.optimizer == "N" and why_not is None:
        why_not = "every rank has all of them"
    if strategy.weights is not None:
        left_off = no_gain if codec is None else None
        where = f" ({encoded})" if encoded is not None and encoded.units else ""
        # If no unit is encoded, nothing is missing: packed values take as few bytes as codes.
        if encoded is None or encoded.units or why_not or left_off:
            parts.append((f"weights gathered as {strategy.weights}{where}", why_not or left_off))
        if packed and not (why_not or left_off):
            parts.append((f"packed values gathered as they are, not as {strategy.weights}", None))
    if codec is None and why_not is None and (own is None or own.units < own.of_units):
        parts.append(("weights gathered in full precision", None))
    if own is not None and why_not is None:
        instead = "" if codec is None else f", not as {strategy.weights}"
        parts.append((f"weights that encode themselves gathered in their own bytes{instead} ({own})", None))
    if scopes.parameters == "N" and why_not is None:
        parts.append(("weights kept gathered until they change", None))
    if strategy.keeps_secondary:
        parts.append(("secondary shard of the weights kept in each node", _no_inter_node_hop(topology)))
    return parts


def _summary(parts: list[tuple[str, str | None]]) -> StrategySummary:
    """Group texts, each with the reason why it is inactive or None, so that each reason is given once."""
    by_reason: dict[str | None, list[str]] = {None: []}
    for text, why_not in parts:
        by_reason.setdefault(why_not, []).append(text)
    active = tuple(by_reason.pop(None))
    return StrategySummary(active, tuple(f"{', '.join(texts)} ({why_not})" for why_not, texts in by_reason.items()))


def _reduction(intra: Codec | None, inter: Codec | None, topology: Topology) -> list[tuple[str, str | None]]:
    """Return texts on a gradient reduction with these codecs on its hops; see :func:`_weights`."""
    if intra is None and inter is None:
        return [("gradients reduced in full precision", None)] if topology.world > 1 else []
    parts: list[tuple[str, str | None]] = []
    for codec, level, why_not in (
        (intra, _INTRA, _no_intra_node_hop(topology)),
        (inter, _INTER, _no_inter_node_hop(topology)),
    ):
        if codec is not None:
            parts.append((f"gradients reduced as {codec} {level}", why_not))
        elif why_not is None:
            parts.append((f"gradients reduced in full precision {level}", None))
    return parts


def _reduction_in_phases(resolved: ResolvedStrategy) -> list[tuple[str, str | None]]:
    """Return texts on the reductions of synchronous and of local steps; see :func:`_weights`."""
    node = resolved.within_node()
    over_all = _reduction(*resolved.gradient_codecs, resolved.topology)
    inside = [part for part in _reduction(*node.gradient_codecs, node.topology) if part[1] is None]
    return [
        *((f"{text} in synchronous steps" if why_not is None else text, why_not) for text, why_not in over_all),
        *((f"{text} in local steps", None) for text, _ in inside),
    ]


def _feedback(
    config: LoCo | None,
    codecs: tuple[Codec | None, Codec | None],
    optimizer_scope: str,
    topology: Topology,
    nbytes: int,
) -> list[tuple[str, str | None]]:
    """Return texts on error feedback; see :func:`_weights`."""
    if config is None:
        return []
    # Only which hops have errors matters here, not their sizes, so any number of values does.
    fed_back = error_buffer_specs(config, codecs, optimizer_scope, topology, 0)
    parts: list[tuple[str, str | None]] = []
    for hop, level, why_not in (
        ("intra", _INTRA, _no_intra_node_hop(topology)),
        ("inter", _INTER, _no_inter_node_hop(topology)),
    ):
        if hop not in fed_back and (hop == "inter" or config.hops == "both"):
            parts.append((f"error feedback {level}", why_not or "full precision: no error"))
    levels = [level for hop, level in (("intra", _INTRA), ("inter", _INTER)) if hop in fed_back]
    if levels:
        where = levels[0] if len(levels) == 1 else "on both hops"
        parts.append((f"error feedback {where} ({config}; {size_text(nbytes)} a rank)", None))
    return parts


def _no_inter_node_hop(topology: Topology) -> str | None:
    if topology.world == 1:
        return _ALONE
    return "one node: no inter-node hop" if topology.nodes == 1 else None


def _no_intra_node_hop(topology: Topology) -> str | None:
    if topology.world == 1:
        return _ALONE
    return _NO_INTRA_NODE_HOP if topology.gpus_per_node == 1 else None


def log_summaries(model: str, groups: Groups, others: Sequence[int]) -> None:
    """Log once a strategy, on the model's first rank, what is active; as a warning if something is inactive.

    Args:
        model: The model's name.
        groups: Its units.
        others: The numbers of values of units that torch alone manages.
    """
    if any(mesh.rank for _, mesh in groups):  # the first of a mesh of experts is not the first of all
        return
    numels = [*(unit.sharded.numel() for members in groups.values() for unit in members), *others]
    for (strategy, mesh), members in groups.items():
        encoded = [unit for unit in members if not unit.packed]
        resolved = strategy.resolve(mesh.topology)  # not a unit's: one of packed values has no codec for weights
        coverage = None if len(encoded) == len(members) else _coverage(encoded, numels)
        by_themselves = [unit for unit in members if unit.encodes_itself]
        own = _coverage(by_themselves, numels) if by_themselves else None
        packed = len(encoded) + len(by_themselves) < len(members)
        nbytes, links = sum(map(_error_nbytes, members)), links_of(strategy, mesh)
        summary = summarize(strategy, resolved, nbytes, coverage, links, own, packed)
        note = note_on_links(strategy, mesh, members)
        _log(f"{model}: {strategy.levels}", mesh, _coverage(members, numels), summary, note)


def _coverage(members: Sequence[StrategyUnit], numels: Sequence[int]) -> Coverage:
    """Return the share of some units in all of a model's, whose numbers of values are ``numels``."""
    return Coverage(len(members), sum(unit.sharded.numel() for unit in members), len(numels), sum(numels))


def _error_nbytes(unit: StrategyUnit) -> int:
    """Return the bytes of error state that a unit will take on this rank."""
    if not unit.sharded.is_trained():
        return 0
    held = sum(shard.numel() for shard in unit.sharded.shards())
    # Those of one phase of local steps at a time.
    return max((reduction.error_nbytes(held) for reduction in unit.reductions.all), default=0)


def log_reduction(
    codecs: tuple[Codec | None, Codec | None],
    error_feedback: LoCo | None,
    mesh: ProcessMesh,
    model: str,
    units: int,
    error_nbytes: int,
) -> None:
    """Log, for a comm hook, which reduces gradients and gathers nothing, what is active."""
    parts = _reduction(*codecs, mesh.topology)
    # Under torch's strategies each rank's optimizer has a shard of its own, which is the scope G.
    parts += _feedback(error_feedback, codecs, "G", mesh.topology, error_nbytes)
    coverage = Coverage(units, 0, units, 0)
    _log(f"{model}: quantized_reduce_hook", mesh, coverage, _summary(parts), note_on_nodes(mesh))


def _log(subject: str, mesh: ProcessMesh, coverage: Coverage, report: StrategySummary, note: LinksNote | None) -> None:
    if mesh.rank == 0:
        warns = bool(report.inactive) or (note is not None and note.is_warning)
        of_links = "" if note is None else f"; {note.text}"
        logger.log(
            logging.WARNING if warns else logging.INFO,
            "%s on %s, %s: %s%s",
            subject,
            mesh.topology,
            coverage,
            report,
            of_links,
        )
