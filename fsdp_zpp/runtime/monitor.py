"""The log line of a strategy, and figures of a running training."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from operator import itemgetter
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from fsdp_zpp.codecs import Codec
from fsdp_zpp.comm.hops import (
    MOST_INTERVALS,
    HopTimer,
    Kind,
    Level,
    Mark,
    TimedHop,
    Traffic,
    at_end_of_backward,
    has_come,
    mark,
    milliseconds_between,
)
from fsdp_zpp.comm.mesh import ProcessMesh
from fsdp_zpp.local_steps.fragment import mean_of, named_figures
from fsdp_zpp.strategy.error_feedback import LoCo, Topology, error_buffer_specs
from fsdp_zpp.strategy.strategy import ResolvedStrategy, Strategy

from ._torch_rank_layout import Links, known_links
from .api import communicators, counters_of
from .unit import Forwards, FullShardUnit, ParameterUnit, StrategyUnit, full_shard_bytes, units_of

# ---- nodes by the links of the machine, and their price: see [Note: Links]


class LinksNote(NamedTuple):
    text: str
    is_warning: bool


def links_of(strategy: Strategy, mesh: ProcessMesh) -> Links | None:
    """Return the links that may decide on the nodes of ``strategy``; None if they are unknown or it names its nodes."""
    return known_links(mesh.group) if strategy.gpus_per_node is None else None


def note_on_links(strategy: Strategy, mesh: ProcessMesh, members: Sequence[StrategyUnit]) -> LinksNote | None:
    """Return the note on slow links; None if there are none, or the strategy names its nodes."""
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
    """Return the note on nodes that links have decided on, with their ``price``; None if links have not."""
    links = known_links(mesh.group)
    if links is None or not mesh.by_links:
        return None
    size = mesh.topology.gpus_per_node
    each = "each counts" if size == 1 else f"each {size} count"
    return LinksNote(f"{links}: {each} as a node{price}; gpus_per_node={mesh.topology.world} to override", True)


def _price(members: Sequence[StrategyUnit]) -> str:
    """Return the additional memory on a GPU compared with the host as one node, as a part of a sentence."""
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
    """Return the bytes of a unit's fp32 sums of gradients that one node would shard over all ranks."""
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
    """A part of a strategy, and the reason why it is not active on a mesh, if it is not."""

    text: str
    why_not: str | None = None

    def during(self, steps: str) -> Part:
        return self if self.why_not else Part(f"{self.text} in {steps} steps")


@dataclass(frozen=True)
class StrategySummary:
    """Parts of a strategy that are ``active`` on a mesh, and those that were asked for but are ``inactive``."""

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

    ``encoded`` are the units whose weights are encoded, by default all; ``own`` those that encode themselves.
    ``packed`` says that other units hold packed values. ``resolved`` is the strategy where its weights are encoded.
    """
    no_gain = f"one node, {links}: no gain from codecs" if links is not None and not links.are_slow else _FAST_LINKS
    codecs, scopes, topology = resolved.gradient_codecs, resolved.scopes, resolved.topology
    local_steps = strategy.local_steps
    parts = list(_weights(strategy, resolved, encoded, no_gain, own, packed))
    if local_steps is None or topology.nodes == 1:
        reduction = _reduction(codecs, topology)
    elif local_steps.has_synchronous_steps:
        node = resolved.within_node()
        inside = (part for part in _reduction(node.gradient_codecs, node.topology) if part.why_not is None)
        reduction = [part.during("synchronous") for part in _reduction(codecs, topology)]
        reduction += [part.during("local") for part in inside]
    else:
        topology = resolved.within_node().topology  # gradients stay there
        reduction = _reduction(codecs, topology)
    # Nobody has asked for "auto": without the hop, nothing is missing.
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
    """Yield how parameters are gathered; on one node, codecs are inactive for the reason ``no_gain``."""
    scopes, topology, codec = resolved.scopes, resolved.topology, resolved.weights
    why_not = _ALONE if topology.world == 1 else None
    if scopes.optimizer == "N" and why_not is None:
        why_not = "every rank has all of them"
    if strategy.weights is not None:
        left_off = no_gain if codec is None else None
        where = f" ({encoded})" if encoded is not None and encoded.units else ""
        # If no unit is encoded, nothing is missing: packed values take as few bytes as codes.
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
    """Return both hops as keys of error buffers, in words, and the reasons why there is none."""
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
    # Only which hops have errors matters here, not their sizes, so any number of values does.
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
    """Log once a strategy, on the model's first rank, its active parts; as a warning if something is inactive."""
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
    return Coverage(len(members), sum(unit.sharded.numel() for unit in members), len(numels), sum(numels))


def _error_nbytes(unit: StrategyUnit) -> int:
    if not unit.sharded.is_trained():
        return 0
    held = sum(shard.numel() for shard in unit.sharded.shards())
    # Local steps have the errors of one phase at a time.
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


# ---- how often a model runs forward in a step


class ForwardCounter:
    """Counts forwards of a model since the last call of ``take``."""

    # Some models are not called: a LightningModule may have its inner model called, and a list of a pipeline's
    # stages can't be called at all. So the modules on the way to the first one with a unit are watched, and the
    # outermost one that is trained decides: recomputation runs inner ones more often, and some of it without gradients.
    def __init__(self, model: nn.Module) -> None:
        self._watched = _path_to_unit(model) or [model]
        self._handles = [self._watch(module) for module in self._watched]
        self._counts: Counter[tuple[nn.Module, bool]] = Counter()  # of forwards with gradients, and without

    def take(self) -> Forwards:
        counts, self._counts = self._counts, Counter()
        ran = [module for trained in (True, False) for module in self._watched if counts[module, trained]]
        return Forwards(counts[ran[0], True], counts[ran[0], False]) if ran else Forwards(0, 0)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _watch(self, module: nn.Module) -> RemovableHandle:
        return module.register_forward_pre_hook(torch.compiler.disable(lambda *_: self._count(module)))

    def _count(self, module: nn.Module) -> None:
        self._counts[module, torch.is_grad_enabled()] += 1


def _path_to_unit(module: nn.Module) -> list[nn.Module]:
    """Return the modules from ``model`` to the first one in it that has a unit, both included; none without units."""
    if units_of(module):
        return [module]
    inner = next(filter(None, map(_path_to_unit, module.children())), [])
    return [module, *inner] if inner else []


# ---- intervals in which the computation's stream waits for communication
#
# Around the computation of a unit, FSDP has the stream wait: before its forward and its backward for weights, and at
# the end of a backward for gradients. A mark before and one after each of these places leave nothing but the wait
# between them. Both FSDPs use the same three kinds of hooks; those of this file run just before and just after theirs.


class CommunicationWaits:
    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.intervals: list[tuple[Mark, Mark]] = []
        self._device = device
        self._began: Mark | None = None
        self._asked_before = self._asked_after = False
        modules = [module for module in model.modules() if units_of(module)]
        self._handles = [handle for module in modules for handle in self._watch(module)]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def take(self) -> list[tuple[Mark, Mark]]:
        """Return the intervals, and empty the list; a backward that has failed is forgotten."""
        intervals, self.intervals = self.intervals, []
        self._began, self._asked_before, self._asked_after = None, False, False
        return intervals

    def _watch(self, module: nn.Module) -> Iterator[RemovableHandle]:
        # FullyShardedDataParallel waits in its own forward, around the module that it wraps.
        inner = module.module if isinstance(module, FullyShardedDataParallel) else module
        # Hooks of a compiled layer would be compiled, too, as functions that differ from layer to layer.
        begin, end, begin_in_backward, end_in_backward = map(
            torch.compiler.disable,
            (
                lambda *_: self._begin(),
                lambda *_: self._end(),
                lambda *given: _watch_gradients(given[-1], self._begin_in_backward),
                lambda *given: _watch_gradients(given[-1], self._end_in_backward),
            ),
        )
        yield module.register_forward_pre_hook(begin, prepend=True)
        yield inner.register_forward_pre_hook(end, prepend=inner is not module)
        yield inner.register_forward_hook(begin_in_backward, prepend=True)
        yield module.register_forward_hook(end_in_backward)

    def _begin(self) -> None:
        self._began = mark(self._device)

    def _end(self) -> None:
        if self._began is not None:
            if len(self.intervals) < MOST_INTERVALS:
                self.intervals.append((self._began, mark(self._device)))
            self._began = None

    def _begin_in_backward(self) -> None:
        if not self._asked_before:
            self._asked_before = True
            at_end_of_backward(self._begin)
        self._begin()

    def _end_in_backward(self) -> None:
        self._end()
        if not self._asked_after:
            # FSDP has asked for its own call since the first call of _begin_in_backward.
            self._asked_after = True
            at_end_of_backward(self._end_backward)

    def _end_backward(self) -> None:
        self._end()
        self._asked_before = self._asked_after = False


def _watch_gradients(output: object, note: Callable[[], None]) -> None:
    """Call ``note`` when the gradient of a forward's output is there, in turn with FSDP's own hooks."""
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _: note())


# ---- the bytes and times of a model's communication in each step
#
# Hops are timed where they are launched (hops.py), and the waits of the computation's stream around FSDP's hooks
# (``CommunicationWaits``). On a GPU all times are events, which :meth:`Monitor.step` reads when they have come, a step
# or two later: nothing makes the host or a stream wait. Without a monitor nothing of it is there.

_KINDS: dict[Kind, str] = {"gather": "weights", "reduce": "gradients"}
_LEVELS: tuple[Level, ...] = ("inter", "intra")


def monitor(model: nn.Module) -> Monitor:
    """Begin to measure the communication of ``model``; call ``step()`` of the result after each optimizer step.

    Args:
        model: A model, or a part of one, that is wrapped with a ``Strategy``, has a ``quantized_reduce_hook``, or has a
            quantized frozen base.

    Raises:
        ValueError: If nothing of fsdp_zpp is in ``model``.
        RuntimeError: If another monitor, which is not closed, measures ``model`` or a part of it.

    Examples:
        >>> watch = monitor(model)
        >>> for batch in data:
        ...     train_step(model, batch)
        ...     figures = watch.step()  # {"step": 12, "weights/inter/bytes": 1048576, ...}
    """
    return Monitor(model)


class Monitor(AbstractContextManager["Monitor"]):
    """Measures the communication of a model in each step; :func:`monitor` makes it.

    It is a context manager, too, which closes it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._timer = HopTimer()
        self._sent = self._attach(counters_of(model))  # raises before anything is set
        self._device = _device(model)
        # On a CPU the host itself makes each hop, so all of its time is exposed.
        self._waits = CommunicationWaits(model, self._device) if self._device.type == "cuda" else None
        self._forwards = ForwardCounter(model)
        self._is_closed = False
        self._steps: deque[_Step] = deque()
        self._number = 0
        self._last: dict[str, float] = {}
        self._began = mark(self._device)

    def step(self) -> dict[str, float]:
        """End a step, and return the figures of the latest step that the device has completed.

        On a GPU that is mostly the step before, and in the first calls there may be none; on a CPU it is this one. All
        forwards and backwards between two calls belong to one step, also those of micro-batches and of evaluation.

        Returns:
            ``step``, counted from 1; ``ms``, the step's time; for ``weights`` and ``gradients``, each with ``inter``
            and ``intra``, as in ``weights/inter/bytes``: ``bytes`` that this rank sent (:func:`fsdp_zpp.traffic`),
            ``ms`` that its collectives took in their streams, the wait for other ranks included, and ``exposed_ms``,
            the part of it in which the computation waited; ``inter/full_shard_bytes`` and ``intra/full_shard_bytes``,
            which FULL_SHARD would send in the same forwards under ``no_sync``, and ``inter/share`` and
            ``intra/share``, the part of it that was sent. These four are left out where torch sends something itself,
            which is not counted, and shares where FULL_SHARD would send nothing. All times but the step's are left out
            if it had 100,000 collectives or more. With local steps, there are ``outer/gain``, how many
            times as long as the nodes' mean change the latest outer steps were, ``outer/momentum``, their momentum, and
            ``outer/correlation``, that of successive changes. Empty if no step is complete.

        Raises:
            RuntimeError: If the monitor is closed, or another one measures a part that is new in the model.
        """
        if self._is_closed:
            raise RuntimeError("this monitor is closed; call fsdp_zpp.monitor(model) again to go on")
        end, sent = mark(self._device), self._attach(counters_of(self._model))
        self._number += 1
        hops, self._timer.hops = self._timer.hops, []
        waits = None if self._waits is None else self._waits.take()
        difference = {key: sent[key] - self._sent[key] for key in sent}
        full_shard = _full_shard(self._model, self._forwards.take())
        outer = _outer_steps(self._model)
        self._steps.append(_Step(self._number, self._began, end, hops, waits, difference, full_shard, outer))
        self._sent, self._began = sent, end
        return self._latest()

    def close(self) -> None:
        """End the measurement: the model runs as it would without."""
        if self._is_closed:
            return
        self._is_closed = True
        self._forwards.remove()
        if self._waits is not None:
            self._waits.remove()
        for counter in counters_of(self._model):
            if counter.timer is self._timer:
                counter.timer = None

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        """Close it."""
        self.close()

    def _latest(self) -> dict[str, float]:
        while self._steps and self._steps[0].is_complete():
            self._last = self._steps.popleft().figures()
        return dict(self._last)

    def _attach(self, counters: Collection[Traffic]) -> Counter[tuple[Kind, Level]]:
        """Time all hops of ``counters``, some of which may be new, and return the bytes that they have counted."""
        if any(counter.timer not in (None, self._timer) for counter in counters):
            raise RuntimeError(
                f"another monitor measures this {type(self._model).__name__} or a part of it, and would miss what this "
                "one times; call close() of that one first, or use it in a `with` block"
            )
        total: Counter[tuple[Kind, Level]] = Counter()
        for counter in counters:
            counter.timer = self._timer
            total.update(counter.sent)
        return total


@dataclass(frozen=True)
class _Step:
    number: int
    start: Mark
    end: Mark
    hops: list[TimedHop]
    waits: list[tuple[Mark, Mark]] | None
    sent: dict[tuple[Kind, Level], int]
    full_shard: dict[Level, int] | None
    outer: dict[str, float] = field(default_factory=dict)

    def is_complete(self) -> bool:
        ends = (*(hop.end for hop in self.hops), *(end for _, end in self.waits or ()))
        return has_come(self.end) and all(map(has_come, ends))

    def figures(self) -> dict[str, float]:
        found: dict[str, float] = {"step": self.number, "ms": milliseconds_between(self.start, self.end)}
        for kind, name in _KINDS.items():
            for level in _LEVELS:
                found[f"{name}/{level}/bytes"] = self.sent.get((kind, level), 0)
        # Longer steps have not recorded all hops.
        if max(len(self.hops), len(self.waits or ())) < MOST_INTERVALS:
            found |= self._times()
        for level, nbytes in (self.full_shard or {}).items():
            found[f"{level}/full_shard_bytes"] = nbytes
            if nbytes:
                found[f"{level}/share"] = sum(self.sent.get((kind, level), 0) for kind in _KINDS) / nbytes
        return found | self.outer

    def _times(self) -> dict[str, float]:
        found = {}
        waits = None if self.waits is None else [self._since_start(*wait) for wait in self.waits]
        for kind, name in _KINDS.items():
            for level in _LEVELS:
                ran = [self._since_start(h.start, h.end) for h in self.hops if (h.kind, h.level) == (kind, level)]
                exposed = ran if waits is None else overlaps(ran, waits)
                found[f"{name}/{level}/ms"] = sum(end - start for start, end in ran)
                found[f"{name}/{level}/exposed_ms"] = sum(end - start for start, end in exposed)
        return found

    def _since_start(self, start: Mark, end: Mark) -> tuple[float, float]:
        return milliseconds_between(self.start, start), milliseconds_between(self.start, end)


def overlaps(
    ones: Iterable[tuple[float, float]], others: Iterable[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """Yield the parts of intervals that ``others``, which do not overlap each other, cover."""
    others = sorted(others)
    for start, end in ones:
        for at in range(bisect_right(others, start, key=itemgetter(1)), len(others)):
            begins, ends = others[at]
            if begins >= end:
                break
            yield max(start, begins), min(end, ends)


def _device(model: nn.Module) -> torch.device:
    """Return the device that ``model`` computes on; its parameters may be offloaded."""
    devices = (part.compute_device() for part in communicators(model))
    return next((device for device in devices if device is not None), torch.device("cpu"))


def _outer_steps(model: nn.Module) -> dict[str, float]:
    units = (part for part in communicators(model) if isinstance(part, StrategyUnit))
    trainings = dict.fromkeys(unit.local_training for unit in units if unit.local_training is not None)
    return named_figures(mean_of(figures for training in trainings for figures in training.outer.last.values()))


def _full_shard(model: nn.Module, forwards: Forwards) -> dict[Level, int] | None:
    """Return the bytes of FULL_SHARD; None if the model itself sends bytes that are not counted."""
    units: list[FullShardUnit] = []
    outermost: set[object] = set(_outermost_units(model))
    for part in communicators(model):
        of_part = part.full_shard_units(is_outermost=part in outermost)
        if of_part is None:
            return None
        units += of_part
    return full_shard_bytes(units, forwards)


def _outermost_units(module: nn.Module) -> Iterator[ParameterUnit]:
    """Yield the units that no other unit of ``module`` encloses."""
    if units_of(module):
        yield from units_of(module)
        return
    for child in module.children():
        yield from _outermost_units(child)
