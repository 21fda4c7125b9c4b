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
# A placement says into how many chunks a frozen weight is cut, and which of them this rank holds.
#
# Under the scope ``N``, a weight is one chunk; under ``I``, it is cut into one chunk for each rank of a node. A chunk
# has whole blocks of the codec, so blocks and decoded values do not depend on the number of ranks. There is no scope
# ``G``: frozen weights never get stale, so each node would keep all of them from the first gather on, as under ``I``.

SCOPES = ("N", "I")


@dataclass(frozen=True)
class Placement:
    """A scope on a mesh; see the top of this section.

    Attributes:
        scope: Under ``N`` every rank holds whole weights; under ``I`` the ranks of a node hold shards.
        node_size_is_given: True if the user gave the node size; see ``check_nodes`` in frozen_base.py.
    """

    scope: str
    mesh: ProcessMesh
    # Left out of comparisons, so that weights on the same nodes are gathered together, whoever chose the node size.
    node_size_is_given: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            scopes = " or ".join(SCOPES)
            raise ValueError(f"the placement of a frozen base must be one of the scopes {scopes}, got {self.scope!r}")

    @classmethod
    def of_strategy(cls, parameters: str, mesh: ProcessMesh) -> Placement:
        """Return the placement of the frozen base under a strategy whose parameter scope is ``parameters``."""
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
        """Return the holders of equal codes for ``check_replicas``: ``N`` all ranks, ``I`` all nodes, ``G`` none."""
        topology = self.mesh.topology
        if self.scope == "N" or topology.gpus_per_node == 1:
            return "N"
        return "I" if topology.world > topology.gpus_per_node else "G"

    def chunk_numel(self, numel: int, codec: Codec) -> int:
        """Return the size of a chunk of ``numel`` values, in whole blocks; the last chunks may have padding."""
        block = int(getattr(codec, "block", 16))  # without blocks, multiples of 16 values keep payloads aligned
        return -(-numel // (self.chunks * block)) * block


def place_base(model: nn.Module, scope: str, group: dist.ProcessGroup | None, gpus_per_node: int | None) -> Placement:
    """Return the placement on ``group``; None means this process alone. Collective over ``group``.

    By default, the node size is that of the strategies that wrap parts of ``model``, or else as launched.
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
# A frozen weight: its values are encoded chunk by chunk, gathered, and decoded.

# Codecs whose payloads can be split into codes and scales for files, and put together again.
Storable = Int8 | Int4 | NF4

# read(first, last) returns the flat values first to last - 1 of a weight, in any floating dtype, on any device.
ReadValues = Callable[[int, int], Tensor]

_PIECE = 2**21  # values to read and encode at a time


@contextmanager
def out_of_inference_mode() -> Iterator[None]:
    """Leave inference mode for new tensors that outlive it: inference tensors allow no later writes or autograd."""
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
        name: The weight's name in errors; its FQN in the model once units are made.
        dtype: The dtype of ``shown``, of dequantized values by default, and of the outputs of embeddings.
        holder: The object that holds its codes, by themselves or with those of its unit's other weights.
        shown: A weak reference to the tensor that stands for it in modules.
        sampled: A few of its scales, kept by ``describe_base`` in base_files.py.
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
        # Cut off the padding of the last chunks, so that files do not depend on the number of ranks.
        blocks = layout.blocks(self.shape.numel())
        return codes[: layout.codes_nbytes(blocks * layout.block)], scales[:blocks]

    def local_payload_from_slices(self, codes: Any, scales: Any) -> Tensor:
        """Return this rank's chunk, uint8 [local_nbytes] on the CPU, assembled from all codes and scales.

        Only this rank's codes and scales are read, so the arguments may be lazy slices of files.
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
        """Return this rank's chunk, quantized, uint8 [local_nbytes] on ``device``; read no values of other chunks."""

        def encoded(first: int, last: int, padded: int) -> Tensor:
            values = read(first, last).detach().to(device) if first < last else torch.zeros(0, device=device)
            if len(values) < padded:
                values = torch.cat([values, values.new_zeros(padded - len(values))])
            return self.codec.encode(values.contiguous(), 1, 1)

        return self._in_pieces(encoded, device)

    def keep(self, stored: StoredWeight, device: torch.device) -> Tensor:
        """Return this rank's chunk as stored, uint8 [local_nbytes] on ``device``; read no codes of other chunks."""
        block = stored.format.group_numel

        def kept(first: int, last: int, padded: int) -> Tensor:
            return stored.payload(first // block, -(-last // block)).to(device).view(1, -1)

        return self._in_pieces(kept, device)

    def _in_pieces(self, make: Callable[[int, int, int], Tensor], device: torch.device) -> Tensor:
        """Assemble this rank's chunk from pieces of whole blocks, so that only one piece takes extra memory.

        ``make(first, last, padded)`` returns the payload of the values ``first`` to ``last - 1``, padded with zeros to
        ``padded`` values: uint8 [1, nbytes(padded)].
        """
        codec, numel = self.codec, self.shape.numel()
        # All ranks have chunks of one size, so the last chunks may lie partly or wholly past the end of the weight.
        start = min(self.placement.own_chunk * self.chunk_numel, numel)
        end = min(start + self.chunk_numel, numel)
        if not isinstance(codec, BlockCodec):  # only payloads of blocks can be joined
            return make(start, end, self.chunk_numel)[0]
        # Allocate the row before the pieces, or freed pieces would leave gaps between the rows of weights.
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
        """Dequantize the whole weight, for callers that neither autograd records nor Dynamo traces. Collective."""
        rows = self.holder.gathered_payload(self, device)
        numel, padded = self.shape.numel(), rows.shape[0] * self.chunk_numel
        # Decoding writes whole chunks; a view then cuts off the padding of the last ones.
        out = torch.empty(self.shape if numel == padded else padded, dtype=dtype, device=rows.device)
        self.codec.decode_rows(rows, out)
        return out if numel == padded else out[:numel].view(self.shape)

    def dense_row(self, index: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Dequantize one matrix of a stack. The rest is decoded only if a block may span matrices. Collective."""
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
    """The local payload, uint8 [local_nbytes], of a weight that is in no unit yet; see frozen_base.py."""

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
        # The first use makes the units of the base, maybe in inference mode, and their payload shards outlive it.
        with out_of_inference_mode():
            weight.base.make_units()
        return weight.holder.gathered_payload(weight, device)


# ---- double buffer
#
# Two buffers for gathered frozen units: one for the unit in use, one to prefetch the next.
#
# A unit is gathered on demand, when the first of its weights is dequantized. So forward, backward, recomputation and
# generation are one case, and no hooks are needed. One buffer holds the unit in use. The other holds the previous unit,
# until the next one is prefetched into it. The prefetched unit is a guess: the unit that last followed the same two
# units. One unit would not tell forward from backward, which go in opposite directions. A wrong guess costs one
# gather. Ranks run the same model and request units in the same order, so they guess alike and enter the same gathers.
#
# On GPUs gathers run in a side stream. A gather waits for the computation enqueued so far, which may still read the
# buffer to overwrite. The computation waits for the gather when it reaches the gathered unit.


@dataclass
class _Buffer:
    """Memory for one gathered unit. All units reuse it, since allocations in several streams fragment memory."""

    memory: Tensor | None = None
    unit: FrozenUnit | None = None
    # Views of the memory for each unit; kept, since they are the same in every step.
    places: dict[FrozenUnit, tuple[Tensor, Sequence[Tensor]]] = field(default_factory=dict)
    parts: Sequence[Tensor] = ()
    ready: torch.cuda.Event | None = None

    def hold(self, unit: FrozenUnit) -> Tensor:
        """Return memory for the gathered payload of ``unit``, uint8 [chunks, local_nbytes of the unit]."""
        rows, nbytes = unit.placement.chunks, unit.local_nbytes
        if self.memory is None or self.memory.numel() < rows * nbytes or self.memory.device != unit.device:
            # Drop the views, too, so that the old memory is freed before the new memory is allocated.
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
    """Gathers units on demand, and prefetches the next; see the top of this section."""

    def __init__(self) -> None:
        self._current, self._other = _Buffer(), _Buffer()
        self._previous: FrozenUnit | None = None
        # _next[second][first] is the unit that followed first and second. Each second keeps its latest few firsts only:
        # with experts, the pairs change from step to step, and few recur.
        self._next: dict[FrozenUnit, dict[FrozenUnit, FrozenUnit]] = {}
        self._stream = SideStream()

    def get(self, unit: FrozenUnit) -> Sequence[Tensor]:
        """Return the gathered parts of ``unit``, valid in this stream until another unit is requested. Collective."""
        if self._current.unit is not unit:
            self._switch(unit)
        # Wait at every request, since the current stream may differ from that of the last request.
        wait_for(self._current.ready, unit.device)
        return self._current.parts

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
        # Where forward turns into backward, the expected unit is the previous one, which is still gathered.
        if expected is not None and expected is not self._other.unit:
            with labelled("prefetch", expected.label):
                self._gather(expected, self._other)

    def _gather(self, unit: FrozenUnit, buffer: _Buffer) -> None:
        # The side stream allocates the buffer, too. So freed memory goes back to a stream that has waited for the
        # computation's reads. The buffer outlives the forward, which may be in inference mode.
        with out_of_inference_mode(), self._stream.after_current(unit.device):
            out = buffer.hold(unit)
            unit.gather(out)
            buffer.ready = record_event(out)


# ---- unit
#
# Frozen weights that are gathered together, in one collective.
#
# A unit has the frozen weights of a transformer block, or of a module that FSDP wraps. This rank's chunks of all these
# weights lie side by side in one row of bytes, the *payload shard*; a gather returns the rows of all ranks of the node.
# All nodes hold the same codes, so a gather needs no inter-node hop.


class FrozenUnit:
    """The payload shard of ``weights``, which have one placement; it takes their chunks over from earlier holders."""

    def __init__(self, label: str, weights: list[FrozenWeight], traffic: Traffic, buffers: DoubleBuffer) -> None:
        self.label, self.weights = label, weights
        self.placement = weights[0].placement
        mesh, scope = self.placement.mesh, self.placement.scope
        self._intra = hop_over(mesh.intra if scope != "N" else None, "gather", "intra", traffic)
        self._buffers = buffers
        self._places = {weight: place for place, weight in enumerate(weights)}
        self._nbytes = [weight.local_nbytes for weight in weights]
        self.local_nbytes = sum(self._nbytes)
        # A unit is on one device, but parts of a model may be on several. The old chunks are freed with their holders.
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

    def move(self, device: torch.device) -> None:
        self._buffers.drop(self)  # gathered payloads are on the old device
        with out_of_inference_mode():  # a forward may call this, and the shard outlives it
            self._hold(self._shard.to(device))

    def local_payload(self, weight: FrozenWeight) -> Tensor:
        """Return this rank's chunk of ``weight``, uint8 [local_nbytes], as a view of the payload shard."""
        return self._payloads[self._places[weight]][0]

    def gathered_payload(self, weight: FrozenWeight, device: torch.device) -> Tensor:
        """Return all chunks of ``weight``, uint8 [chunks, local_nbytes], for a computation on ``device``. Collective.

        The chunks are valid until another unit is requested.
        """
        if self._shard.is_cpu and device.type != "cpu":
            # FSDP moves a model to its device without a call of Module._apply, so the codes are still on the CPU.
            self.move(device)
        parts = self._payloads if self._intra is None else self._buffers.get(self)
        return parts[self._places[weight]]

    def split(self, gathered: Tensor) -> Sequence[Tensor]:
        """Return each weight's columns of gathered rows, uint8 [rows, local_nbytes of the weight]; views."""
        return gathered.split(self._nbytes, dim=1)

    def gather(self, out: Tensor) -> None:
        """Gather the payload over the intra-node hop into ``out``, uint8 [chunks, local_nbytes]. Collective."""
        assert self._intra is not None
        self._intra.all_gather(self._shard, self.label, out)

    def _hold(self, shard: Tensor) -> None:
        self._shard, self._payloads = shard, self.split(shard)
        for codec in {weight.codec for weight in self.weights}:
            codec.prepare_decode(shard.device)
