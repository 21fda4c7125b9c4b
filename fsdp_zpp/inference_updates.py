"""Updates for an inference engine: which weights have changed since the last one, and by how much."""

from __future__ import annotations

import json
import secrets
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, cast

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from fsdp_zpp.codecs import CHUNK, DTYPES, Int4, add_changes, changes_nbytes, encode_changes, largest_scale
from fsdp_zpp.comm.agreement import check_agreement, from_first_rank, on_any_rank
from fsdp_zpp.comm.hops import all_gather_single
from fsdp_zpp.comm.mesh import for_collectives
from fsdp_zpp.runtime.full_tensors import gets

# ---- weight update
#
# A trainer's message to an inference engine about one tensor: its values, or their changes in 4 bits.

_FORMAT = "fsdp_zpp weight updates 1"
_HEADERS = "updates"


@dataclass(frozen=True, eq=False)
class WeightUpdate:
    """One tensor of a pass of ``gathered_weights(model, since=token)``, for a :class:`DeltaReceiver` to apply.

    Any transport will do. One that sends named tensors takes ``header`` as the name and ``data`` as the tensor; for
    bytes, in a file or over HTTP, there is :meth:`pack`.

    Attributes:
        name: The tensor's name in the unwrapped model.
        kind: Whether ``data`` has the values or their changes.
        dtype: The tensor's dtype.
        shape: The tensor's shape.
        stream: Identifies the token and its last pass that sent everything. Changes apply to no other stream's tensors.
        version: The number of the pass in the stream; the pass that sends everything is number 1.
        since: The version of this tensor that the changes are added to; 0 for whole tensors.
        block: Number of changes that share a scale; 0 for whole tensors.
        data: The values in ``dtype`` and ``shape``, or uint8 [n] with changes as codecs.py has them.
    """

    name: str
    kind: Literal["whole", "delta"]
    dtype: torch.dtype
    shape: tuple[int, ...]
    stream: str
    version: int
    since: int
    block: int
    data: Tensor

    def __post_init__(self) -> None:
        shape, dtype = (self.shape, self.dtype) if self.kind == "whole" else ((self._changes_nbytes(),), torch.uint8)
        if self.kind not in ("whole", "delta") or tuple(self.data.shape) != shape or self.data.dtype != dtype:
            raise ValueError(
                f"the {self.kind} update of {self.name} has data of dtype {self.data.dtype} and shape "
                f"{tuple(self.data.shape)}, but {dtype} and {shape} belong to its header; send both unchanged"
            )

    @property
    def nbytes(self) -> int:
        """Return the bytes of ``data``."""
        return self.data.nbytes

    @property
    def header(self) -> str:
        """Return everything but ``data``, as JSON.

        Its ``data_dtype`` and ``data_shape`` tell what a receiver has to allocate for ``data``.
        """
        fields = {name: value for name, value in vars(self).items() if name != "data"}
        fields |= {"dtype": _name_of(self.dtype), "data_dtype": _name_of(self.data.dtype)}
        return json.dumps(fields | {"data_shape": list(self.data.shape)})

    @classmethod
    def from_header(cls, header: str, data: Tensor) -> WeightUpdate:
        """Return the update that had this ``header`` and ``data``.

        Raises:
            ValueError: If ``header`` is no such header, or ``data`` has another dtype or shape than it says.
        """
        try:
            fields = json.loads(header)
            dtype, shape = getattr(torch, fields["dtype"]), tuple(map(int, fields["shape"]))
            version, since, block = (int(fields[key]) for key in ("version", "since", "block"))
            name, kind, stream = fields["name"], fields["kind"], fields["stream"]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{header!r} is no header of a weight update: {error!r}") from error
        return cls(name, kind, dtype, shape, stream, version, since, block, data)

    @staticmethod
    def pack(updates: Iterable[WeightUpdate]) -> bytes:
        """Return updates of different tensors as the bytes of a safetensors file, which :meth:`unpack` reads.

        All of them are in memory at once: of a large model, pack some.
        """
        tensors: dict[str, Tensor] = {}
        headers = []
        addresses: set[int] = set()
        for place, update in enumerate(updates):
            headers.append(update.header)
            data = update.data.detach().cpu().contiguous()
            # safetensors saves no memory twice, and tied tensors are the same one.
            address = data.data_ptr()
            tensors[str(place)] = data.clone() if address in addresses else data
            addresses.add(address)
        return save(tensors, metadata={"format": _FORMAT, _HEADERS: json.dumps(headers)})

    @staticmethod
    def unpack(packed: bytes) -> list[WeightUpdate]:
        """Return the updates in the bytes of :meth:`pack`, on the CPU.

        Raises:
            ValueError: If the bytes are something else.
        """
        try:
            metadata = _metadata_of(packed)
            tensors = load(packed)
        except Exception as error:  # of the kind that safetensors chooses
            raise ValueError(f"these {len(packed)} bytes are no packed weight updates: {error}") from error
        if metadata.get("format") != _FORMAT:
            raise ValueError(f"these bytes are a safetensors file, but no packed weight updates: {metadata}")
        headers = json.loads(metadata[_HEADERS])
        return [WeightUpdate.from_header(header, tensors[str(place)]) for place, header in enumerate(headers)]

    def codec(self) -> Int4:
        return Int4(self.block)

    def _changes_nbytes(self) -> int:
        return changes_nbytes(torch.Size(self.shape).numel(), self.codec())


def takes_changes(dtype: torch.dtype, numel: int, codec: Int4) -> bool:
    """Return whether changes of such a tensor can be encoded, and take fewer bytes than its values."""
    return dtype in DTYPES and changes_nbytes(numel, codec) < numel * dtype.itemsize


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _metadata_of(packed: bytes) -> dict[str, str]:
    # A safetensors file begins with 8 bytes, the length of its header, and the header in JSON.
    length = int.from_bytes(packed[:8], "little")
    metadata: dict[str, str] = json.loads(packed[8 : 8 + length]).get("__metadata__", {})
    return metadata


# ---- sync token
#
# A trainer's copy of the weights that an inference engine holds, and the updates that follow from it.
#
# The copy is spread over ranks: of each tensor, a rank has a run of chunks (codecs.py). It encodes the changes of
# those, from the gathered tensor, and an all-gather makes the update of the whole tensor. The update does not depend on
# the number of ranks.

_CALL = "gathered_weights(since=...)"


@dataclass
class _Sent:
    """A tensor that receivers hold: its version there, its place in the pass, and this rank's run of its values."""

    version: int
    place: int
    dtype: torch.dtype
    shape: torch.Size
    values: slice
    base: Tensor


class SyncToken:
    """Tracks the weights of receivers, so that ``gathered_weights(model, since=token)`` sends only changes, in 4 bits.

    The first pass with a token sends all tensors whole, later ones their changes since the last one. Every rank has
    a token of its own and passes it to each call. Receivers that get the same updates share a token; each token takes
    the bytes of the gathered weights, divided by the number of ranks, on each rank.

    If a pass is not iterated to its end, the next one sends whole tensors again.

    Args:
        block: Number of changes that share a scale, a power of two from 32 to 4096.

    Raises:
        TypeError: If ``block`` is not an int.
        ValueError: If ``block`` is not a power of two in that range.
    """

    def __init__(self, *, block: int = 256) -> None:
        self._codec = Int4(block)
        self._stream = ""
        self._version = 0
        self._complete = False
        self._sent: dict[str, _Sent] = {}

    def __repr__(self) -> str:
        return f"SyncToken(block={self._codec.block}), version {self._version} of {self._stream or 'nothing sent'}"

    @property
    def version(self) -> int:
        """Return the number of the last pass, counted from the one that sent whole tensors; 0 before that."""
        return self._version

    @property
    def nbytes(self) -> int:
        """Return the bytes of this rank's part of the copy of the receivers' weights."""
        return sum(sent.base.nbytes for sent in self._sent.values())

    def reset(self) -> None:
        """Have the next pass send whole tensors. One rank's call is enough.

        Call it when a receiver joins or raises :class:`OutOfSyncError`, and after the weights were replaced, by
        ``load_state_dict`` for example: 4 bits suit what a few steps change.
        """
        self._complete = False
        self._sent.clear()

    def updates(
        self, weights: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup | None
    ) -> Generator[tuple[str, WeightUpdate]]:
        """Yield the updates that make receivers hold ``weights``, in their order, without unchanged ones. Collective.

        Names, tensors and updates are the same on all ranks of ``group``; None means this process alone.

        Raises:
            ValueError: If ranks pass tokens with different settings, or of different passes.
        """
        self._begin(group)
        for place, (name, weight) in enumerate(weights):
            update = self._next(name, weight.detach(), place, group)
            del weight  # the receiver of its changes may take time, and has no use for it
            if update is not None:
                yield name, update
        self._complete = True

    def _begin(self, group: dist.ProcessGroup | None) -> None:
        anew = on_any_rank(not self._complete, group, _CALL)
        facts: dict[str, object] = {"block": self._codec.block}
        if not anew:
            facts |= {"version": self._version, "stream": self._stream}
        check_agreement(group, _CALL, facts)
        if anew:
            self._sent.clear()
            stream = secrets.token_hex(8)
            self._stream = stream if group is None else from_first_rank(stream, group)
            self._version = 0
        self._version += 1
        self._complete = False

    def _next(self, name: str, weight: Tensor, place: int, group: dist.ProcessGroup | None) -> WeightUpdate | None:
        sent = self._sent.get(name)
        if sent is None or sent.dtype != weight.dtype or sent.shape != weight.shape:
            return self._whole(name, weight, place, group)
        flat = weight.reshape(-1)
        if not takes_changes(weight.dtype, weight.numel(), self._codec):
            changed = not torch.equal(flat[sent.values].view(torch.uint8), sent.base.view(torch.uint8))
            return self._whole(name, weight, place, group) if on_any_rank(changed, group, _CALL) else None
        own = encode_changes(flat[sent.values], sent.base, self._codec)
        payload = _of_all_ranks(own, len(flat), sent.place, self._codec, group)
        largest = largest_scale(payload, len(flat), self._codec)
        if largest == 0:
            return None
        if not largest < float("inf"):  # a change from or to Inf or NaN, which 4 bits can't hold
            return self._whole(name, weight, place, group)
        add_changes(sent.base, own, self._codec)
        since, sent.version = sent.version, self._version
        shape = tuple(weight.shape)
        block = self._codec.block
        return WeightUpdate(name, "delta", weight.dtype, shape, self._stream, self._version, since, block, payload)

    def _whole(self, name: str, weight: Tensor, place: int, group: dist.ProcessGroup | None) -> WeightUpdate:
        values = _run_of(weight.numel(), place, group)
        base = weight.reshape(-1)[values].clone()
        self._sent[name] = _Sent(self._version, place, weight.dtype, weight.shape, values, base)
        return WeightUpdate(
            name, "whole", weight.dtype, tuple(weight.shape), self._stream, self._version, 0, 0, weight.contiguous()
        )


def check_token(since: object) -> None:
    if not (since is None or isinstance(since, SyncToken)):
        raise TypeError(f"since must be a SyncToken, which notes what receivers hold, or None, got {since!r}")


def updates_since(
    token: SyncToken, weights: Iterator[tuple[str, Tensor | None]], group: dist.ProcessGroup | None, rank: int | None
) -> Iterator[tuple[str, WeightUpdate | None]]:
    """Yield the updates of :meth:`SyncToken.updates`; on ranks other than ``rank``, if it is given, None for each."""
    with closing(token.updates(cast(Iterator[tuple[str, Tensor]], weights), group)) as updates:
        for name, update in updates:
            yield name, update if gets(rank) else None


def _chunks_of_a_run(numel: int, world: int) -> int:
    chunks = -(-numel // CHUNK)
    return -(-chunks // world)


def _run_of(numel: int, place: int, group: dist.ProcessGroup | None) -> slice:
    """Return which values of a tensor this rank has."""
    if group is None:
        return slice(0, numel)
    world = dist.get_world_size(group)
    run = (dist.get_rank(group) - place) % world  # small tensors are one run alone, so ranks take turns
    length = _chunks_of_a_run(numel, world) * CHUNK
    return slice(min(run * length, numel), min((run + 1) * length, numel))


def _of_all_ranks(own: Tensor, numel: int, place: int, codec: Int4, group: dist.ProcessGroup | None) -> Tensor:
    """Gather a tensor's changes from each rank's run, in the order of its chunks. Collective."""
    if group is None:
        return own
    world, nbytes = dist.get_world_size(group), changes_nbytes(numel, codec)
    longest = min(_chunks_of_a_run(numel, world) * codec.nbytes(CHUNK), nbytes)
    padded = own if len(own) == longest else torch.cat([own, own.new_zeros(longest - len(own))])
    padded = for_collectives(padded, group)
    gathered = padded.new_empty(world * longest)
    all_gather_single()(gathered, padded, group=group)
    in_order = gathered.view(world, longest).roll(-place % world, 0).view(-1)
    return in_order if len(in_order) == nbytes else in_order[:nbytes].clone()


# ---- delta receiver
#
# The side of an inference engine: tensors that follow a trainer's weights. It needs neither ranks nor the trainer.

_ALIGNMENT = 16


class OutOfSyncError(RuntimeError):
    """Changes are relative to a version of a tensor that this receiver does not hold; it needs whole tensors."""


class DeltaReceiver:
    """Follows the weights that a trainer sends with ``gathered_weights(model, since=token)``, bit for bit.

    It holds a copy of each tensor, in the dtype in which it is sent, to which changes are added; or the caller holds
    it, see :meth:`apply`. Several receivers may follow one token, if each gets all of its updates.

    Args:
        device: Where the copies are; None means where updates arrive. Changes are decoded on an accelerator if either
            the copies or the updates are there.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = None if device is None else torch.device(device)
        self._tensors: dict[str, Tensor] = {}
        self._versions: dict[str, tuple[str, int]] = {}

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Return the copies by name, for engines that must load all weights at once. Do not write to them."""
        return MappingProxyType(self._tensors)

    @property
    def version(self) -> int:
        """Return the number of the last pass that has sent something, 0 before the first."""
        return max((version for _, version in self._versions.values()), default=0)

    def updated(self, updates: Iterable[WeightUpdate]) -> Iterator[tuple[str, Tensor]]:
        """Apply updates one by one, and yield (name, tensor) as ``load_weights`` of engines takes them.

        The tensors are the receiver's own copies: load them, but do not write to them.

        Raises:
            OutOfSyncError: As :meth:`apply`.
        """
        for update in updates:
            yield update.name, self.apply(update)

    @torch.no_grad()
    def apply(self, update: WeightUpdate, into: Tensor | None = None) -> Tensor:
        """Apply an update. An update that arrives again, after it was applied, changes nothing.

        Args:
            update: The update.
            into: The tensor to update in place, of the update's dtype and shape and contiguous, for engines that hold
                tensors as the trainer names them: pass the same at every update, and write nothing else to it. None:
                the receiver's own copy.

        Returns:
            The tensor with its new values: ``into``, or the receiver's own copy, which later updates change.

        Raises:
            OutOfSyncError: If the changes are relative to another version than the one that is held, because updates
                were missed, or this receiver joined late. Nothing has changed; call the token's ``reset`` on the
                trainer.
            ValueError: If ``into`` has another dtype or shape, or is not contiguous.
        """
        if into is not None:
            _check_target(update, into)
        held = self._versions.get(update.name)
        target = self._tensors.get(update.name) if into is None else into
        if held == (update.stream, update.version) and target is not None:
            return target
        if update.kind == "whole":
            target = self._replace(update, into)
        else:
            if target is None or held != (update.stream, update.since):
                raise OutOfSyncError(_out_of_sync(update, held, target))
            _add(update, target)
        self._versions[update.name] = (update.stream, update.version)
        return target

    def _replace(self, update: WeightUpdate, into: Tensor | None) -> Tensor:
        if into is None:
            into = self._tensors.get(update.name)
            if into is None or into.dtype != update.dtype or into.shape != update.shape:
                into = torch.empty(update.shape, dtype=update.dtype, device=self._device or update.data.device)
            self._tensors[update.name] = into
        return into.copy_(update.data)


def _add(update: WeightUpdate, target: Tensor) -> None:
    # On an accelerator if either tensor is there: the bits are the same.
    device = update.data.device if target.device.type == "cpu" else target.device
    payload, values = update.data.to(device), target.to(device)
    if payload.storage_offset() % _ALIGNMENT or payload.data_ptr() % _ALIGNMENT or not payload.is_contiguous():
        payload = payload.clone(memory_format=torch.contiguous_format)
    add_changes(values.view(-1), payload, update.codec())
    if values is not target:
        target.copy_(values)


def _check_target(update: WeightUpdate, into: Tensor) -> None:
    if into.dtype != update.dtype or into.shape != update.shape or not into.is_contiguous():
        raise ValueError(
            f"{update.name} is {update.dtype} of shape {update.shape}, but is to be updated in a tensor of dtype "
            f"{into.dtype}, shape {tuple(into.shape)} and strides {into.stride()}; pass a contiguous one like it, or "
            "let the receiver hold a copy"
        )


def _out_of_sync(update: WeightUpdate, held: tuple[str, int] | None, target: Tensor | None) -> str:
    if held is None or target is None:
        has = "has no version of it"
    elif held[0] != update.stream:
        has = "has what was sent before everything was sent anew, or by another token"
    else:
        has = f"has version {held[1]}"
    return (
        f"version {update.version} of {update.name} changes version {update.since}, but this receiver {has}: it joined "
        "late or has missed updates; call reset() of the trainer's SyncToken, so that the next pass sends whole tensors"
    )
