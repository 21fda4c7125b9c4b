"""Agreement of ranks: their arguments, that none has failed, which parameters any of them has used.

[Note: Agreement]
Ranks that were given different strategies, codecs or node sizes would make different process groups and send payloads
of different sizes: they would hang, or misread each other's bytes. So whatever sets up communication first compares
its arguments between ranks: by a hash, in one collective of 16 bytes, however many ranks there are. Only if hashes
differ do ranks exchange the arguments themselves, so that the error on every rank names who was given what.

All comparisons send this one kind of message, whatever else they ask, such as whether an act has failed on any rank, or
whether something is true there. So different calls over the same ranks meet in one comparison, and are told apart: a
rank that wraps a block while another wraps the root, or already runs its first forward; a node that exchanges weights
before a forward while another does so at the end of its loop. A rank that never makes such a call (because it uses
torch's own strategies) can't be noticed: the others hang. Nor can ranks compare over which ranks to compare: a rank
that is given something else than a mesh or a process group raises alone, rather than wait for ranks that may have
nothing to do with the model.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .devices import collective_device
from .mesh import ProcessMesh
from .rank_names import named_ranks

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_MOST_DIFFERENCES = 4
PLACE = "place"
"""The fact that tells calls of one name apart."""
T = TypeVar("T")
U = TypeVar("U")


class _Report(NamedTuple):
    """A rank's report of the call that it is about to make.

    Attributes:
        call: Its call, as errors name it.
        facts: The call's arguments by name, as text.
        failure: The type and the message of the error that it has met before the call, if any.
    """

    call: str
    facts: Mapping[str, str]
    failure: tuple[str, str] | None = None


def check_agreement(
    group: dist.ProcessGroup | None, call: str, facts: Mapping[str, object], device: torch.device | None = None
) -> None:
    """Raise on every rank of ``group`` unless all of them make the same call. Collective. See [Note: Agreement].

    Args:
        group: The ranks. For None, a group of one rank and torch's fake backend, nothing is compared.
        call: The call, as errors name it.
        facts: Its arguments by name, compared by ``repr``.
        device: The device that FSDP was given, for backends that don't take CPU tensors.

    Raises:
        ValueError: If ranks differ; it names the ranks and what differs.
    """
    on_any_rank(False, group, call, facts, device)


def on_any_rank(
    here: bool,
    group: dist.ProcessGroup | None,
    call: str,
    facts: Mapping[str, object] | None = None,
    device: torch.device | None = None,
) -> bool:
    """Return whether ``here`` is true on any rank of ``group``. Collective. See [Note: Agreement].

    Args:
        here: Whether it is true on this rank.
        group: The ranks, as in :func:`check_agreement`.
        call: The call that asks.
        facts: Its arguments.
        device: The device that FSDP was given.

    Raises:
        ValueError: If ranks do not make the same call, as :func:`check_agreement` does.
    """
    if group is None or _is_alone(group):
        return here
    anywhere, reports = _compare(group, _Report(call, _as_text(facts or {})), here=here, device=device)
    if reports:
        raise _error(reports, group)
    return anywhere


def _is_alone(group: dist.ProcessGroup) -> bool:
    return dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake"


def _as_text(facts: Mapping[str, object]) -> dict[str, str]:
    return {name: _ADDRESS.sub("", value if isinstance(value, str) else repr(value)) for name, value in facts.items()}


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _compare(
    group: dist.ProcessGroup, report: _Report, *, here: bool = False, device: torch.device | None = None
) -> tuple[bool, dict[int, _Report]]:
    """Compare what ranks are about to do, by the one kind of message that all comparisons send. Collective.

    Returns:
        True if ``here`` is true on any rank, and each rank's report if they differ.
    """
    # 56 bits and a flag: the number and its negative fit an int64, and the MAX of both tells the largest and the least.
    digest = _hash(json.dumps([report.call, *report.facts.items(), report.failure]))
    number = int.from_bytes(digest[:7], "big") << 1 | here
    bounds = torch.tensor([number, -number], dtype=torch.int64, device=collective_device(group, device))
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    highest, negated = bounds.tolist()
    if highest >> 1 == -negated >> 1:
        return bool(highest & 1), {}
    return True, dict(zip(dist.get_process_group_ranks(group), from_each_rank(report, group, device), strict=True))


def parameter_facts(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return what must be the same on all ranks about each parameter, by name; its device need not be."""
    return {
        f"parameter {name}": f"{parameter.dtype} {list(parameter.shape)}{' frozen' * (not parameter.requires_grad)}"
        for name, parameter in parameters
    }


def shard_signature(shards: Iterable[Tensor]) -> str:
    """Return the dtypes and sizes of padded shards as text; equal shardings give equal texts on all ranks."""
    sizes: dict[torch.dtype, list[int]] = {}
    for shard in shards:
        sizes.setdefault(shard.dtype, []).append(shard.numel())
    return " and ".join(f"{dtype} shards of {numels}" for dtype, numels in sizes.items()) or "nothing"


def _error(reports: Mapping[int, _Report], group: dist.ProcessGroup, difference: str = "") -> Exception:
    """Return the error of a rank that has not failed itself, given each rank's report; see :func:`agree`."""
    if len({report.call for report in reports.values()}) > 1:
        calls = {rank: _named(report) for rank, report in reports.items()}
        return ValueError(
            f"ranks do not make the same calls: {_ranks_by_value(calls, group)}; make the same calls in the same order "
            "on every rank"
        )
    for rank, report in reports.items():
        if report.failure is not None:
            kind, text = report.failure
            return _KINDS.get(kind, RuntimeError)(f"on {named_ranks([rank], group)}: {text}")
    if not difference:
        return ValueError(_difference(reports, group))
    first = next(iter(reports))
    differing = named_ranks([rank for rank, report in reports.items() if report != reports[first]], group)
    return ValueError(f"{differing} {difference} {named_ranks([first], group)}")


def _named(report: _Report) -> str:
    return f"{report.call} ({report.facts[PLACE]})" if PLACE in report.facts else report.call


def _difference(reports: Mapping[int, _Report], group: dist.ProcessGroup) -> str:
    """Return how the arguments of one call differ."""
    by_rank = {rank: report.facts for rank, report in reports.items()}
    names = list(dict.fromkeys(name for facts in by_rank.values() for name in facts))
    differing = []
    for name in names:
        values = {rank: facts.get(name, "missing") for rank, facts in by_rank.items()}
        if len(set(values.values())) > 1:
            differing.append(f"{name}: {_ranks_by_value(values, group)}")
    if not differing:
        orders = {rank: ", ".join(facts) for rank, facts in by_rank.items()}
        differing = [f"order: {_ranks_by_value(orders, group)}"]
    shown = differing[:_MOST_DIFFERENCES]
    if len(differing) > len(shown):
        shown.append(f"and {len(differing) - len(shown)} more")
    call, differ = next(iter(reports.values())).call, "; ".join(shown)
    if PLACE in names:
        return f"{call}: ranks were given different arguments: {differ}; make the same steps and calls on every rank"
    return f"{call}: ranks were given different arguments: {differ}; pass the same on every rank"


def _ranks_by_value(values: Mapping[int, str], group: dist.ProcessGroup) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {named_ranks(ranks, group)}" for value, ranks in ranks_of.items())


_KINDS: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}


def agree(
    group: dist.ProcessGroup | None,
    act: Callable[[], T],
    summary: Callable[[T], str | Mapping[str, object]] = lambda result: {},
    difference: str = "",
    *,
    call: str = "another call",
) -> T:
    """Run ``act`` on every rank of ``group``, and raise on all of them if it fails on any. Collective.

    Args:
        group: The ranks; None means this process alone.
        act: The function that may fail. It must not communicate, nor change anything that an error would have to undo.
        summary: Returns what must be the same on all ranks, given the result of ``act``: arguments by name, as in
            :func:`check_agreement`, or a text of any length. Default: nothing must.
        difference: How ranks differ if this text does, for the error, such as "read different files from".
        call: The call, as errors name it.

    Returns:
        The result of ``act`` on this rank.

    Raises:
        ValueError: If ranks differ in ``summary``.
        Exception: The exception of ``act`` on this rank. Where ``act`` succeeds, an error with the message of the first
            rank that fails: a ValueError or TypeError if it is one there, otherwise a RuntimeError.
    """
    if group is None or _is_alone(group):
        return act()
    failure: Exception | None = None
    report = _Report(call, {})
    try:
        result = act()
        facts = summary(result)
        # A long text is neither sent nor shown.
        report = _Report(call, _as_text(facts if isinstance(facts, Mapping) else {difference: _hash(facts).hex()}))
    except Exception as error:  # of any kind: the other ranks would hang in the collective below
        failure, report = error, _Report(call, {}, (type(error).__name__, str(error)))
    _, reports = _compare(group, report)
    if failure is not None:
        raise failure
    if not reports:
        return result
    raise _error(reports, group, difference)


def from_first_rank(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Return the ``value`` of the first rank of ``group`` on all of its ranks. Collective.

    Args:
        value: What this rank has; any object that can be pickled. Only the first rank's matters.
        group: The ranks; None means all. Where torch.distributed is not initialized, that is this process alone.
    """
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
    return values[0]


def from_each_rank(value: T, group: dist.ProcessGroup, device: torch.device | None = None) -> list[T]:
    """Return the ``value`` of each rank of ``group``, in the order of ranks. Collective.

    Args:
        value: What this rank has; any object that can be pickled.
        group: The ranks.
        device: As of :func:`check_agreement`.
    """
    where = collective_device(group, device)
    values = [value] * dist.get_world_size(group)
    with nullcontext() if where.index is None else torch.accelerator.device_index(where.index):
        dist.all_gather_object(values, value, group=group)
    return values


def run_on_first_rank(act: Callable[[], None]) -> None:
    """Run ``act`` on rank 0; the others wait until it is done. Collective.

    Raises:
        OSError: On every rank, if ``act`` raises it.
    """
    failure: OSError | None = None
    if dist.get_rank() == 0:
        try:
            act()
        except OSError as error:
            failure = error
    if (failure := from_first_rank(failure)) is not None:
        raise failure


def agree_on_use(
    usage: Sequence[tuple[U, ProcessMesh, Sequence[bool]]],
) -> list[tuple[U, Callable[[], list[bool]]]]:
    """Exchange which parameters each rank has used. Collective, once a mesh.

    Args:
        usage: Units, their ranks, and for each of their parameters whether this rank has used it; the same units on
            all ranks.

    Returns:
        Each unit, with a function that waits for the device and returns, for each of its parameters, whether any rank
        has used it. A caller that has used all of them knows the answer and need not call it.
    """
    answers: list[tuple[U, Callable[[], list[bool]]]] = []
    for mesh in dict.fromkeys(mesh for _, mesh, _ in usage):
        members = [(unit, used) for unit, its_mesh, used in usage if its_mesh == mesh]
        of_all = functools.cache(_used_by_any([flag for _, used in members for flag in used], mesh))
        start = 0
        for unit, used in members:
            answers.append((unit, functools.partial(_part_of, of_all, start, len(used))))
            start += len(used)
    return answers


def _used_by_any(used: Sequence[bool], mesh: ProcessMesh) -> Callable[[], list[bool]]:
    if mesh.group is None or mesh.topology.world == 1:
        return lambda: list(used)
    where = collective_device(mesh.group)
    if all(used):  # made on the device, since the host would wait for a copy
        flags = torch.ones(len(used), dtype=torch.uint8, device=where)
    else:
        flags = torch.tensor(used, dtype=torch.uint8, device=where)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=mesh.group)
    return lambda: [bool(flag) for flag in flags.tolist()]


def _part_of(of_all: Callable[[], list[bool]], start: int, length: int) -> list[bool]:
    return of_all()[start : start + length]
