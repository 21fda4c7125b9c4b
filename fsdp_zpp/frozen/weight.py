"""A frozen weight: its codes, the ranks that hold them, and how they are gathered."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_zpp.codecs import NF4, BlockCodec, Codec, Int4, Int8, copy_blocks
from fsdp_zpp.comm.flat_layout import keep_recent
from fsdp_zpp.comm.hops import SideStream, Traffic, hop_over, labelled, record_event, wait_for
from fsdp_zpp.comm.mesh import ProcessMesh, as_launched, process_mesh
from fsdp_zpp.frozen.stored.format import StoredWeight
from fsdp_zpp.names import model_name
from fsdp_zpp.runtime.unit import Communicator, unit_of
from fsdp_zpp.strategy.error_feedback import Topology

# ---- placement
#
# Places a frozen weight: into how many chunks it is cut, and which of them this rank holds.
#
# The flat values of a weight are cut into as many chunks as there are ranks that share it: one under the scope ``N``,
# one for each rank of a node under ``I``. A chunk is a whole number of the codec's blocks, so the blocks are the same
# however many chunks there are, and the decoded values do not depend on the number of ranks. There is no scope ``G``:
# frozen weights never get stale, so after one gather each node would have all of them for good, as under ``I``.

SCOPES = ("N", "I")


@dataclass(frozen=True)
class Placement:
    """A scope on a mesh. See the top of this section.

    Attributes:
        scope: ``N`` replicated on every rank, ``I`` sharded inside a node.
        node_size_is_given: Whether the user gave the node size; see ``check_nodes`` in frozen_base.py.
    """

    scope: str
    mesh: ProcessMesh
    # Excluded from comparison: weights on the same ranks are gathered together, whoever chose the ranks.
    node_size_is_given: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            scopes = " or ".join(SCOPES)
            raise ValueError(f"the placement of a frozen base must be one of the scopes {scopes}, got {self.scope!r}")

    @classmethod
    def of_strategy(cls, parameters: str, mesh: ProcessMesh) -> Placement:
        """Return the placement of the base under a strategy with the scope ``parameters``."""
        return cls("N" if parameters == "N" else "I", mesh)

    @property
    def chunks(self) -> int:
        """Return the number of chunks that a weight is cut into."""
        return self.mesh.topology.shard_count(self.scope)

    @property
    def own_chunk(self) -> int:
        return self.mesh.rank % self.chunks

    @property
    def replicas(self) -> str:
        """Return the scope for ``check_replicas``: ``I`` if nodes hold the same, ``N`` if all ranks do, else ``G``."""
        topology = self.mesh.topology
        if self.scope == "N" or topology.gpus_per_node == 1:
            return "N"
        return "I" if topology.world > topology.gpus_per_node else "G"

    def chunk_numel(self, numel: int, codec: Codec) -> int:
        """Return how many of ``numel`` values are in a chunk; the last chunks may be partly or wholly past the end."""
        block = block_of(codec)
        return -(-numel // (self.chunks * block)) * block


def block_of(codec: Codec) -> int:
    return int(getattr(codec, "block", 16))  # without blocks, 16 values keep payloads aligned


def place_base(model: nn.Module, scope: str, group: dist.ProcessGroup | None, gpus_per_node: int | None) -> Placement:
    """Return the placement on ``group``, or on this process alone if there is none. Collective over ``group``.

    Strategies that wrap parts of ``model`` give the node size if the user does not.
    """
    if group is None:
        return Placement(scope, ProcessMesh(Topology(1, 1), 0, None, None))
    if gpus_per_node is None and (mesh := _wrapping_mesh(model, group)) is not None:
        return Placement(scope, mesh)
    return Placement(scope, process_mesh(group, gpus_per_node), node_size_is_given=gpus_per_node is not None)


def _wrapping_mesh(model: nn.Module, group: dist.ProcessGroup) -> ProcessMesh | None:
    """Return the mesh on ``group`` of the strategies that wrap parts of ``model``; None if there are none."""
    units = (unit for unit in map(unit_of, model.modules()) if unit is not None and unit.ranks.group is group)
    meshes = {as_launched(unit.ranks) for unit in units}
    if len(meshes) > 1:
        raise ValueError(
            f"the strategies that wrap parts of this {model_name(model)} have different node sizes "
            f"({', '.join(sorted(str(mesh.topology) for mesh in meshes))}); pass gpus_per_node= to choose that of the "
            "frozen base"
        )
    return next(iter(meshes), None)


# ---- weight
#
# One frozen weight: how its values become chunks of codes, one for each rank that shares it, and values again.

# Codecs whose payloads can be cut into codes and scales for files, and assembled from them.
Storable = Int8 | Int4 | NF4

# read(first, last): the flat values first to last - 1 of a weight, in any floating dtype, on any device.
ReadValues = Callable[[int, int], Tensor]

_PIECE = 2**21  # values that are read, and encoded, at a time


@contextmanager
def out_of_inference_mode() -> Iterator[None]:
    """Leave inference mode for longer-lived tensors: inference tensors can't be written to or saved for a backward."""
    if torch.is_inference_mode_enabled():
        # Leaving inference mode enables gradients, so they are turned off again.
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


class Base(Communicator, Protocol):
    def make_units(self) -> None: ...


class FrozenWeight:
    """A matrix, or a stack of matrices, that is quantized once and sharded.

    Attributes:
        name: Its name in errors, until units are made and its FQN in the model is known.
        dtype: The dtype it shows and dequantizes to by default; embeddings return it.
        holder: Holds its codes, alone or with the other weights of its unit.
        shown: The tensor that stands for it, if one is alive.
        sampled: Some of its scales, once they were requested.
    """

    holder: UngroupedPayload | FrozenUnit
    base: Base
    shown: weakref.ref[Tensor] | None = None
    sampled: list[float] | None = None

    def __init__(self, name: str, shape: torch.Size, dtype: torch.dtype, codec: Codec, placement: Placement) -> None:
        self.name, self.shape, self.dtype, self.codec, self.placement = name, shape, dtype, codec, placement
        self.chunk_numel = placement.chunk_numel(self.shape.numel(), self.codec)
        self.local_nbytes = self.codec.nbytes(self.chunk_numel)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(f"{self.name} is a shard of a frozen weight and can't be copied; copy its module instead")

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self.name} is a shard of a frozen weight and can't be pickled; see save_frozen_params")

    @property
    def device(self) -> torch.device:
        return self.holder.device

    def codes_and_scales(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Split chunks, uint8 [chunks, local_nbytes], into codes, flat uint8, and scales, fp32 [blocks]."""
        assert isinstance(self.codec, Storable)
        layout, chunk = self.codec.layout, self.chunk_numel
        start = layout.scales_offset(chunk)
        codes = rows[:, : layout.codes_nbytes(chunk)].reshape(-1)
        scales = rows[:, start : start + 4 * layout.blocks(chunk)].contiguous().view(torch.float32).reshape(-1)
        # The layout decides how much padding the last chunks have, but not how many blocks the weight has.
        blocks = layout.blocks(self.shape.numel())
        return codes[: layout.codes_nbytes(blocks * layout.block)], scales[:blocks]

    def local_payload_from_slices(self, codes: Any, scales: Any) -> Tensor:
        """Return this rank's chunk, uint8 [local_nbytes] on the CPU, assembled from all codes and scales.

        Only this rank's part of them is read, so they may be lazy slices of files.
        """
        assert isinstance(self.codec, Storable)
        layout = self.codec.layout
        row = torch.zeros(self.local_nbytes, dtype=torch.uint8)
        end_of_all = layout.blocks(self.shape.numel())
        per_chunk = self.chunk_numel // layout.block
        first = min(self.placement.own_chunk * per_chunk, end_of_all)
        last = min(first + per_chunk, end_of_all)
        if first == last:
            return row
        nbytes = layout.codes_nbytes(layout.block)
        row[: (last - first) * nbytes] = codes[first * nbytes : last * nbytes]
        start = layout.scales_offset(self.chunk_numel)
        row[start : start + 4 * (last - first)] = scales[first:last].view(torch.uint8)
        return row

    def encode(self, read: ReadValues, device: torch.device) -> Tensor:
        """Quantize this rank's chunk, uint8 [local_nbytes] on ``device``; no other values are read."""

        def encoded(first: int, last: int, padded: int) -> Tensor:
            values = read(first, last).detach().to(device) if first < last else torch.zeros(0, device=device)
            if len(values) < padded:
                values = torch.cat([values, values.new_zeros(padded - len(values))])
            return self.codec.encode(values.contiguous(), 1, 1)

        return self._in_pieces(encoded, device)

    def keep(self, stored: StoredWeight, device: torch.device) -> Tensor:
        """Return this rank's chunk as it is stored, uint8 [local_nbytes] on ``device``; no other codes are read."""
        block = stored.format.group_numel

        def kept(first: int, last: int, padded: int) -> Tensor:
            return stored.payload(first // block, -(-last // block)).to(device).view(1, -1)

        return self._in_pieces(kept, device)

    def _in_pieces(self, make: Callable[[int, int, int], Tensor], device: torch.device) -> Tensor:
        """Assemble this rank's chunk from pieces of whole blocks, so that only one piece takes extra memory.

        ``make(first, last, padded)`` is the payload, uint8 [1, nbytes(padded)], of the values ``first`` to ``last - 1``
        and of the padding of their last block.
        """
        codec, numel = self.codec, self.shape.numel()
        # Chunks are equally long on all ranks, so the last ones may lie partly or wholly past the end of the weight.
        start = min(self.placement.own_chunk * self.chunk_numel, numel)
        end = min(start + self.chunk_numel, numel)
        if not isinstance(codec, BlockCodec):  # nothing says what parts its payload has
            return make(start, end, self.chunk_numel)[0]
        # Before the pieces: between rows that stay, an allocator could not use the memory of pieces again.
        row = torch.zeros(1, self.local_nbytes, dtype=torch.uint8, device=device)
        step = max(1, _PIECE // codec.block) * codec.block
        for first in range(start, end, step):
            last = min(first + step, end)
            padded = -(-(last - first) // codec.block) * codec.block
            piece = make(first, last, padded)
            copy_blocks(codec, piece, padded, 0, row, self.chunk_numel, (first - start) // codec.block)
        return row[0]

    @torch.compiler.disable
    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        """Dequantize the whole weight for a computation on ``device``. Collective over the ranks of its placement."""
        return self.dense(dtype or self.dtype, device or self.device)

    def dense(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Dequantize the whole weight, for callers that neither autograd nor a compiler looks into. Collective."""
        rows = self.holder.gathered_payload(self, device)
        numel, padded = self.shape.numel(), rows.shape[0] * self.chunk_numel
        # Decoding writes whole chunks, so the padding at the end of the last ones needs room; a view cuts it off.
        out = torch.empty(self.shape if numel == padded else padded, dtype=dtype, device=rows.device)
        # A weight's columns of a gathered payload are not contiguous.
        self.codec.decode_rows(rows, out)
        return out if numel == padded else out[:numel].view(self.shape)

    def dense_row(self, index: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Dequantize one matrix of a stack: it alone is decoded, unless blocks straddle two matrices. Collective."""
        index, numel = range(self.shape[0])[index], self.shape[1:].numel()  # the range resolves negative indices
        codec = self.codec
        if not isinstance(codec, BlockCodec) or numel % codec.block:
            return self.dense(dtype, device)[index]
        rows = self.holder.gathered_payload(self, device)
        payload = rows.new_empty(1, codec.nbytes(numel))
        copy_blocks(codec, rows, self.chunk_numel, index * numel // codec.block, payload, numel, 0)
        out = torch.empty(self.shape[1:], dtype=dtype, device=rows.device)
        codec.decode(payload, out.view(-1), 1, 1)
        return out


class UngroupedPayload:
    """The local payload, uint8 [local_nbytes], of one weight that is in no unit yet. See frozen_base.py."""

    def __init__(self, row: Tensor) -> None:
        self._row = row

    @property
    def device(self) -> torch.device:
        return self._row.device

    def move(self, device: torch.device) -> None:
        self._row = self._row.to(device)

    def local_payload(self, weight: FrozenWeight) -> Tensor:
        return self._row

    def gathered_payload(self, weight: FrozenWeight, device: torch.device) -> Tensor:
        # The first use makes the units of the base. It may be in inference mode, and payload shards outlive it.
        with out_of_inference_mode():
            weight.base.make_units()
        return weight.holder.gathered_payload(weight, device)


# ---- double buffer
#
# Two buffers for gathered frozen units: one for the unit in use, one to prefetch the next.
#
# Units are gathered on demand, when the first of their weights is dequantized. So forward, backward, recomputation and
# generation are one case, and no hooks are needed. One buffer holds the unit in use. The other holds the unit that was
# in use before, until the next one is prefetched into it. Earlier requests tell which unit is next, by the last two
# units, since forward and backward go through the units in opposite directions. A wrong guess costs one gather. Ranks
# that run the same model request units in the same order, so they make the same guesses and enter the same gathers.
#
# On GPUs gathers run in a side stream. A gather waits for the computation enqueued so far, which is the last to read
# the buffer it overwrites; the computation waits for the gather when it reaches that unit.


@dataclass
class _Buffer:
    """Memory for one gathered unit, kept from unit to unit: allocations that cross streams fragment the memory."""

    memory: Tensor | None = None
    unit: FrozenUnit | None = None
    # Kept, since a unit comes back to the same memory in every step.
    places: dict[FrozenUnit, tuple[Tensor, Sequence[Tensor]]] = field(default_factory=dict)
    parts: Sequence[Tensor] = ()
    ready: torch.cuda.Event | None = None

    def hold(self, unit: FrozenUnit) -> Tensor:
        """Return memory for ``unit``, uint8 of its gathered shape, without its values."""
        rows, nbytes = unit.gathered_shape
        if self.memory is None or self.memory.numel() < rows * nbytes or self.memory.device != unit.device:
            # Drop views, too, so that the old memory is freed before the new is allocated, not after.
            self.memory, self.parts = None, ()
            self.places.clear()
            self.memory = torch.empty(rows * nbytes, dtype=torch.uint8, device=unit.device)
        if unit not in self.places:
            gathered = self.memory[: rows * nbytes].view(rows, nbytes)
            self.places[unit] = gathered, unit.split(gathered)
        self.unit = unit
        gathered, self.parts = self.places[unit]
        return gathered


class DoubleBuffer:
    """Gathers units on demand, and prefetches the next. See the top of this section."""

    def __init__(self) -> None:
        self._current, self._other = _Buffer(), _Buffer()
        self._previous: FrozenUnit | None = None
        # The unit that followed a pair of units, by the pair's second, then its first unit. Where always other units
        # come before one, as with experts, few of the pairs come again, so only the last few are kept.
        self._next: dict[FrozenUnit, dict[FrozenUnit, FrozenUnit]] = {}
        self._stream = SideStream()

    def get(self, unit: FrozenUnit) -> Sequence[Tensor]:
        """Return the gathered parts of ``unit``, valid in this stream until another unit is requested. Collective."""
        if self._current.unit is not unit:
            self._switch(unit)
        # At every request, since this may be another stream than that of the last one.
        wait_for(self._current.ready, unit.device)
        return self._current.parts

    @property
    def nbytes(self) -> int:
        return sum(b.memory.nbytes for b in (self._current, self._other) if b.memory is not None)

    def drop(self, unit: FrozenUnit) -> None:
        for buffer in (self._current, self._other):
            if buffer.unit is unit:
                buffer.unit, buffer.parts = None, ()

    def _switch(self, unit: FrozenUnit) -> None:
        before, last = self._previous, self._current.unit
        if last is not None:
            if before is not None:
                followers = self._next.setdefault(last, {})
                if followers.get(before) is not unit:
                    followers.pop(before, None)
                    keep_recent(followers, before, unit)
            self._previous = last
        if self._other.unit is not unit:
            self._gather(unit, self._other)
        self._current, self._other = self._other, self._current
        expected = None if last is None else self._next.get(unit, {}).get(last)
        # Where forward turns into backward, the unit that is expected is the last one, and still gathered.
        if expected is not None and expected is not self._other.unit:
            with labelled("prefetch", expected.label):
                self._gather(expected, self._other)

    def _gather(self, unit: FrozenUnit, buffer: _Buffer) -> None:
        # The buffer is allocated in the side stream, too. When it is freed for a larger one, its memory goes back to
        # that stream, which has waited for all that the computation read of it. It outlives the forward, too.
        with out_of_inference_mode(), self._stream.after_current(unit.device):
            out = buffer.hold(unit)
            unit.gather(out)
            buffer.ready = record_event(out)


# ---- unit
#
# Frozen weights that are gathered together: one payload, one collective a hop.
#
# A unit is the frozen weights of one transformer block, or of whatever FSDP wraps as one. This rank's chunks of all of
# them lie side by side in one row of bytes, the *payload shard*; a gather returns one such row for each rank. All nodes
# hold the same, so there is only the intra-node hop.


class FrozenUnit:
    """A payload shard of weights of one placement; it takes over their chunks from their earlier holders."""

    def __init__(self, label: str, weights: list[FrozenWeight], traffic: Traffic, buffers: DoubleBuffer) -> None:
        self.label, self.weights = label, weights
        self.placement = weights[0].placement
        mesh, scope = self.placement.mesh, self.placement.scope
        self._intra = hop_over(mesh.intra if scope != "N" else None, "gather", "intra", traffic)
        self._buffers = buffers
        self._places = {weight: place for place, weight in enumerate(weights)}
        self._nbytes = [weight.local_nbytes for weight in weights]
        self.local_nbytes = sum(self._nbytes)
        # To one device, since a model may have been moved in part. The separate chunks are freed with their old
        # holders.
        chunks = [weight.holder.local_payload(weight).to(weights[0].device) for weight in weights]
        self._hold(torch.cat(chunks).view(1, -1))
        for weight in weights:
            weight.holder = self

    @property
    def device(self) -> torch.device:
        return self._shard.device

    @property
    def nbytes(self) -> int:
        return self._shard.nbytes

    @property
    def gathered_shape(self) -> tuple[int, int]:
        """Return the shape of the gathered payload: a row of bytes for each chunk."""
        return self.placement.chunks, self.local_nbytes

    def move(self, device: torch.device) -> None:
        self._buffers.drop(self)  # what they have gathered is on the old device
        with out_of_inference_mode():  # they outlive the forward that a move may be part of
            self._hold(self._shard.to(device))

    def local_payload(self, weight: FrozenWeight) -> Tensor:
        """Return this rank's chunk, uint8 [local_nbytes], a view."""
        return self._payloads[self._places[weight]][0]

    def gathered_payload(self, weight: FrozenWeight, device: torch.device) -> Tensor:
        """Return all chunks, uint8 [chunks, local_nbytes], on the device that computes. Collective.

        They are valid until the payload of another unit is requested.
        """
        if self._shard.is_cpu and device.type != "cpu":
            # FSDP moves a model to its device without Module._apply, so nothing has moved the codes with it.
            self.move(device)
        parts = self._payloads if self._intra is None else self._buffers.get(self)
        return parts[self._places[weight]]

    def split(self, gathered: Tensor) -> Sequence[Tensor]:
        """Return each weight's part of gathered rows, uint8 [rows, local_nbytes of the weight]; a view."""
        return gathered.split(self._nbytes, dim=1)

    def gather(self, out: Tensor) -> None:
        """Gather the payload over the intra-node hop into ``out``, uint8 of the gathered shape. Collective."""
        assert self._intra is not None
        self._intra.all_gather(self._shard, self.label, out)

    def _hold(self, shard: Tensor) -> None:
        self._shard, self._payloads = shard, self.split(shard)
        for codec in {weight.codec for weight in self.weights}:
            codec.prepare_decode(shard.device)
