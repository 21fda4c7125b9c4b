"""The interface of formats in which checkpoints store quantized weights, and checks of settings and headers."""

from __future__ import annotations

import dataclasses
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from fsdp_zpp.codecs import BlockCodec, Codec, Place

# ---- records
#
# A record holds the bytes of a group of values: their codes, scales, and zero points if the format has any.
#
# A group decodes on its own, and all records of a weight have the same length. So a chunk of a weight is a sequence of
# records, and a slice of that sequence decodes on its own, too.

_FIELD_ALIGNMENT = 4  # bytes; each field starts at a multiple of it, so that scales can be viewed in their dtype


class Field(NamedTuple):
    """A part of a record, in a dtype of at most 4 bytes; ``shape`` is its shape in one record."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class RecordLayout:
    """The layout of a record, whose fields follow one after the other."""

    def __init__(self, *fields: Field) -> None:
        self.fields, self.nbytes = fields, 0
        self._starts: list[int] = []
        for field in fields:
            self._starts.append(self.nbytes)
            self.nbytes += -(-field.nbytes // _FIELD_ALIGNMENT) * _FIELD_ALIGNMENT

    def split(self, records: Tensor) -> dict[str, Tensor]:
        """Return a view of each field in all records, [records, *shape] in the field's dtype, by the field's name.

        The records, uint8 [records, nbytes], need not be adjacent in memory, but each is contiguous.
        """
        return {
            field.name: records[:, start : start + field.nbytes].view(field.dtype).unflatten(1, field.shape)
            for field, start in zip(self.fields, self._starts, strict=True)
        }

    def pack(self, count: int, **values: Tensor) -> Tensor:
        """Return ``count`` records, uint8 [count, nbytes]; ``values`` has the values of each field, record by record.

        Zeros take the place of missing values: the last group may have fewer rows than the others.
        """
        records = next(iter(values.values())).new_zeros((count, self.nbytes), dtype=torch.uint8)
        for field, start in zip(self.fields, self._starts, strict=True):
            flat = values[field.name].contiguous().view(-1).view(torch.uint8)
            whole = len(flat) // field.nbytes
            place = records[:, start : start + field.nbytes]
            place[:whole] = flat[: whole * field.nbytes].view(whole, field.nbytes)
            if whole < count:
                rest = flat[whole * field.nbytes :]
                place[whole, : len(rest)] = rest
        return records


# ---- codec
#
# The codec of a weight that stays as it is stored. A chunk is a sequence of records, which the weight's format decodes.

_PAYLOAD_ALIGNMENT = 16  # bytes; a payload's size is a multiple of it, so that the next payload is aligned as well


@dataclass(frozen=True)
class StoredCodec(BlockCodec):
    """Decodes records, and encodes nothing. Two codecs are equal if they decode records in the same way.

    Attributes:
        description: Text that tells formats apart; see :class:`StoredFormat`.
        block: The number of values in a group.
    """

    places: ClassVar[tuple[Place, ...]] = ("frozen",)

    description: str
    block: int
    record_nbytes: int
    decode_into: Callable[[Tensor, Tensor], None] = dataclasses.field(compare=False, repr=False)

    def __str__(self) -> str:
        return f"as stored, {self.description}"

    def nbytes(self, numel: int) -> int:
        records = -(-numel // self.block) * self.record_nbytes
        return -(-records // _PAYLOAD_ALIGNMENT) * _PAYLOAD_ALIGNMENT

    def blocks(self, payload: Tensor, numel: int) -> tuple[Tensor, ...]:
        return (self.records(payload, numel),)

    def records(self, payload: Tensor, numel: int) -> Tensor:
        """Return a payload, uint8 [chunks, nbytes(numel)], as records [chunks, groups, record_nbytes]."""
        groups = -(-numel // self.block)
        return payload[:, : groups * self.record_nbytes].unflatten(1, (groups, self.record_nbytes))

    def prepare_decode(self, device: torch.device) -> None:
        if device.type == "cuda":  # the first decoding copies a format's table to the device, and the CPU waits for it
            record = torch.zeros(1, self.record_nbytes, dtype=torch.uint8, device=device)
            self.decode_into(record, torch.empty(self.block, device=device))

    def decode(self, payload: Tensor, out: Tensor, rows: int, cols: int) -> None:
        if rows > 1 and cols > 1:
            self._refuse()
        self.decode_rows(payload, out)

    def decode_rows(self, payload: Tensor, out: Tensor) -> None:
        numel = out.numel() // len(payload)
        flat = out.view(len(payload), numel)
        for records, values in zip(self.records(payload, numel), flat, strict=True):
            self.decode_into(records, values)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"{self} keeps codes of frozen weights, and neither encodes nor sums values")

    encode = decode_sum = _refuse


# ---- format
#
# A format in which a checkpoint stores a weight: the weight's tensors, and how they decode.

_READ = 2**18  # values to read and decode at a time, since decoding takes several times their memory in fp32
_DECODED_ON_GPUS = 2**24  # values to decode at a time on GPUs: with fewer, a kernel's launch takes longer than its run

REMEDY = "give a complete checkpoint, downloaded again"


class NoStackError(ValueError):
    """Raised if matrices can't be stacked without being decoded."""


class TensorHeader(NamedTuple):
    """The shape and dtype of a stored tensor; ``dtype`` is the name in the file if torch has no such dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str


class StoredTensors(Protocol):
    """The tensors of a checkpoint, by name."""

    def __contains__(self, key: str) -> bool: ...

    def __iter__(self) -> Iterator[str]: ...

    def header(self, key: str) -> TensorHeader: ...

    def read(self, key: str) -> Tensor:
        """Return a small tensor as a whole."""


Parts = Mapping[str, Any]  # the tensors of a weight by their roles: tensors, or lazy slices of files


@dataclass(frozen=True, eq=False)
class StoredFormat(ABC):
    """One weight, or a stack of weights, in a format of checkpoints. Subclass it to add a format.

    Attributes:
        name: The format's name, in logs and errors.
        shape: The shape of the decoded weight.
        dtype: The dtype that the weight decodes to by default.
        keys: The names of the weight's tensors in the checkpoint, by their roles.
    """

    name: ClassVar[str]

    shape: torch.Size
    dtype: torch.dtype
    keys: Mapping[str, str]

    @classmethod
    @abstractmethod
    def at(cls, key: str, tensors: StoredTensors, config: Settings) -> tuple[str, StoredFormat] | None:
        """If ``key`` is the main tensor of a weight, return the weight's name in the model and its format; else None.

        Each weight has one main tensor, such as its codes. This method is called for each tensor of a checkpoint, so it
        must read nothing but headers, and small tensors that describe others.

        Raises:
            ValueError: If a tensor is missing, or its shape or dtype does not fit; see :func:`check_header`.
        """

    @property
    @abstractmethod
    def layout(self) -> RecordLayout:
        """Return the layout of a record."""

    @property
    def rows_per_group(self) -> int:
        """Return how many neighbouring rows of the decoded weight form a group."""
        return 1

    @property
    def group_numel(self) -> int:
        """Return how many consecutive values of the flat, decoded weight form a group."""
        return self.rows_per_group * self.shape[-1]

    @property
    def description(self) -> str:
        """Return text that is the same for two weights if and only if their records decode in the same way."""
        return f"{self.name}, {self.shape[-1]} columns"

    @abstractmethod
    def pack(self, parts: Parts, first: int, last: int) -> Tensor:
        """Read only the groups ``first`` to ``last - 1`` as records; ``last`` is greater than ``first``.

        Returns:
            uint8 [last - first, layout.nbytes]. Zeros pad the weight's last group.
        """

    @abstractmethod
    def decode(self, *args: Any, **fields: Any) -> Tensor:
        """Decode fields, each [groups, *field.shape], to floats [groups, ...] in the order of the weight's values."""

    @property
    def codec(self) -> Codec:
        """Return the codec of a weight that stays as stored; a subclass may return one of equal codes, such as NF4."""
        return StoredCodec(self.description, self.group_numel, self.layout.nbytes, self.decode_into)

    def payload(self, records: Tensor) -> Tensor:
        """Return records as a payload of :attr:`codec`, uint8 [nbytes]."""
        payload = records.new_zeros(self.codec.nbytes(len(records) * self.group_numel))
        payload[: records.numel()] = records.view(-1)
        return payload

    def refuse_infinite(self, records: Tensor) -> None:
        """Raise ValueError if scales in ``records`` are NaN or infinite, since decoded values would be, too."""
        for field in self.layout.split(records).values():
            if field.is_floating_point() and not field.float().isfinite().all():
                name = next(iter(self.keys.values()), f"a weight in {self.name}")
                raise ValueError(f"{name} has scales that are NaN or infinite; {REMEDY}")

    @property
    def num_groups(self) -> int:
        """Return the number of groups in the weight; the last one may be incomplete."""
        return -(-self.shape.numel() // self.group_numel)

    def decode_into(self, records: Tensor, out: Tensor) -> None:
        """Decode records into ``out``, [groups * group_numel] in any floating dtype, a few at a time to save memory."""
        step = max(1, (_DECODED_ON_GPUS if records.is_cuda else _READ) // self.group_numel)
        for first in range(0, len(records), step):
            some = self.decode(**self.layout.split(records[first : first + step])).flatten()
            out[first * self.group_numel :][: some.numel()] = some


@dataclass(frozen=True)
class StoredWeight:
    """A weight as it is stored; ``records(first, last)`` reads the records of at least one group."""

    format: StoredFormat
    records: Callable[[int, int], Tensor]

    @property
    def shape(self) -> torch.Size:
        return self.format.shape

    def values(self, first: int, last: int, dtype: torch.dtype = torch.float32) -> Tensor:
        size = self.format.group_numel
        begin, end = first // size, -(-last // size)
        values = torch.empty((end - begin) * size, dtype=dtype)
        step = max(1, _READ // size)
        for group in range(begin, end, step):
            records = self.records(group, min(group + step, end))
            if values.device != records.device:
                values = values.to(records.device)
            self.format.decode_into(records, values[(group - begin) * size :])
        return values[first - begin * size :][: last - first]

    def payload(self, first: int, last: int) -> Tensor:
        """Return groups ``first`` to ``last - 1`` as a payload of ``format.codec``, uint8; scales must be finite."""
        records = self.records(first, last)
        self.format.refuse_infinite(records)
        return self.format.payload(records)


def stored_in(format: StoredFormat, parts: Parts) -> StoredWeight:
    return StoredWeight(format, partial(format.pack, parts))


def stacked(matrices: Sequence[Sequence[StoredWeight]], name: str) -> StoredWeight:
    """Return a stack of matrices; ``matrices[i]`` lists the weights that form matrix ``i``, top to bottom.

    Raises:
        NoStackError: If the weights have different formats, or a weight has an incomplete group.
    """
    parts = [part for matrix in matrices for part in matrix]
    first = parts[0].format
    size = first.group_numel
    if any(part.format.description != first.description or part.format.group_numel != size for part in parts):
        raise NoStackError(
            f"the matrices of {name} are stored in different formats; give a codec in place of 'as stored'"
        )
    if ragged := [part for part in parts if part.shape.numel() % size]:
        raise NoStackError(
            f"the stack {name} can't stay as stored: a matrix of shape {tuple(ragged[0].shape)} has no whole number of "
            f"blocks in {first.description}; give a codec in place of 'as stored'"
        )
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + part.format.num_groups)

    def records(begin: int, end: int) -> Tensor:
        pieces = [
            part.records(max(begin - start, 0), min(end - start, part.format.num_groups))
            for part, start in zip(parts, starts, strict=False)
            if begin < start + part.format.num_groups and start < end
        ]
        return torch.cat(pieces)

    rows = sum(part.shape[0] for part in matrices[0])
    shape = torch.Size((len(matrices), rows, *first.shape[1:]))
    return StoredWeight(dataclasses.replace(first, shape=shape), records)


def refuse_misfit(key: str, found: object, expected: object) -> NoReturn:
    raise ValueError(f"the checkpoint has {key} as {found}, but its weight needs {expected}; {REMEDY}")


# ---- settings
#
# Settings in the ``quantization_config`` of a checkpoint's ``config.json``. The file may hold anything.
#
# Each quantization method has a table of known settings, with the values that can be read. Some settings don't concern
# the weights. Unknown settings are refused, since they may change the meaning of codes, as a rotation of the weights
# does.

T = TypeVar("T")

Settings = Mapping[str, Any]
# The values that each setting may have; None allows any. Strings are compared in lower case.
Known = Mapping[str, tuple[Any, ...] | None]

_KINDS = {dict: "a mapping", list: "a list", str: "a string", bool: "true or false", int: "a whole number"}


def refuse_unknown(format: str, settings: Settings, known: Known, within: str = "") -> None:
    """Raise ValueError if ``settings`` has unknown settings or values. Null and empty values count as absent.

    ``within`` is the path of ``settings`` in ``quantization_config``, for errors: empty, or ending with a dot.
    """
    for key, value in settings.items():
        if value is None or value in ({}, []):
            continue
        if key not in known:
            raise ValueError(
                f"config.json beside the checkpoint has {within}{key} {reprlib.repr(value)} in its "
                f"quantization_config, which is not known for {format} and may change what the codes mean; dequantize "
                f"the checkpoint with the library that wrote it, or remove {key} from config.json if it says nothing "
                "of the weights"
            )
        allowed = known[key]
        if allowed is not None and (value.lower() if isinstance(value, str) else value) not in allowed:
            refuse_setting(
                format, within + key, value, " and ".join(map(str, allowed)) or "only checkpoints without it"
            )


def refuse_setting(format: str, setting: str, value: object, allowed: str) -> NoReturn:
    raise ValueError(
        f"the checkpoint is in {format} with {setting} {reprlib.repr(value)}, and {allowed} can be read; dequantize it "
        "with the library that wrote it, or give another checkpoint"
    )


def setting(settings: Settings, key: str, kind: type[T]) -> T | None:
    """Return a setting, checked to be of the type ``kind``; None if it is missing or null."""
    value = settings.get(key)
    if value is None or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
        return value
    raise ValueError(
        f"config.json beside the checkpoint has {key} {value!r}, and {_KINDS[kind]} belongs there; {REMEDY}"
    )


def block_size(settings: Settings, key: str) -> tuple[int, int] | None:
    """Return the height and width of blocks; None if the setting is missing or null."""
    stated = setting(settings, key, list)
    if stated is None:
        return None
    if len(stated) != 2 or not all(type(size) is int and size > 0 for size in stated):
        raise ValueError(
            f"config.json beside the checkpoint has {key} {stated!r}, and two sizes belong there; {REMEDY}"
        )
    return stated[0], stated[1]


# ---- headers
#
# Checks of the shapes and dtypes of stored tensors.


def check_header(
    tensors: StoredTensors, key: str, *dtypes: torch.dtype, shape: Sequence[int | None] | None = (None, None)
) -> tuple[int, ...]:
    """Check the dtype and shape of a stored tensor and return its shape; None allows any shape, or any size in it."""
    if key not in tensors:
        raise ValueError(f"the checkpoint has no {key}, though it has other tensors of the same weight; {REMEDY}")
    found, dtype = tensors.header(key)
    if dtype not in dtypes:
        refuse_misfit(key, dtype, " or ".join(map(str, dtypes)))
    if shape is None:
        return found
    if len(found) != len(shape) or any(want not in (None, size) for size, want in zip(found, shape, strict=True)):
        expected = tuple("any" if size is None else size for size in shape)
        refuse_misfit(key, f"a tensor of shape {found}", f"shape {expected}")
    return found


def shape_of(part: Any) -> torch.Size:
    """Return the shape of a tensor, or of a lazy slice of a file."""
    return part.shape if isinstance(part, Tensor) else torch.Size(part.get_shape())
