"""What a trainer sends to an inference engine about one tensor: its values, or their changes in 4 bits."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from safetensors.torch import load, save
from torch import Tensor

from fsdp_zpp.codecs.blockwise import Int4
from fsdp_zpp.codecs.weight_changes import DTYPES, changes_nbytes

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
        data: The values in ``dtype`` and ``shape``, or uint8 [n] with changes as codecs/weight_changes.py has them.
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
        return json.dumps(
            {
                "name": self.name,
                "kind": self.kind,
                "dtype": _name_of(self.dtype),
                "shape": list(self.shape),
                "stream": self.stream,
                "version": self.version,
                "since": self.since,
                "block": self.block,
                "data_dtype": _name_of(self.data.dtype),
                "data_shape": list(self.data.shape),
            }
        )

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
        """Return updates as the bytes of a safetensors file, which :meth:`unpack` reads.

        Args:
            updates: Updates of different tensors. All of them are in memory at once: of a large model, pack some.
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
        """Return the codec of the changes."""
        return Int4(self.block)

    def _changes_nbytes(self) -> int:
        return changes_nbytes(torch.Size(self.shape).numel(), self.codec())


def takes_changes(dtype: torch.dtype, numel: int, codec: Int4) -> bool:
    """Return whether changes of such a tensor can be encoded, and take fewer bytes than its values."""
    return dtype in DTYPES and changes_nbytes(numel, codec) < numel * dtype.itemsize


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _metadata_of(packed: bytes) -> dict[str, str]:
    """Return the metadata in a safetensors file's header: 8 bytes with its length, then JSON."""
    length = int.from_bytes(packed[:8], "little")
    metadata: dict[str, str] = json.loads(packed[8 : 8 + length]).get("__metadata__", {})
    return metadata
