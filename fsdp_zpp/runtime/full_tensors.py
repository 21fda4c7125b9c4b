"""Tensors of a sharded model in full, one unit at a time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter, FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_zpp.comm.hops import AllGathers, Waitable
from fsdp_zpp.comm.mesh import for_collectives
from fsdp_zpp.names import parameter_name

from ._torch_flat_parts import FlatPart, Site, flat_parts, original_dtypes

# ---- tensors that can be had in full, and how each is gathered from its shards
#
# A gather reads shards and writes to new memory. Modules stay sharded, so training can go on even if a gather is
# interrupted. Each parameter is gathered into a tensor of its own, so the caller can free them one by one. Shards are
# cast before they are sent if the cast makes them smaller.


@dataclass
class Pending:
    """A tensor that is being gathered; tensors in ``sent`` must not be freed before ``works`` are done.

    ``out`` is None if this rank gets nothing, or if the gather starts only in :meth:`wait`.
    """

    source: FullTensor
    dtype: torch.dtype | None
    to: int | None
    out: Tensor | None = None
    works: Sequence[Waitable] = ()
    sent: Sequence[Tensor] = ()

    @torch.no_grad()
    def wait(self) -> Tensor | None:
        """Return the tensor, with no other reference to it; None if this rank gets nothing.

        On a GPU the current stream waits, not the host. All ranks must wait for their pending tensors in the same
        order, since this may run a collective.
        """
        self.drain()
        out, self.out = self.out, None
        full = self.source.finish(out, self.dtype, self.to)
        return full if gets(self.to) else None

    def drain(self) -> None:
        for work in self.works:
            work.wait()
        self.works = self.sent = ()


class FullTensor(ABC):
    """A tensor of a model, to be gathered on all ranks or on one of them; ``stored`` is its dtype in the model."""

    shape: torch.Size
    stored: torch.dtype
    requires_grad: bool = False

    # nbytes counts only the full tensor, and peak_nbytes all memory that its gather needs at once.
    def nbytes(self, dtype: torch.dtype | None) -> int:
        return self.shape.numel() * self.as_delivered(dtype).itemsize

    def peak_nbytes(self, dtype: torch.dtype | None) -> int:
        return self.nbytes(dtype)

    def as_delivered(self, dtype: torch.dtype | None) -> torch.dtype:
        """Return the dtype of the result: ``dtype``, unless that is None or the tensor is not floating-point."""
        return self.stored if dtype is None or not self.stored.is_floating_point else dtype

    def start(self, dtype: torch.dtype | None, to: int | None, gathers: AllGathers) -> Pending:
        """Start to gather the tensor, or add it to ``gathers``. Collective over the ranks that have its shards."""
        return Pending(self, dtype, to)

    @abstractmethod
    def finish(self, out: Tensor | None, dtype: torch.dtype | None, to: int | None) -> Tensor | None:
        """Return the gathered tensor; None if this rank gets nothing."""

    def on_the_wire(self, dtype: torch.dtype | None) -> torch.dtype:
        delivered = self.as_delivered(dtype)
        return delivered if delivered.itemsize <= self.stored.itemsize else self.stored

    def of_casts(self, own: int, dtype: torch.dtype | None) -> int:
        """Return the bytes that casts add to the peak, if this rank sends ``own`` bytes."""
        wire = self.on_the_wire(dtype)
        return own * (wire != self.stored) + self.nbytes(dtype) * (wire != self.as_delivered(dtype))


class Whole(FullTensor):
    """A tensor that every rank already has in full: a plain one, or a DTensor that no mesh dimension divides."""

    def __init__(self, tensor: Tensor, stored: torch.dtype | None = None) -> None:
        self._tensor = tensor
        self.shape, self.requires_grad = tensor.shape, tensor.requires_grad
        self.stored = stored or tensor.dtype

    def finish(self, out: Tensor | None, dtype: torch.dtype | None, to: int | None) -> Tensor | None:
        if not gets(to):
            return None
        full, device = self._tensor.detach(), self._tensor.device
        if isinstance(full, DTensor):  # it may be offloaded to the CPU
            device = torch.device(full.device_mesh.device_type)
            full = full.to_local()
        return full.to(device, self.as_delivered(dtype), copy=True)


class ShardedRows(FullTensor):
    """A DTensor whose rows are sharded along one mesh dimension; it is replicated along all others."""

    def __init__(self, tensor: DTensor, dim: int) -> None:
        self._tensor = tensor
        self.shape, self.stored, self.requires_grad = tensor.shape, tensor.dtype, tensor.requires_grad
        self._group = tensor.device_mesh.get_group(dim)
        # FSDP shards by torch.chunk: parts are equal, but the last ones may be shorter, or empty.
        self._world = dist.get_world_size(self._group)
        self._rows = -(-self.shape[0] // self._world)

    def peak_nbytes(self, dtype: torch.dtype | None) -> int:
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
            chunks = None if pending.out is None else list(pending.out.chunk(self._world))
            work = dist.gather(own, chunks, dst=to, group=group, async_op=True)
            assert isinstance(work, dist.Work)
            pending.works, pending.sent = [work], [own]
        elif pending.out is not None:
            pending.works = [gathers.add(pending.out, own, group)]
        return pending

    def finish(self, out: Tensor | None, dtype: torch.dtype | None, to: int | None) -> Tensor | None:
        return None if out is None else out[: self.shape[0]].to(self.as_delivered(dtype))


class AnyDTensor(FullTensor):
    """A DTensor that torch gathers: its shards are not rows along one mesh dimension, or are a tensor subclass."""

    def __init__(self, tensor: DTensor) -> None:
        self._tensor = tensor
        self.shape, self.stored, self.requires_grad = tensor.shape, tensor.dtype, tensor.requires_grad

    def peak_nbytes(self, dtype: torch.dtype | None) -> int:
        return self.nbytes(None) + max(self.nbytes(None), self.nbytes(dtype))

    def finish(self, out: Tensor | None, dtype: torch.dtype | None, to: int | None) -> Tensor | None:
        # Offloaded shards are on the CPU, from which NCCL can't gather.
        on_device: Any = self._tensor.detach().to(self._tensor.device_mesh.device_type)
        full = on_device.full_tensor()
        return full.to(self.as_delivered(dtype), copy=True) if gets(to) else None


def full_tensor_of(tensor: Tensor) -> FullTensor:
    """Return the full tensor of a parameter or buffer that is not a part of a flat parameter."""
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
    """Return whether this rank gets a tensor that is delivered to the rank ``to``, or to all if that is None."""
    return to is None or not dist.is_initialized() or dist.get_rank() == to


def _padded(own: Tensor, rows: int) -> Tensor:
    """Return a shard, contiguous and padded to ``rows`` rows; the padding has arbitrary values."""
    if own.shape[0] == rows and own.is_contiguous():
        return own
    shape = (rows, *own.shape[1:])
    behind = own.untyped_storage().nbytes() // own.itemsize - own.storage_offset()
    if own.is_contiguous() and math.prod(shape) <= behind:  # FSDP has room for padding behind a shard
        return own.as_strided(shape, torch.empty(shape, device="meta").stride())
    return torch.cat((own, own.new_empty(rows - own.shape[0], *own.shape[1:]))).contiguous()


def takes_part(to: int | None, group: dist.ProcessGroup | None) -> bool:
    """Return whether the ranks of ``group`` gather their tensor for ``to``: only if that is one of them, or None."""
    return to is None or group is None or to in dist.get_process_group_ranks(group)


# ---- parts of flat parameters


class _Range(NamedTuple):
    owner: int
    values: slice
    in_shard: slice


class PartOfFlat(FullTensor):
    """An original parameter within a flat parameter; each rank has a range of its values, or none."""

    def __init__(self, part: FlatPart) -> None:
        self._part = part
        self.shape, self.stored, self.requires_grad = part.full_shape, part.shard.dtype, part.requires_grad

    def peak_nbytes(self, dtype: torch.dtype | None) -> int:
        # If another parallelism shards it, too, full_tensor() gathers into new memory, and may then copy to reorder.
        others = 2 * self.nbytes(None) if self._part.dtensor_spec is not None else 0
        return self._part.shape.numel() * self.on_the_wire(dtype).itemsize + self.of_casts(0, dtype) + others

    @torch.no_grad()
    def start(self, dtype: torch.dtype | None, to: int | None, gathers: AllGathers) -> Pending:
        part, pending = self._part, Pending(self, dtype, to)
        # full_tensor() is collective over a DTensor's mesh, so all its ranks need the part, not just ``to``.
        if to is None or part.dtensor_spec is not None or (part.group is None and gets(to)):
            self._broadcast(pending)
        elif part.group is not None and takes_part(to, part.group):
            self._send(pending, part.group, to)
        return pending

    def _broadcast(self, pending: Pending) -> None:
        part, group, works = self._part, self._part.group, []
        out = torch.empty(part.shape.numel(), dtype=self.on_the_wire(pending.dtype), device=part.device)
        for each in self._ranges():
            if group is None or each.owner == dist.get_rank(group):
                out[each.values].copy_(part.shard[each.in_shard])
            if group is not None:
                source = dist.get_global_rank(group, each.owner)
                works.append(dist.broadcast(out[each.values], source, group=group, async_op=True))
        pending.out, pending.works = out, works

    def _send(self, pending: Pending, group: dist.ProcessGroup, to: int) -> None:
        """Start to gather the part on the global rank ``to`` alone."""
        part, wire, ranges = self._part, self.on_the_wire(pending.dtype), self._ranges()
        rank, receiver = dist.get_rank(group), dist.get_group_rank(group, to)
        own = next((part.shard[each.in_shard] for each in ranges if each.owner == rank), part.shard[:0])
        if rank == receiver:
            pending.out = torch.empty(part.shape.numel(), dtype=wire, device=part.device)
            for each in ranges:
                if each.owner == rank:
                    pending.out[each.values].copy_(own)  # casts without another copy
            own = own[:0]
        own = own.to(part.device, wire)
        # The other ranks' ranges lie before and after the receiver's own; a side that has any takes one collective.
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
        full = self._part.full_tensor_of(out.view(self._part.shape))
        return full.to(self.as_delivered(dtype)) if gets(to) else None


# ---- all tensors of a model


@dataclass(eq=False)
class TensorOfModel:
    """A parameter, a persistent buffer, or another tensor of a state dict.

    ``unit`` is a path, see :func:`unit_path`; a tied tensor has several ``sites`` and ``names``.
    """

    full: FullTensor
    unit: str
    is_buffer: bool = False
    sites: list[Site] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


Others = Callable[[nn.Module], Mapping[str, FullTensor]]
"""Returns a module's own tensors beside parameters and buffers, by name; tied ones must compare equal."""


@torch.no_grad()  # so that taking the shard of a parameter records no autograd function
def tensors_of(model: nn.Module, others: Others = lambda module: {}) -> list[TensorOfModel]:
    """Return all tensors of a model, tied ones once, in the order of its modules."""
    # Until it is resharded, a parameter that a forward left unsharded has the dtype of mixed precision.
    reshard(model)
    flat: dict[nn.Module, dict[str, FlatPart]] = {}
    for part in flat_parts(model):
        for module, name in part.sites:
            flat.setdefault(module, {})[name] = part
    dtypes = original_dtypes(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[object, TensorOfModel] = {}
    for path, module in modules.items():
        parameters = module._parameters.items()
        own: dict[str, Tensor] = {name: p for name, p in parameters if not isinstance(p, FlatParameter | None)}
        buffers = {name: b for name, b in module._buffers.items() if name not in module._non_persistent_buffers_set}
        own |= {name: buffer for name, buffer in buffers.items() if buffer is not None}
        everything: dict[str, Tensor | FlatPart | FullTensor] = {**own, **flat.get(module, {}), **others(module)}
        for name, tensor in everything.items():
            key = id(tensor) if isinstance(tensor, Tensor) else tensor
            if key not in found:
                found[key] = TensorOfModel(_in_full(tensor, dtypes), unit_path(path, modules), name in buffers)
            found[key].sites.append((module, name))
            found[key].names.append(parameter_name(path, name))
    return list(found.values())


def _in_full(tensor: Tensor | FlatPart | FullTensor, dtypes: Mapping[Tensor, torch.dtype]) -> FullTensor:
    if isinstance(tensor, FlatPart):
        return PartOfFlat(tensor)
    if isinstance(tensor, FullTensor):
        return tensor
    return Whole(tensor, dtypes[tensor]) if tensor in dtypes else full_tensor_of(tensor)


def unit_path(path: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the path of the unit that has the module at ``path``; ``modules`` are all modules of the model.

    The unit is the innermost module that FSDP wraps or the outermost item of an ``nn.ModuleList``, whichever is further
    down; a module in neither is a unit by itself.
    """
    parts = path.split(".")
    ancestors = [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
    wrapped = [a for a in ancestors if isinstance(modules[a], (FullyShardedDataParallel, FSDPModule))]
    items = [a for a in ancestors if isinstance(modules[a.rpartition(".")[0]], nn.ModuleList)]
    return max(wrapped[-1:] + items[:1] or [path], key=len)  # the longer path is further down


def reshard(model: nn.Module) -> None:
    """Make ``model.parameters()`` the shards: a forward without a backward leaves the root's unsharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# ---- prefetch of the next tensors, within the memory of one unit
#
# A batch of tensors has at most half the bytes of the largest unit, so that two batches have no more than a unit. The
# next batch starts as soon as that unit's bytes suffice for it, the rest of the current one, and the caller's tensor.

LARGEST_BATCH = 2**28
"""The most bytes of a batch, unless one tensor has more: larger batches would use links no better."""


class GatherInTurn:
    """Gathers the tensors of a model, batch by batch. Collective: all ranks iterate over it.

    Args:
        tensors: The tensors, in the same order on all ranks.
        dtype: The dtype to cast floating-point tensors to; None keeps the stored ones.
        to: The global rank that gets them; None means all.
    """

    def __init__(
        self, tensors: Iterable[TensorOfModel], dtype: torch.dtype | None = None, to: int | None = None
    ) -> None:
        self._dtype, self._to = dtype, to
        units: dict[str, list[TensorOfModel]] = {}
        for tensor in tensors:
            units.setdefault(tensor.unit, []).append(tensor)
        self._limit = max((sum(each.full.nbytes(dtype) for each in unit) for unit in units.values()), default=0)
        in_order = [tensor for unit in units.values() for tensor in unit]
        self._peak_nbytes = {tensor: tensor.full.peak_nbytes(dtype) for tensor in in_order}
        self._batches = deque(self._in_batches(in_order))
        self._started: deque[tuple[TensorOfModel, Pending]] = deque()

    def __iter__(self) -> Generator[tuple[TensorOfModel, Tensor | None], None, None]:
        """Yield each tensor; None in its place on ranks that don't get it."""
        held = 0
        try:
            while self._started or self._batches:
                if not self._started:
                    self._start_batch()
                if self._has_room(held):
                    self._start_batch()
                tensor, pending = self._started.popleft()
                held = tensor.full.nbytes(self._dtype)
                value = pending.wait()
                del pending
                yield tensor, value
                del value
        finally:
            # The caller may stop early, if all ranks stop at the same tensor.
            for _, pending in self._started:
                pending.drain()
            self._started.clear()

    def _has_room(self, held: int) -> bool:
        """Return whether the next batch fits, given the bytes of the tensor that the caller holds."""
        if not self._batches:
            return False
        tensors = [*(tensor for tensor, _ in self._started), *self._batches[0]]
        return held + sum(self._peak_nbytes[tensor] for tensor in tensors) <= self._limit

    def _start_batch(self) -> None:
        gathers = AllGathers()
        batch = [(tensor, tensor.full.start(self._dtype, self._to, gathers)) for tensor in self._batches.popleft()]
        gathers.start()
        self._started += batch

    def _in_batches(self, tensors: Sequence[TensorOfModel]) -> list[list[TensorOfModel]]:
        batches: list[list[TensorOfModel]] = []
        size, room = 0, -1
        for tensor in tensors:
            nbytes = self._peak_nbytes[tensor]
            if size + nbytes > room:
                # A batch of one large tensor may leave the next one less than half a unit.
                room = min(LARGEST_BATCH, self._limit // 2, max(self._limit - size, 0))
                batches.append([])
                size = 0
            batches[-1].append(tensor)
            size += nbytes
        # Largest first: the caller still holds the last one, the smallest, when the next batch starts.
        return [sorted(batch, key=self._peak_nbytes.__getitem__, reverse=True) for batch in batches]
