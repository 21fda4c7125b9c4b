"""Checks that all ranks of a group were given the same arguments, before anything relies on it.

[Note: Agreement]
Ranks that were given different strategies, codecs or node sizes would make different process groups and send payloads
of different sizes: they would hang, or misread each other's bytes. So whatever sets up communication first compares
its arguments between ranks: by a hash, in one collective of 16 bytes, however many ranks there are. Only if hashes
differ do ranks exchange the arguments themselves, so that the error on every rank names who was given what.

The comparison is call by call: a rank that wraps a block while another wraps the root, or already runs its first
forward, is a difference, too. A rank that never makes such a call (because it uses torch's own strategies) can't be
noticed: the others hang.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from .accelerator import accelerator

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_MOST_DIFFERENCES = 4


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
    said = {name: _ADDRESS.sub("", value if isinstance(value, str) else repr(value)) for name, value in facts.items()}
    digest = hashlib.sha256(json.dumps([call, *said.items()]).encode()).digest()
    number = int.from_bytes(digest[:7], "big")
    where = device_for(group, device)
    bounds = torch.tensor([number, -number], dtype=torch.int64, device=where)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    highest, negated = bounds.tolist()
    if highest == -negated:
        return
    everyone: list[tuple[str, dict[str, str]]] = [("", {})] * dist.get_world_size(group)
    with nullcontext() if where.index is None else torch.accelerator.device_index(where.index):
        dist.all_gather_object(everyone, (call, said), group=group)
    raise ValueError(_difference(dict(zip(dist.get_process_group_ranks(group), everyone, strict=True))))


def parameter_facts(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """What must be the same on all ranks about each parameter, by name; its device need not be."""
    return {
        f"parameter {name}": f"{parameter.dtype} {list(parameter.shape)}{' frozen' * (not parameter.requires_grad)}"
        for name, parameter in parameters
    }


def described(shards: Iterable[Tensor]) -> str:
    """The dtypes and sizes of padded shards as text; equal shardings give equal texts on all ranks."""
    sizes: dict[torch.dtype, list[int]] = {}
    for shard in shards:
        sizes.setdefault(shard.dtype, []).append(shard.numel())
    return " and ".join(f"{dtype} shards of {numels}" for dtype, numels in sizes.items()) or "nothing"


def device_for(group: dist.ProcessGroup, device: torch.device | None = None) -> torch.device:
    """The device on which collectives of ``group`` take small tensors."""
    found = accelerator()
    if found is None or "gloo" in dist.get_backend(group):
        return torch.device("cpu")
    if device is not None and device.type == found.type:
        return device
    return getattr(group, "bound_device_id", None) or torch.device(found.type, torch.accelerator.current_device_index())


def _difference(everyone: Mapping[int, tuple[str, dict[str, str]]]) -> str:
    """The error's text, given each rank's call and arguments."""
    calls = {rank: call for rank, (call, _) in everyone.items()}
    if len(set(calls.values())) > 1:
        return (
            f"ranks do not make the same calls: {_who_said(calls)}; wrap the same modules in the same order on every "
            "rank"
        )
    names = list(dict.fromkeys(name for _, said in everyone.values() for name in said))
    differing = []
    for name in names:
        values = {rank: said.get(name, "missing") for rank, (_, said) in everyone.items()}
        if len(set(values.values())) > 1:
            differing.append(f"{name}: {_who_said(values)}")
    if not differing:
        differing = [f"order: {_who_said({rank: ', '.join(said) for rank, (_, said) in everyone.items()})}"]
    shown = differing[:_MOST_DIFFERENCES]
    if len(differing) > len(shown):
        shown.append(f"and {len(differing) - len(shown)} more")
    call = next(iter(calls.values()))
    return f"{call}: ranks were given different arguments: {'; '.join(shown)}; pass the same on every rank"


def _who_said(values: Mapping[int, str]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {named_ranks(ranks)}" for value, ranks in ranks_of.items())


def named_ranks(ranks: list[int]) -> str:
    """``rank 3``, or ``ranks 0-3, 6``."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])]
    listed = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' * (len(ranks) > 1)} {listed}"
