"""A parameter that FullyShardedDataParallel has put into a flat one, as a tensor that can be had in full."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_zpp.collectives._torch_coalescing import AllGathers

from ._torch_flat_parts import FlatPart
from .full_tensors import FullTensor, Pending, gets, takes_part


class _Range(NamedTuple):
    """The values of a parameter that a rank of its group holds: where in the parameter, and where in the shard."""

    owner: int
    values: slice
    in_shard: slice


class PartOfFlat(FullTensor):
    """An original parameter of a flat one, of which each rank has a range of values, or none.

    For all ranks, each range is broadcast by the rank that has it. For one rank, each rank sends its range to that one.
    """

    def __init__(self, part: FlatPart) -> None:
        self._part = part
        self.shape, self.stored, self.requires_grad = part.full_shape, part.shard.dtype, part.requires_grad

    def peak_nbytes(self, dtype: torch.dtype | None) -> int:
        """Return the bytes that it takes while it is gathered: in full, and what is cast of it."""
        # Along other axes it is gathered out of place, and may be put into another order.
        others = 2 * self.nbytes(None) if self._part.has_other_axes else 0
        return self._part.shape.numel() * self.on_the_wire(dtype).itemsize + self.of_casts(0, dtype) + others

    @torch.no_grad()
    def start(self, dtype: torch.dtype | None, to: int | None, gathers: AllGathers) -> Pending:
        part, pending = self._part, Pending(self, dtype, to)
        if to is None or part.has_other_axes:  # along which ranks that get nothing take part, too
            self._broadcast(pending, part.group)
        elif part.group is None:
            if gets(to):
                self._broadcast(pending, None)
        elif takes_part(to, part.group):
            self._send(pending, part.group, to)
        return pending

    def _broadcast(self, pending: Pending, group: dist.ProcessGroup | None) -> None:
        """Start to gather it on all ranks of ``group``; None means that this rank has all of it."""
        part, works = self._part, []
        out = torch.empty(part.shape.numel(), dtype=self.on_the_wire(pending.dtype), device=part.device)
        for each in self._ranges():
            if group is None or each.owner == dist.get_rank(group):
                out[each.values].copy_(part.shard[each.in_shard])
            if group is not None:
                source = dist.get_global_rank(group, each.owner)
                works.append(dist.broadcast(out[each.values], source, group=group, async_op=True))
        pending.out, pending.works = out, works

    def _send(self, pending: Pending, group: dist.ProcessGroup, to: int) -> None:
        """Start to gather it on the global rank ``to`` alone, to which ranks send what they have."""
        part, wire, ranges = self._part, self.on_the_wire(pending.dtype), self._ranges()
        rank, receiver = dist.get_rank(group), dist.get_group_rank(group, to)
        own = next((part.shard[each.in_shard] for each in ranges if each.owner == rank), part.shard[:0])
        if rank == receiver:
            pending.out = torch.empty(part.shape.numel(), dtype=wire, device=part.device)
            for each in ranges:
                if each.owner == rank:
                    pending.out[each.values].copy_(own)  # casts without a copy beside it
            own = own[:0]
        own = own.to(part.device, wire)
        # What arrives lies before and after the receiver's own range: one collective for each, if there is any.
        before, after = ([r for r in ranges if r.owner < receiver], [r for r in ranges if r.owner > receiver])
        works, sent = [], []
        for owners in filter(None, (before, after)):
            chunk = own if any(each.owner == rank for each in owners) else own[:0]
            out, received = own.new_empty(0), [0] * dist.get_world_size(group)
            if pending.out is not None:
                out = pending.out[owners[0].values.start : owners[-1].values.stop]
                for each in owners:
                    received[each.owner] = each.values.stop - each.values.start
            numels = [chunk.numel() * (other == receiver) for other in range(len(received))]
            works.append(dist.all_to_all_single(out, chunk, received, numels, group=group, async_op=True))
            sent += [chunk, out]
        pending.works, pending.sent = works, sent

    def _ranges(self) -> list[_Range]:
        """Return what ranks hold of it, in the order of ranks and of its values."""
        start, length = self._part.start, self._part.shard.numel()
        stop = start + self._part.shape.numel()
        ranges = []
        for owner in range(start // length, -(-stop // length)) if start < stop else ():
            first, last = max(start, owner * length), min(stop, (owner + 1) * length)
            in_shard = slice(first - owner * length, last - owner * length)
            ranges.append(_Range(owner, slice(first - start, last - start), in_shard))
        return ranges

    def finish(self, out: Tensor | None, dtype: torch.dtype | None, to: int | None) -> Tensor | None:
        if out is None:
            return None
        full = self._part.with_other_axes(out.view(self._part.shape))
        return full.to(self.as_delivered(dtype)) if gets(to) else None
