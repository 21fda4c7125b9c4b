"""A format in which a checkpoint stores a weight: the tensors that it consists of, and how they decode."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NoReturn, Protocol

import torch
from torch import Tensor

from fsdp_zpp.codecs.base import Codec

from .codec import StoredCodec
from .records import RecordLayout

_READ = 2**18
"""Values that are read and decoded at a time, since decoding takes several times their memory in fp32."""
_DECODED_ON_GPUS = 2**24
"""Values that GPUs decode at a time: with fewer of them, launching kernels would take longer than they do."""

REMEDY = "give a complete checkpoint, downloaded again"


class NoStackError(ValueError):
    """Matrices can't be put together as a stack without being decoded."""


class StoredTensors(Protocol):
    """Tensors of a checkpoint, by name, as formats look for theirs."""

    def __contains__(self, key: str) -> bool: ...

    def __iter__(self) -> Iterator[str]: ...

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""

    def dtype(self, key: str) -> torch.dtype | str:
        """Return the dtype of a tensor, or its name in the file if torch has none."""

    def read(self, key: str) -> Tensor:
        """Return a small tensor as a whole."""


Parts = Mapping[str, Any]
"""The tensors of a weight by their roles: tensors, or slices of files, which read what they are indexed with."""


@dataclass(frozen=True, eq=False)
class StoredFormat(ABC):
    """A format, and how one weight, or a stack of them, is stored in it. Subclass it to add a format.

    Attributes:
        shape: The weight's shape, decoded.
        dtype: The dtype that it decodes to where nothing names another one.
        keys: The names of the weight's tensors in the checkpoint, by their roles.
    """

    name: ClassVar[str]
    """The format's name, in logs and errors."""

    shape: torch.Size
    dtype: torch.dtype
    keys: Mapping[str, str]

    @classmethod
    @abstractmethod
    def find(cls, tensors: StoredTensors, config: Mapping[str, Any]) -> Mapping[str, StoredFormat]:
        """Return the weights of a checkpoint that are stored in this format, by their names in the model.

        Read no more than headers, and small tensors that describe others: it is called for all of a checkpoint.

        Args:
            tensors: The tensors.
            config: ``quantization_config`` of ``config.json``; empty if there is none.

        Raises:
            ValueError: If a tensor is missing or has a shape or dtype that does not fit; :func:`refuse_misfit` does so.
        """

    @property
    @abstractmethod
    def layout(self) -> RecordLayout:
        """Return what a group's record holds."""

    @property
    @abstractmethod
    def group_numel(self) -> int:
        """Return how many consecutive values of the flat, decoded weight decode on their own."""

    @property
    @abstractmethod
    def description(self) -> str:
        """Return text that is the same for two weights if and only if their records decode in the same way."""

    @abstractmethod
    def pack(self, parts: Parts, first: int, last: int) -> Tensor:
        """Read the records of groups ``first`` to ``last - 1``, and no others.

        Args:
            parts: The weight's tensors by the roles of ``keys``.
            first: The first group.
            last: The end of the groups, of which there is at least one.

        Returns:
            uint8 [last - first, layout.nbytes]. Zeros complete the weight's last group.
        """

    @abstractmethod
    def decode(self, records: Tensor) -> Tensor:
        """Decode records.

        Args:
            records: uint8 [groups, layout.nbytes]; they may lie apart, each is contiguous.

        Returns:
            fp32 [groups, group_numel].
        """

    @property
    def codec(self) -> Codec:
        """Return the codec of weights that stay as stored: one of the library's own if that has the same codes."""
        return StoredCodec(self.description, self.group_numel, self.layout.nbytes, self.decode_into)

    def payload(self, records: Tensor) -> Tensor:
        """Return records as a payload of ``codec``, uint8 [nbytes]."""
        payload = records.new_zeros(self.codec.nbytes(len(records) * self.group_numel))
        payload[: records.numel()] = records.view(-1)
        return payload

    def refuse_infinite(self, records: Tensor) -> None:
        """Raise if scales in ``records`` are NaN or infinite: values that they decode to would be, too.

        Raises:
            ValueError: It names the weight.
        """
        for field in self.layout.fields:
            if field.dtype.is_floating_point and not self.layout.get(records, field.name).float().isfinite().all():
                name = next(iter(self.keys.values()), f"a weight in {self.name}")
                raise ValueError(f"{name} has scales that are NaN or infinite; {REMEDY}")

    @property
    def groups(self) -> int:
        """Return the number of the weight's groups, of which the last may be incomplete."""
        return -(-self.shape.numel() // self.group_numel)

    def decode_into(self, records: Tensor, out: Tensor) -> None:
        """Decode records into ``out``, [groups * group_numel] in any floating dtype, some at a time."""
        step = max(1, (_DECODED_ON_GPUS if records.is_cuda else _READ) // self.group_numel)
        for first in range(0, len(records), step):
            some = self.decode(records[first : first + step])
            out[first * self.group_numel :][: some.numel()] = some.view(-1)


@dataclass(frozen=True)
class StoredWeight:
    """A weight as it is stored, and how its records are read.

    Attributes:
        format: The format.
        records: Returns the records of groups ``first`` to ``last - 1``, at least one.
    """

    format: StoredFormat
    records: Callable[[int, int], Tensor]

    @property
    def shape(self) -> torch.Size:
        """Return the weight's shape, decoded."""
        return self.format.shape

    def values(self, first: int, last: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Read and decode the flat values ``first`` to ``last - 1``."""
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
        """Return groups ``first`` to ``last - 1`` as a payload of ``format.codec``, uint8 [nbytes].

        Raises:
            ValueError: If their scales are NaN or infinite.
        """
        records = self.records(first, last)
        self.format.refuse_infinite(records)
        return self.format.payload(records)


def stored_in(format: StoredFormat, parts: Parts) -> StoredWeight:
    """Return the weight that consists of ``parts``."""

    return StoredWeight(format, partial(format.pack, parts))


def stacked(matrices: Sequence[Sequence[StoredWeight]], name: str) -> StoredWeight:
    """Return the stack of matrices that consist, from top to bottom, of the weights in each row of ``matrices``.

    Raises:
        NoStackError: If the weights don't have one format, or do not consist of whole groups.
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
        starts.append(starts[-1] + part.format.groups)

    def records(begin: int, end: int) -> Tensor:
        pieces = [
            part.records(max(begin - start, 0), min(end - start, part.format.groups))
            for part, start in zip(parts, starts, strict=False)
            if begin < start + part.format.groups and start < end
        ]
        return torch.cat(pieces)

    rows = sum(part.shape[0] for part in matrices[0])
    shape = torch.Size((len(matrices), rows, *first.shape[1:]))
    return StoredWeight(dataclasses.replace(first, shape=shape), records)


def refuse_misfit(key: str, found: object, expected: object) -> NoReturn:
    """Raise the error about a tensor that is not what the weight that it belongs to needs."""
    raise ValueError(f"the checkpoint has {key} as {found}, but its weight needs {expected}; {REMEDY}")
