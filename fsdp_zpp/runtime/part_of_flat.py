"""A parameter that FullyShardedDataParallel has put into a flat one, as a tensor that can be had in full."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ._torch_flat_parts import FlatPart
from .full_tensors import FullTensor, Pending, gets, takes_part


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
    def start(self, dtype: torch.dtype | None, to: int | None) -> Pending:
        part, pending = self._part, Pending(self, dtype, to)
        if to is None or part.has_other_axes:  # whose ranks need it, too, to gather along these
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
        for owner, values, within in self._ranges():
            if group is None or owner == dist.get_rank(group):
                out[values].copy_(part.shard[within])
            if group is not None:
                source = dist.get_global_rank(group, owner)
                works.append(dist.broadcast(out[values], source, group=group, async_op=True))
        pending.out, pending.works = out, works

    def _send(self, pending: Pending, group: dist.ProcessGroup, to: int) -> None:
        """Start to gather it on the global rank ``to`` alone; ranks send it what they have, and nothing to others."""
        part, wire = self._part, self.on_the_wire(pending.dtype)
        rank, receiver, ranges = dist.get_rank(group), dist.get_group_rank(group, to), self._ranges()
        [own] = [part.shard[within] for owner, _, within in ranges if owner == rank] or [part.shard[:0]]
        if rank == receiver:
            pending.out = torch.empty(part.shape.numel(), dtype=wire, device=part.device)
            for values in (values for owner, values, _ in ranges if owner == rank):
                pending.out[values].copy_(own)  # casts without a copy beside it
            own = own[:0]
        own = own.to(part.device, wire)
        before, after = ([r for r in ranges if r[0] < receiver], [r for r in ranges if r[0] > receiver])
        for owners in filter(None, (before, after)):  # of each, ranges follow one another
            sent, received = ([0] * dist.get_world_size(group) for _ in range(2))
            if any(owner == rank for owner, _, _ in owners):
                sent[receiver] = own.numel()
            out = own.new_empty(0)
            if pending.out is not None:
                out = pending.out[owners[0][1].start : owners[-1][1].stop]
                for owner, values, _ in owners:
                    received[owner] = values.stop - values.start
            values_sent = own[: sent[receiver]]
            work = dist.all_to_all_single(out, values_sent, received, sent, group=group, async_op=True)
            pending.works, pending.sent = [*pending.works, work], [*pending.sent, values_sent, out]

    def _ranges(self) -> list[tuple[int, slice, slice]]:
        """Return the ranks that hold values, each with their range in the parameter and in the rank's shard."""
        start, in_shard = self._part.start, self._part.shard.numel()
        stop = start + self._part.shape.numel()
        owners = range(start // in_shard, -(-stop // in_shard)) if start < stop else range(0)
        ranges = []
        for owner in owners:
            first, last = max(start, owner * in_shard), min(stop, (owner + 1) * in_shard)
            of_shard = slice(first - owner * in_shard, last - owner * in_shard)
            ranges.append((owner, slice(first - start, last - start), of_shard))
        return ranges

    def finish(self, out: Tensor | None, dtype: torch.dtype | None, to: int | None) -> Tensor | None:
        if out is None:
            return None
        full = self._part.with_other_axes(out.view(self._part.shape))
        return full.to(self.as_delivered(dtype)) if gets(to) else None
