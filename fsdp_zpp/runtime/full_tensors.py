"""Tensors of a model that can be had in full: how each is gathered from its shards.

A gather reads shards and fills memory of its own. It does not unshard modules, so it changes nothing that training
sees, whenever it is broken off. Each parameter is gathered by itself, into a tensor of its own, so that its memory is
free when its reader is done with it. Shards are cast before they are sent if that makes them smaller.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_zpp.collectives._torch_coalescing import AllGathers, Waitable
from fsdp_zpp.collectives.devices import for_collectives


@dataclass
class Pending:
    """A tensor that is being gathered.

    Args:
        source: What is gathered.
        dtype: The dtype that it will have; None as it is stored.
        to: The rank that gets it; None means all.
        out: Memory that it arrives in; None if this rank gets nothing, or if gathering begins with :meth:`wait`.
        works: The collectives.
        sent: What they send, which must not be freed before they are done.
    """

    source: FullTensor
    dtype: torch.dtype | None
    to: int | None
    out: Tensor | None = None
    works: Sequence[Waitable] = ()
    sent: Sequence[Tensor] = ()

    @torch.no_grad()
    def wait(self) -> Tensor | None:
        """Return the tensor, which nothing else refers to; None if this rank gets nothing.

        On a GPU the current stream waits, not the host. Pending tensors must be waited for in the same order on all
        ranks.
        """
        self.drain()
        out, self.out = self.out, None
        full = self.source.finish(out, self.dtype, self.to)
        return full if gets(self.to) else None

    def drain(self) -> None:
        """Wait for the collectives alone."""
        for work in self.works:
            work.wait()
        self.works = self.sent = ()


class FullTensor(ABC):
    """A tensor of a model, which every rank or one of them can have in full.

    Attributes:
        shape: Its shape, in full.
        stored: The dtype in which it is stored.
        requires_grad: Whether it is trained.
    """

    shape: torch.Size
    stored: torch.dtype
    requires_grad: bool = False

    def nbytes(self, dtype: torch.dtype | None) -> int:
        """Return the bytes that it takes in full."""
        return self.shape.numel() * self.as_delivered(dtype).itemsize

    def peak_nbytes(self, dtype: torch.dtype | None) -> int:
        """Return the bytes that it takes while it is gathered."""
        return self.nbytes(dtype)

    def as_delivered(self, dtype: torch.dtype | None) -> torch.dtype:
        """Return the dtype that it is delivered in: only floating-point numbers are cast."""
        return self.stored if dtype is None or not self.stored.is_floating_point else dtype

    def start(self, dtype: torch.dtype | None, to: int | None, gathers: AllGathers) -> Pending:
        """Start to gather it, or add it to all-gathers that start soon. Collective over the ranks that share it.

        Args:
            dtype: The dtype to cast it to; None as it is stored.
            to: The global rank that gets it; None means all.
            gathers: The all-gathers, which must start before it is waited for.
        """
        return Pending(self, dtype, to)

    @abstractmethod
    def finish(self, out: Tensor | None, dtype: torch.dtype | None, to: int | None) -> Tensor | None:
        """Return the tensor from what :meth:`start` has gathered; None if this rank gets nothing."""

    def on_the_wire(self, dtype: torch.dtype | None) -> torch.dtype:
        """Return the dtype in which shards are sent."""
        delivered = self.as_delivered(dtype)
        return delivered if delivered.itemsize <= self.stored.itemsize else self.stored

    def of_casts(self, own: int, dtype: torch.dtype | None) -> int:
        """Return the bytes that casts take beside what is gathered.

        Args:
            own: The bytes of this rank's part, as it is sent.
            dtype: The dtype to cast to.
        """
        wire = self.on_the_wire(dtype)
        return own * (wire != self.stored) + self.nbytes(dtype) * (wire != self.as_delivered(dtype))


class Whole(FullTensor):
    """A tensor that every rank has already, also as a DTensor that is replicated, or a shard over one rank.

    Args:
        tensor: The tensor.
        stored: The dtype that it is delivered in by default. Default: its own.
    """

    def __init__(self, tensor: Tensor, stored: torch.dtype | None = None) -> None:
        self._tensor = tensor
        self.shape, self.requires_grad = tensor.shape, tensor.requires_grad
        self.stored = stored or tensor.dtype

    def finish(self, out: Tensor | None, dtype: torch.dtype | None, to: int | None) -> Tensor | None:
        if not gets(to):
            return None
        full, device = self._tensor.detach(), self._tensor.device
        if isinstance(full, DTensor):  # which may be offloaded
            device = torch.device(full.device_mesh.device_type)
            full = full.to_local()
        return full.to(device, self.as_delivered(dtype), copy=True)


class ShardedRows(FullTensor):
    """A DTensor of which the ranks of one mesh dimension have some rows each.

    Args:
        tensor: The tensor.
        dim: The mesh dimension; along all others, it is replicated.
    """

    def __init__(self, tensor: DTensor, dim: int) -> None:
        self._tensor = tensor
        self.shape, self.stored, self.requires_grad = tensor.shape, tensor.dtype, tensor.requires_grad
        self._group = tensor.device_mesh.get_group(dim)
        # As torch.chunk cuts them: equal parts, of which the last may be cut short, or empty.
        self._world = dist.get_world_size(self._group)
        self._rows = -(-self.shape[0] // self._world)

    def peak_nbytes(self, dtype: torch.dtype | None) -> int:
        """Return the bytes that it takes while it is gathered: in full, padded, and this rank's part, cast."""
        row = self.shape[1:].numel() * self.on_the_wire(dtype).itemsize
        return self._rows * self._world * row + self.of_casts(self._rows * row, dtype)

    @torch.no_grad()
    def start(self, dtype: torch.dtype | None, to: int | None, gathers: AllGathers) -> Pending:
        group, pending = self._group, Pending(self, dtype, to)
        if not takes_part(to, group):
            return pending
        own = _padded(self._tensor.to_local().detach(), self._rows)
        own = for_collectives(own, group).to(self.on_the_wire(dtype))
        if gets(to):
            pending.out = own.new_empty(self._rows * self._world, *own.shape[1:])
        if to is not None:
            pending.works, pending.sent = [_gather(pending.out, own, group, to)], [own]
        elif pending.out is not None:
            pending.works = [gathers.add(pending.out, own, group)]
        return pending

    def finish(self, out: Tensor | None, dtype: torch.dtype | None, to: int | None) -> Tensor | None:
        return None if out is None else out[: self.shape[0]].to(self.as_delivered(dtype))


class AnyDTensor(FullTensor):
    """A DTensor that only torch knows how to gather: sharded by several parallelisms, or made of other tensors."""

    def __init__(self, tensor: DTensor) -> None:
        self._tensor = tensor
        self.shape, self.stored, self.requires_grad = tensor.shape, tensor.dtype, tensor.requires_grad

    def peak_nbytes(self, dtype: torch.dtype | None) -> int:
        """Return the bytes that it takes while it is gathered: in full, and a copy in another order or dtype."""
        return self.nbytes(None) + max(self.nbytes(None), self.nbytes(dtype))

    def finish(self, out: Tensor | None, dtype: torch.dtype | None, to: int | None) -> Tensor | None:
        # Offloaded shards are on the CPU, from which NCCL can't gather.
        on_device: Any = self._tensor.detach().to(self._tensor.device_mesh.device_type)
        full = on_device.full_tensor()
        return full.to(self.as_delivered(dtype), copy=True) if gets(to) else None


def full_tensor_of(tensor: Tensor) -> FullTensor:
    """Return how a parameter or buffer is had in full that is none of a flat parameter's."""
    if not isinstance(tensor, DTensor):
        return Whole(tensor)
    mesh = tensor.device_mesh
    dims = [dim for dim, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate)]
    sharded = [dim for dim in dims if mesh.size(dim) > 1]
    is_plain = type(tensor.to_local().detach()) is Tensor
    if is_plain and not sharded:
        return Whole(tensor)
    if len(sharded) == 1 and tensor.placements[sharded[0]] == Shard(0) and tensor.ndim and is_plain:
        return ShardedRows(tensor, sharded[0])
    return AnyDTensor(tensor)


def gets(to: int | None) -> bool:
    """Return whether this rank gets what is delivered to the rank ``to``, or to all."""
    return to is None or not dist.is_initialized() or dist.get_rank() == to


def _padded(own: Tensor, rows: int) -> Tensor:
    """Return rows of a shard, contiguous, with any values in those that it lacks."""
    if own.shape[0] == rows and own.is_contiguous():
        return own
    shape = (rows, *own.shape[1:])
    behind = own.untyped_storage().nbytes() // own.itemsize - own.storage_offset()
    if own.is_contiguous() and math.prod(shape) <= behind:  # FSDP has room for padding behind a shard
        return own.as_strided(shape, torch.empty(shape, device="meta").stride())
    return torch.cat((own, own.new_empty(rows - own.shape[0], *own.shape[1:]))).contiguous()


def takes_part(to: int | None, group: dist.ProcessGroup | None) -> bool:
    """Return whether ranks of ``group``, which share a tensor, gather it for the rank ``to``."""
    return to is None or group is None or to in dist.get_process_group_ranks(group)


def _gather(out: Tensor | None, own: Tensor, group: dist.ProcessGroup, to: int) -> dist.Work:
    """Start to gather equal chunks into ``out`` on the rank ``to`` alone."""
    chunks = None if out is None else list(out.chunk(dist.get_world_size(group)))
    work = dist.gather(own, chunks, dst=to, group=group, async_op=True)
    assert isinstance(work, dist.Work)
    return work
