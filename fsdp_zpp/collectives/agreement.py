"""Agreement of ranks: their arguments, that none has failed, which parameters any of them has used.

[Note: Agreement]
Ranks that were given different strategies, codecs or node sizes would make different process groups and send payloads
of different sizes: they would hang, or misread each other's bytes. So whatever sets up communication first compares
its arguments between ranks: by a hash, in one collective of 16 bytes, however many ranks there are. Only if hashes
differ do ranks exchange the arguments themselves, so that the error on every rank names who was given what.

The comparison is call by call: a rank that wraps a block while another wraps the root, or already runs its first
forward, is a difference, too. A rank that never makes such a call (because it uses torch's own strategies) can't be
noticed: the others hang. Nor can ranks compare over which ranks to compare: a rank that is given something else than a
mesh or a process group raises alone, rather than wait for ranks that may have nothing to do with the model.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .devices import collective_device
from .mesh import ProcessMesh
from .rank_names import named_ranks

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_MOST_DIFFERENCES = 4
T = TypeVar("T")
U = TypeVar("U")


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
    if group is None or dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake":
        return
    values = {name: _ADDRESS.sub("", value if isinstance(value, str) else repr(value)) for name, value in facts.items()}
    digest = hashlib.sha256(json.dumps([call, *values.items()]).encode()).digest()
    # 56 bits: the number and its negative fit an int64, and the MAX of both tells whether all ranks have the same.
    number = int.from_bytes(digest[:7], "big")
    where = collective_device(group, device)
    bounds = torch.tensor([number, -number], dtype=torch.int64, device=where)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    highest, negated = bounds.tolist()
    if highest == -negated:
        return
    by_rank = from_each_rank((call, values), group, device)
    raise ValueError(_difference(dict(zip(dist.get_process_group_ranks(group), by_rank, strict=True)), group))


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


def _difference(by_rank: Mapping[int, tuple[str, dict[str, str]]], group: dist.ProcessGroup) -> str:
    """Return the error's text, given each rank's call and arguments."""
    calls = {rank: call for rank, (call, _) in by_rank.items()}
    if len(set(calls.values())) > 1:
        return (
            f"ranks do not make the same calls: {_ranks_by_value(calls, group)}; wrap the same modules in the same "
            "order on every rank"
        )
    names = list(dict.fromkeys(name for _, facts in by_rank.values() for name in facts))
    differing = []
    for name in names:
        values = {rank: facts.get(name, "missing") for rank, (_, facts) in by_rank.items()}
        if len(set(values.values())) > 1:
            differing.append(f"{name}: {_ranks_by_value(values, group)}")
    if not differing:
        orders = {rank: ", ".join(facts) for rank, (_, facts) in by_rank.items()}
        differing = [f"order: {_ranks_by_value(orders, group)}"]
    shown = differing[:_MOST_DIFFERENCES]
    if len(differing) > len(shown):
        shown.append(f"and {len(differing) - len(shown)} more")
    call = next(iter(calls.values()))
    return f"{call}: ranks were given different arguments: {'; '.join(shown)}; pass the same on every rank"


def _ranks_by_value(values: Mapping[int, str], group: dist.ProcessGroup) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {named_ranks(ranks, group)}" for value, ranks in ranks_of.items())


_KINDS: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}


def agree(
    group: dist.ProcessGroup | None,
    act: Callable[[], T],
    summary: Callable[[T], str] = lambda result: "",
    difference: str = "",
) -> T:
    """Run ``act`` on every rank of ``group``, and raise on all of them if it fails on any. Collective.

    Args:
        group: The ranks; None means this process alone.
        act: The function that may fail. It must not communicate, nor change anything that an error would have to undo.
        summary: Returns what must be the same on all ranks, given the result of ``act``. Default: nothing must.
        difference: What ranks did that differ, for the error, such as "read different files from".

    Returns:
        The result of ``act`` on this rank.

    Raises:
        ValueError: If ranks differ in ``summary``.
        Exception: The exception of ``act`` on this rank. Where ``act`` succeeds, an error with the message of the first
            rank that fails: a ValueError or TypeError if it is one there, otherwise a RuntimeError.
    """
    if group is None or dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake":
        return act()
    failure: Exception | None = None
    digest, message = 0, ("", "")
    try:
        result = act()
        digest = int.from_bytes(hashlib.sha256(summary(result).encode()).digest()[:7], "big")
    except Exception as error:  # of any kind: the other ranks would hang in the collective below
        failure, message = error, (type(error).__name__, str(error))
    bounds = torch.tensor([failure is not None, digest, -digest], dtype=torch.int64, device=collective_device(group))
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    any_failed, highest, negated = bounds.tolist()
    if not any_failed and highest == -negated:
        return result
    by_rank = from_each_rank((*message, digest), group)
    if failure is not None:
        raise failure
    ranks = dist.get_process_group_ranks(group)
    for rank, (kind, text, _) in zip(ranks, by_rank, strict=True):
        if kind:
            raise _KINDS.get(kind, RuntimeError)(f"on {named_ranks([rank], group)}: {text}")
    others = [rank for rank, (_, _, digest) in zip(ranks, by_rank, strict=True) if digest != by_rank[0][2]]
    raise ValueError(f"{named_ranks(others, group)} {difference} {named_ranks(ranks[:1], group)}")


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


def on_any_rank(here: bool, group: dist.ProcessGroup | None) -> bool:
    """Return whether ``here`` is true on any rank of ``group``; None means this process alone. Collective."""
    if group is None or dist.get_world_size(group) == 1:
        return here
    flag = torch.tensor(here, dtype=torch.uint8, device=collective_device(group))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


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
    if all(used):  # made where it is needed, since for a copy the host would wait
        flags = torch.ones(len(used), dtype=torch.uint8, device=where)
    else:
        flags = torch.tensor(used, dtype=torch.uint8, device=where)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=mesh.group)
    return lambda: [bool(flag) for flag in flags.tolist()]


def _part_of(of_all: Callable[[], list[bool]], start: int, length: int) -> list[bool]:
    return of_all()[start : start + length]
