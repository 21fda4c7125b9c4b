"""Whether all ranks of a group were told the same, asked before anything that takes it for granted.

[Note: Agreement]
Ranks that were given different strategies, codecs or node sizes would make different process groups and send payloads
of different sizes: they would hang, or read each other's bytes as something else. So whatever sets up communication
says first what it was told, and all ranks compare: a hash, in one collective of 16 bytes, whatever the world. Only
where hashes differ do ranks exchange what they said, so that each of them can name who said what.

Ranks meet call by call: if one wraps a block where another wraps the root, or goes on to the first forward, that is a
difference, too. A rank that never makes such a call (it uses torch's own strategies, say) can't be heard of.
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
        group: The ranks; None, a group of one, and torch's fake one have nothing to compare.
        call: What is called, as errors name it.
        facts: What it was told, by name; compared by ``repr``.
        device: Where FSDP was told to compute, for collectives that don't take tensors of the CPU.

    Raises:
        ValueError: Naming the ranks and what differs.
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
    """What ranks have to agree on of parameters, by name; where they are is their own affair."""
    return {
        f"parameter {name}": f"{parameter.dtype} {list(parameter.shape)}{' frozen' * (not parameter.requires_grad)}"
        for name, parameter in parameters
    }


def described(shards: Iterable[Tensor]) -> str:
    """Dtypes and sizes of padded shards, which are the same on all ranks."""
    sizes: dict[torch.dtype, list[int]] = {}
    for shard in shards:
        sizes.setdefault(shard.dtype, []).append(shard.numel())
    return " and ".join(f"{dtype} shards of {numels}" for dtype, numels in sizes.items()) or "nothing"


def device_for(group: dist.ProcessGroup, device: torch.device | None = None) -> torch.device:
    """Where collectives of ``group`` take small tensors."""
    found = accelerator()
    if found is None or "gloo" in dist.get_backend(group):
        return torch.device("cpu")
    if device is not None and device.type == found.type:
        return device
    return getattr(group, "bound_device_id", None) or torch.device(found.type, torch.accelerator.current_device_index())


def _difference(everyone: Mapping[int, tuple[str, dict[str, str]]]) -> str:
    """Who said what, by rank."""
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
