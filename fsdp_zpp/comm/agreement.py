"""Agreement of ranks: on arguments, and on replicas of weights."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .mesh import ProcessMesh, collective_device, for_collectives, named_ranks

# ---- fingerprint

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes, by the number of bytes of a value."""


def fingerprint(shard: Tensor) -> str:
    """Return a hash of the values, the same for -0 and 0. Waits for the device."""
    # To create optimizer states, torch's state dict functions run a step, which may turn -0 into 0.
    values = (shard.detach() + 0.0).cpu().reshape(-1).view(torch.uint8)
    return f"{shard.dtype} {hashlib.blake2b(values.numpy().data, digest_size=16).hexdigest()}"


def checksums(shards: Mapping[str, Tensor]) -> dict[str, tuple[str, int]]:
    """Return the dtype of each shard and a sum over the bits of its values, the same for -0 and 0."""
    # Any device computes the same sum, so each shard is summed where it is, at most a few million values at a time.
    sums = [_checksum(shard) for shard in shards.values()]
    devices = {each.device for each in sums}
    totals = torch.stack(sums if len(devices) == 1 else [each.cpu() for each in sums]).tolist() if sums else []
    return {name: (str(shard.dtype), each) for (name, shard), each in zip(shards.items(), totals, strict=True)}


def _checksum(shard: Tensor) -> Tensor:
    total, start = torch.zeros((), dtype=torch.int64, device=shard.device), 0
    parts = [part.reshape(-1) for part in plain_parts(shard.detach())]
    # A chunk fits into a CPU's cache, or keeps a GPU busy.
    size = min(1 << 16 if shard.device.type == "cpu" else 1 << 22, max(map(len, parts), default=1)) or 1
    # The value at i has the factor 2 * i + 1. Odd factors are invertible modulo 2**64, so no change of a bit is lost.
    factors = 2 * torch.arange(size, device=shard.device) + 1
    for part in parts:
        for chunk in part.split(size):
            values = chunk + 0.0 if chunk.is_floating_point() and chunk.itemsize > 1 else chunk
            bits = values.view(BITS[chunk.itemsize])
            # Integer sums do not depend on the order in which a device adds.
            total += (bits * factors[: len(bits)]).sum() + 2 * start * bits.sum(dtype=torch.int64)
            start += len(bits)
    return total


def plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that a tensor subclass wraps; a plain tensor is its only part."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from plain_parts(getattr(tensor, name))


# ---- ordered sum


def ordered_sum(values: Tensor, groups: Iterable[dist.ProcessGroup]) -> list[float]:
    """Return ``values`` summed over the ranks of each group in turn, in fp64. Collective.

    All ranks of a group add the same numbers in the same order and get the same bits, and so do groups that hold the
    same numbers. So a sum over all axes of a mesh is the same on the whole mesh. Torch's fake groups are skipped.
    """
    for group in groups:
        if dist.get_backend(group) == "fake":
            continue
        # Each rank has a row of its own. So the all-reduce adds only zeros to a number, which is exact in any order.
        of_all = torch.zeros(group.size(), len(values), dtype=torch.float64, device=collective_device(group))
        of_all[dist.get_rank(group)] = values
        dist.all_reduce(of_all, group=group)
        values = of_all.cpu().sum(0)
    sums: list[float] = values.tolist()
    return sums


# ---- agreement
#
# [Note: Agreement]
# Ranks that were given different strategies, codecs or node sizes would make different process groups and send payloads
# of different sizes: they would hang, or misread each other's bytes. So each call that sets up communication first
# compares its arguments between ranks: it all-reduces a hash, in 16 bytes however many ranks there are. Only if hashes
# differ do ranks exchange the arguments themselves, so that the error on every rank lists them by rank.
#
# All comparisons send a message of the same form, even those that also ask if a function has failed or if a condition
# holds on any rank. So if ranks of a group make different calls, the comparison does not hang, and reports them.
# Examples: one rank wraps a block while another wraps the root or runs its first forward; one node exchanges weights
# before a forward, another at the end of its loop. Some mistakes escape comparison. If a rank never compares (because
# it uses torch's own strategies), or compares with other ranks, the rest hang. A rank that is given neither
# a mesh nor a process group raises alone: it does not know which ranks to compare with.

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_MOST_DIFFERENCES = 4
PLACE = "place"
"""Key of the fact that says where in the program a call is made, to tell apart calls of the same name."""
T = TypeVar("T")
U = TypeVar("U")


class _Report(NamedTuple):
    """The call that a rank is about to make, its arguments as text, and the type and message of its error, if any."""

    call: str
    facts: Mapping[str, str]
    failure: tuple[str, str] | None = None


def check_agreement(
    group: dist.ProcessGroup | None, call: str, facts: Mapping[str, object], device: torch.device | None = None
) -> None:
    """Raise on every rank of ``group`` unless all of them make the same call. Collective. See [Note: Agreement].

    Nothing is compared without a group, on one rank, or with torch's fake backend.

    Args:
        facts: The arguments of the call by name, compared by ``repr``.
        device: The device that FSDP was given, for backends that don't take CPU tensors.

    Raises:
        ValueError: If ranks differ; the message names the ranks and their arguments.
    """
    on_any_rank(False, group, call, facts, device)


def on_any_rank(
    here: bool,
    group: dist.ProcessGroup | None,
    call: str,
    facts: Mapping[str, object] | None = None,
    device: torch.device | None = None,
) -> bool:
    """Return whether ``here`` is true on any rank; other arguments as in :func:`check_agreement`. Collective."""
    if group is None or _is_alone(group):
        return here
    anywhere, reports = _compare(group, _Report(call, _as_text(facts or {})), here=here, device=device)
    if reports:
        raise _error(reports)
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
    """Return whether ``here`` is true on any rank, and all ranks' reports if reports differ. Collective."""
    # 56 bits of the hash and the flag fit an int64, as does its negative. The MAX of both gives highest and lowest.
    digest = _hash(json.dumps([report.call, *report.facts.items(), report.failure]))
    number = int.from_bytes(digest[:7], "big") << 1 | here
    bounds = torch.tensor([number, -number], dtype=torch.int64, device=collective_device(group, device))
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    highest, negated = bounds.tolist()
    if highest >> 1 == -negated >> 1:
        return bool(highest & 1), {}
    return True, dict(zip(dist.get_process_group_ranks(group), from_each_rank(report, group, device), strict=True))


def parameter_facts(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return, by name, the properties of each parameter that must be equal on all ranks; devices may differ."""
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


def _error(reports: Mapping[int, _Report], difference: str = "") -> Exception:
    """Return the error to raise on a rank where the call itself has not failed."""
    if len({report.call for report in reports.values()}) > 1:
        calls = {rank: _named(report) for rank, report in reports.items()}
        return ValueError(
            f"ranks do not make the same calls: {_ranks_by_value(calls)}; make the same calls in the same order "
            "on every rank"
        )
    for rank, report in reports.items():
        if report.failure is not None:
            kind, text = report.failure
            return _KINDS.get(kind, RuntimeError)(f"on {named_ranks([rank])}: {text}")
    if not difference:
        return ValueError(_difference(reports))
    first = next(iter(reports))
    differing = named_ranks([rank for rank, report in reports.items() if report != reports[first]])
    return ValueError(f"{differing} {difference} {named_ranks([first])}")


def _named(report: _Report) -> str:
    return f"{report.call} ({report.facts[PLACE]})" if PLACE in report.facts else report.call


def _difference(reports: Mapping[int, _Report]) -> str:
    by_rank = {rank: report.facts for rank, report in reports.items()}
    names = list(dict.fromkeys(name for facts in by_rank.values() for name in facts))
    differing = []
    for name in names:
        values = {rank: facts.get(name, "missing") for rank, facts in by_rank.items()}
        if len(set(values.values())) > 1:
            differing.append(f"{name}: {_ranks_by_value(values)}")
    if not differing:
        orders = {rank: ", ".join(facts) for rank, facts in by_rank.items()}
        differing = [f"order: {_ranks_by_value(orders)}"]
    shown = differing[:_MOST_DIFFERENCES]
    if len(differing) > len(shown):
        shown.append(f"and {len(differing) - len(shown)} more")
    call, differ = next(iter(reports.values())).call, "; ".join(shown)
    if PLACE in names:
        return f"{call}: ranks were given different arguments: {differ}; make the same steps and calls on every rank"
    return f"{call}: ranks were given different arguments: {differ}; pass the same on every rank"


def _ranks_by_value(values: Mapping[int, str]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {named_ranks(ranks)}" for value, ranks in ranks_of.items())


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
        summary: Returns facts by name, or a text of any length; they must be the same on all ranks.
        difference: The verb phrase of the error if texts differ, such as "read different files from".

    Raises:
        ValueError: If ranks differ in ``summary``.
        Exception: The exception of ``act`` on this rank. If ``act`` succeeds here, an error with the message of the
            first rank that fails, and of the same type if that is ValueError or TypeError, else a RuntimeError.
    """
    if group is None or _is_alone(group):
        return act()
    failure: Exception | None = None
    report = _Report(call, {})
    try:
        result = act()
        facts = summary(result)
        # A text may be long, so only its hash is sent, and the error does not show it.
        report = _Report(call, _as_text(facts if isinstance(facts, Mapping) else {difference: _hash(facts).hex()}))
    except Exception as error:  # any error: without this rank, the others would hang in the collective below
        failure, report = error, _Report(call, {}, (type(error).__name__, str(error)))
    _, reports = _compare(group, report)
    if failure is not None:
        raise failure
    if not reports:
        return result
    raise _error(reports, difference)


def from_first_rank(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Return the first rank's ``value``, any object that can be pickled, on all ranks of ``group``. Collective."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
    return values[0]


def from_each_rank(value: T, group: dist.ProcessGroup, device: torch.device | None = None) -> list[T]:
    """Return each rank's ``value``, any object that can be pickled, in the order of ranks. Collective."""
    where = collective_device(group, device)
    values = [value] * dist.get_world_size(group)
    with nullcontext() if where.index is None else torch.accelerator.device_index(where.index):
        dist.all_gather_object(values, value, group=group)
    return values


def run_on_first_rank(act: Callable[[], None]) -> None:
    """Run ``act`` on rank 0 while other ranks wait. If ``act`` raises an OSError, all ranks raise it. Collective."""
    failure: OSError | None = None
    if dist.get_rank() == 0:
        try:
            act()
        except OSError as error:
            failure = error
    if (failure := from_first_rank(failure)) is not None:
        raise failure


def all_reduce_flags(
    by_unit: Sequence[tuple[U, ProcessMesh, Sequence[bool]]],
) -> list[tuple[U, Callable[[], list[bool]]]]:
    """Combine the flags of each unit over ranks, by OR; all ranks must pass the same units. Collective, once per mesh.

    Returns:
        Each unit, with a function that waits for the device and returns the unit's combined flags. A rank that has set
        all flags of a unit knows the result and need not call the function.
    """
    answers: list[tuple[U, Callable[[], list[bool]]]] = []
    for mesh in dict.fromkeys(mesh for _, mesh, _ in by_unit):
        members = [(unit, flags) for unit, its_mesh, flags in by_unit if its_mesh == mesh]
        of_all = functools.cache(_on_any([flag for _, flags in members for flag in flags], mesh))
        start = 0
        for unit, flags in members:
            answers.append((unit, functools.partial(_part_of, of_all, start, len(flags))))
            start += len(flags)
    return answers


def _on_any(own: Sequence[bool], mesh: ProcessMesh) -> Callable[[], list[bool]]:
    if mesh.group is None or mesh.topology.world == 1:
        return lambda: list(own)
    where = collective_device(mesh.group)
    if all(own):  # made on the device: to copy flags there would make the host wait
        flags = torch.ones(len(own), dtype=torch.uint8, device=where)
    else:
        flags = torch.tensor(own, dtype=torch.uint8, device=where)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=mesh.group)
    return lambda: [bool(flag) for flag in flags.tolist()]


def _part_of(of_all: Callable[[], list[bool]], start: int, length: int) -> list[bool]:
    return of_all()[start : start + length]


# ---- replicas
#
# Averaged gradients keep replicas equal only if they start equal. Ranks that were seeded differently would each train a
# model of their own, and nothing but the loss would show it.


def check_replicas(held: Iterable[Tensor], mesh: ProcessMesh, scope: str, model: str) -> None:
    """Raise a ValueError on every rank of ``mesh`` if its replicas hold different values. Collective over ``mesh``.

    Under ``scope`` ``I``, nodes are replicas of each other; under ``N``, ranks are; under ``G``, there are no replicas.
    """
    if not replicas_are_equal(held, mesh, scope):
        who = "nodes" if scope == "I" else "ranks"
        raise ValueError(
            f"{model}: under optimizer scope {scope} the {who} are replicas of each other, but they hold different "
            "weights: before the first forward, seed all ranks alike, load the same checkpoint on all of them, or "
            "broadcast rank 0's weights (sync_module_states=True, broadcast_from_rank0)"
        )


def replicas_are_equal(held: Iterable[Tensor], mesh: ProcessMesh, scope: str) -> bool:
    """Return on every rank whether all replicas hold the same values; see :func:`check_replicas`. Collective."""
    if scope == "G":
        return True
    # Sums of bits, not of values: integer sums do not depend on the order in which a device adds.
    plain = [part for tensor in held for part in plain_parts(tensor.detach())]
    sums = [tensor.view(BITS[tensor.itemsize]).sum(dtype=torch.int64) for tensor in plain]
    if not sums:
        return True
    total = torch.stack(sums).sum()
    bounds = torch.stack([total, -total])
    group = mesh.inter if mesh.inter is not None else mesh.intra
    if group is not None:
        bounds = for_collectives(bounds, group)  # parameters may be offloaded
    if mesh.inter is not None:
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=mesh.inter)
    if scope == "I":  # each rank compares its own part; the next all-reduce joins the answers
        bounds = torch.stack([(bounds[0] != -bounds[1]).long(), bounds.new_zeros(())])
    if mesh.intra is not None:
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=mesh.intra)
    return bool(bounds[0].item() == -bounds[1].item())
