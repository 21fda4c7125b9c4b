"""What of a strategy is at work on a given mesh, and what is not, and why: the one log line of a model."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from .at_work import at_work
from .codecs import Codec
from .error_feedback import LoCo, senders
from .strategy import Strategy
from .strategy_unit import levels_on
from .topology import ProcessMesh, Topology

logger = logging.getLogger("fsdp_zpp")

_ALONE = "one rank: nothing is sent"
_FAST_LINKS = "one node: no gain on fast links; on slow ones, say gpus_per_node=1"


@dataclass(frozen=True)
class Activity:
    """What works (``active``) and what was asked for but has nothing to do here (``inactive``), in words."""

    active: tuple[str, ...]
    inactive: tuple[str, ...]

    def __str__(self) -> str:
        words = "; ".join(self.active) or "nothing to communicate"
        return words + (f"; NOT active: {'; '.join(self.inactive)}" if self.inactive else "")


def activity(strategy: Strategy, topology: Topology, error_nbytes: int = 0) -> Activity:
    """What of ``strategy`` works on ``topology``, where error feedback takes ``error_nbytes``."""
    codecs, levels = at_work(strategy, topology).gradient_codecs, levels_on(strategy, topology)
    parts = _weights(strategy, topology) + _reduction(*codecs, topology)
    if strategy.gradients is not None and codecs[1] is None:
        parts.append((f"gradients reduced as {strategy.gradients}", _FAST_LINKS))
    parts += _feedback(strategy.error_feedback, codecs, levels.optimizer, topology, error_nbytes)
    waiting = {"N": "on each rank", "I": "inside nodes", "G": None}[levels.gradients]
    if topology.world > 1 and waiting is not None:
        parts.append((f"micro-batches accumulated {waiting}", None))
    return _activity(parts)


def _weights(strategy: Strategy, topology: Topology) -> list[tuple[str, str | None]]:
    """The texts of a strategy's parameters."""
    parts: list[tuple[str, str | None]] = []
    levels = levels_on(strategy, topology)
    why_not = _ALONE if topology.world == 1 else None
    if levels.optimizer == "N" and why_not is None:
        why_not = "every rank has all of them"
    codec = at_work(strategy, topology).weights
    if strategy.weights is not None:
        left_off = _FAST_LINKS if codec is None else None
        parts.append((f"weights gathered as {strategy.weights}", why_not or left_off))
    if codec is None and why_not is None:
        parts.append(("weights gathered in full precision", None))
    if levels.parameters == "N" and why_not is None:
        parts.append(("weights kept gathered until they change", None))
    if strategy.keeps_secondary:
        parts.append(("secondary shard of the weights kept in each node", _no_hop_between(topology)))
    return parts


def _activity(parts: list[tuple[str, str | None]]) -> Activity:
    """From texts, each with the reason why it is not active, if it isn't."""
    by_reason: dict[str | None, list[str]] = {None: []}
    for text, why_not in parts:
        by_reason.setdefault(why_not, []).append(text)
    active = tuple(by_reason.pop(None))
    return Activity(active, tuple(f"{', '.join(texts)} ({why_not})" for why_not, texts in by_reason.items()))


def _reduction(intra: Codec | None, inter: Codec | None, topology: Topology) -> list[tuple[str, str | None]]:
    """The texts of a gradient reduction with these codecs inside and between nodes."""
    if intra is None and inter is None:
        return [("gradients reduced in full precision", None)] if topology.world > 1 else []
    parts: list[tuple[str, str | None]] = []
    for codec, level, why_not in (
        (intra, "inside nodes", _no_hop_inside(topology)),
        (inter, "between nodes", _no_hop_between(topology)),
    ):
        if codec is not None:
            parts.append((f"gradients reduced as {codec} {level}", why_not))
        elif why_not is None:
            parts.append((f"gradients reduced in full precision {level}", None))
    return parts


def _feedback(
    config: LoCo | None, codecs: tuple[Codec | None, Codec | None], keep: str, topology: Topology, nbytes: int
) -> list[tuple[str, str | None]]:
    """The texts of error feedback."""
    if config is None:
        return []
    at_work = senders(config, codecs, keep, topology, 0)
    parts: list[tuple[str, str | None]] = []
    for hop, level, why_not in (
        ("intra", "inside nodes", _no_hop_inside(topology)),
        ("inter", "between nodes", _no_hop_between(topology)),
    ):
        if hop not in at_work and (hop == "inter" or config.hops == "both"):
            parts.append((f"error feedback {level}", why_not or "full precision: no error"))
    levels = [level for hop, level in (("intra", "inside"), ("inter", "between")) if hop in at_work]
    if levels:
        parts.append((f"error feedback {' and '.join(levels)} nodes ({config}; {_size(nbytes)} a rank)", None))
    return parts


def _size(nbytes: int) -> str:
    """A number of bytes for people."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes} bytes"


def _no_hop_between(topology: Topology) -> str | None:
    if topology.world == 1:
        return _ALONE
    return "one node: no inter-node hop" if topology.nodes == 1 else None


def _no_hop_inside(topology: Topology) -> str | None:
    if topology.world == 1:
        return _ALONE
    return "one GPU a node: no intra-node hop" if topology.gpus_per_node == 1 else None


def log_activity(strategy: Strategy, mesh: ProcessMesh, model: str, units: int, error_nbytes: int) -> None:
    """Say once, on the mesh's first rank, what is active; a warning if something that was asked for is not."""
    _log(f"{model}: {strategy.levels}", mesh, units, activity(strategy, mesh.topology, error_nbytes))


def log_reduction(
    codecs: tuple[Codec | None, Codec | None],
    error_feedback: LoCo | None,
    mesh: ProcessMesh,
    model: str,
    units: int,
    error_nbytes: int,
) -> None:
    """As :func:`log_activity`, for a gradient reduction alone."""
    parts = _reduction(*codecs, mesh.topology)
    parts += _feedback(error_feedback, codecs, "G", mesh.topology, error_nbytes)
    _log(f"{model}: quantized_reduce_hook", mesh, units, _activity(parts))


def _log(subject: str, mesh: ProcessMesh, units: int, report: Activity) -> None:
    if mesh.rank == 0:
        level = logging.WARNING if report.inactive else logging.INFO
        logger.log(level, "%s on %s, %d units: %s", subject, mesh.topology, units, report)
