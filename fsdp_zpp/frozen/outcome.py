"""Makes an error on one rank an error on all: each rank reads files itself, and they may be broken for one rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from ..agreement import device_for, named_ranks

_T = TypeVar("_T")
_KINDS: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}


def agree(group: dist.ProcessGroup | None, act: Callable[[], _T], summary: Callable[[_T], str]) -> _T:
    """Run ``act`` on every rank of ``group``, and raise on all of them if it fails on any. Collective.

    Args:
        group: The ranks; None means this process alone.
        act: The function that may fail. It must not communicate, nor change anything that an error would have to undo.
        summary: Returns what must be the same on all ranks, given the result of ``act``.

    Returns:
        The result of ``act`` on this rank.

    Raises:
        ValueError: If ranks differ in ``summary``.
        Exception: The exception of ``act`` on this rank. Where ``act`` succeeds, the message of the first rank that
            fails, as a ValueError or TypeError if it is one there, otherwise as a RuntimeError.
    """
    if group is None or dist.get_world_size(group) == 1:
        return act()
    failure: Exception | None = None
    digest, said = 0, ("", "")
    try:
        result = act()
        digest = int.from_bytes(hashlib.sha256(summary(result).encode()).digest()[:7], "big")
    except Exception as error:  # of any kind: the other ranks would hang in the collective below
        failure, said = error, (type(error).__name__, str(error))
    bounds = torch.tensor([failure is not None, digest, -digest], dtype=torch.int64, device=device_for(group))
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    any_failed, highest, negated = bounds.tolist()
    if not any_failed and highest == -negated:
        return result
    everyone: list[tuple[str, str, int]] = [("", "", 0)] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (*said, digest), group=group)
    if failure is not None:
        raise failure
    ranks = dist.get_process_group_ranks(group)
    for rank, (kind, message, _) in zip(ranks, everyone, strict=True):
        if kind:
            raise _KINDS.get(kind, RuntimeError)(f"on rank {rank}: {message}")
    others = [rank for rank, (_, _, digest) in zip(ranks, everyone, strict=True) if digest != everyone[0][2]]
    raise ValueError(f"{named_ranks(others)} read different files from rank {ranks[0]}; give all ranks the same files")
