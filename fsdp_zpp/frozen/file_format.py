"""The format of a quantized base in safetensors files.

Each weight is two tensors: ``<name>.codes``, uint8, the codes of its flat values, and ``<name>.scales``, fp32, one for
each block. Chunks are whole blocks (see the top of placement.py), so a chunk of any layout is a slice of both: its
payload is put together from them at any world size, without quantizing again. Frozen parameters that are not quantized
are stored as they are, and so are persistent buffers. Names are FQNs without adapters and wrappers. An index has the
file of each tensor and, as metadata, each weight's shape, dtype and codec.

Each save writes files under new names, then replaces the index, then removes the files of the older base. So a folder
has the older base until the index is replaced, and the newer one afterwards, never a mix, wherever a save is cut off,
and whoever else saves into the folder; see the top of drafts.py.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_zpp.codecs.blockwise import Int4, Int8
from fsdp_zpp.codecs.nf4 import NF4
from fsdp_zpp.runtime.validation import DTYPES

from .tensor_files import Header, TensorFiles, read_index
from .weight import FrozenWeight

INDEX = "frozen_base.safetensors.index.json"
FORMAT = "fsdp_zpp"
VERSION = 1
CODES, SCALES = "codes", "scales"
REMEDY = "save the base again with save_frozen_params, into a folder of its own"
Storable = Int8 | Int4 | NF4
CODECS: dict[str, type[Storable]] = {"Int8": Int8, "Int4": Int4, "NF4": NF4}


@dataclass(frozen=True)
class StoredWeight:
    """The metadata of one weight."""

    shape: tuple[int, ...]
    dtype: str
    codec: str
    block: int

    @classmethod
    def of(cls, weight: FrozenWeight) -> StoredWeight:
        """The metadata of ``weight``.

        Raises:
            ValueError: If its codec can't be stored.
        """
        kind = type(weight.codec).__name__
        # By identity: a user's codec of the same name, or a subclass, may decode otherwise.
        if CODECS.get(kind) is not type(weight.codec):
            raise ValueError(f"{weight.name} is quantized as {weight.codec}, but only {', '.join(CODECS)} can be saved")
        assert isinstance(weight.codec, Storable)
        return cls(tuple(weight.shape), str(weight.dtype).removeprefix("torch."), kind, weight.codec.block)

    def make_codec(self) -> Storable:
        """Its codec."""
        return CODECS[self.codec](self.block)

    def torch_dtype(self) -> torch.dtype:
        """Its dtype."""
        return getattr(torch, self.dtype)

    def headers(self) -> tuple[Header, Header]:
        """The headers that its codes and scales must have in files."""
        layout = self.make_codec().layout
        blocks = layout.blocks(torch.Size(self.shape).numel())
        codes = Header((layout.codes_nbytes(blocks * layout.block),), torch.uint8)
        return codes, Header((blocks,), torch.float32)


def check_folder(path: object) -> Path:
    """The folder that the argument ``path`` names.

    Raises:
        TypeError: If it is no path.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a folder, as a str or a path, got {path!r}")
    return Path(path)


def full_codes(weight: FrozenWeight) -> tuple[Tensor, Tensor]:
    """All codes, uint8, and scales, fp32, of a weight, on the CPU. Collective."""
    # Cloned, since on a CPU they are views of a buffer that the next unit is gathered into.
    codes, scales = codes_and_scales(weight, weight.holder.gathered_payload(weight, weight.device))
    return codes.cpu().clone(), scales.cpu().clone()


def codes_and_scales(weight: FrozenWeight, rows: Tensor) -> tuple[Tensor, Tensor]:
    """All codes and scales of a weight, without padding, given its chunks, uint8 [chunks, local_nbytes].

    Returns:
        Codes, flat uint8, and scales, fp32 [blocks].
    """
    assert isinstance(weight.codec, Storable)
    layout, chunk = weight.codec.layout, weight.chunk_numel
    start = layout.scales_offset(chunk)
    codes = rows[:, : layout.codes_nbytes(chunk)].reshape(-1)
    scales = rows[:, start : start + 4 * layout.blocks(chunk)].contiguous().view(torch.float32).reshape(-1)
    # The layout decides how much padding the last chunks have, but not how many blocks the weight has.
    blocks = layout.blocks(weight.shape.numel())
    return codes[: layout.codes_nbytes(blocks * layout.block)], scales[:blocks]


def local_payload_from_slices(weight: FrozenWeight, codes: Any, scales: Any) -> Tensor:
    """The local payload, uint8 [local_nbytes] on the CPU, of a weight.

    Args:
        weight: The weight.
        codes: All of its codes; only this rank's are indexed, so that it may be a slice of a file, which reads lazily.
        scales: All of its scales, likewise.
    """
    assert isinstance(weight.codec, Storable)
    layout = weight.codec.layout
    row = torch.zeros(weight.local_nbytes, dtype=torch.uint8)
    end_of_all = layout.blocks(weight.shape.numel())
    per_chunk = weight.chunk_numel // layout.block
    first = min(weight.placement.own_chunk * per_chunk, end_of_all)
    last = min(first + per_chunk, end_of_all)
    if first == last:
        return row
    nbytes = layout.codes_nbytes(layout.block)
    row[: (last - first) * nbytes] = codes[first * nbytes : last * nbytes]
    start = layout.scales_offset(weight.chunk_numel)
    row[start : start + 4 * (last - first)] = scales[first:last].view(torch.uint8)
    return row


def index_text(files: dict[str, str], weights: dict[str, StoredWeight]) -> str:
    """The text of the index."""
    described = {name: asdict(stored) for name, stored in weights.items()}
    metadata = {"format": FORMAT, "version": VERSION, "weights": described}
    return json.dumps({"metadata": metadata, "weight_map": files}, indent=1)


def read_base(folder: Path) -> tuple[TensorFiles, dict[str, StoredWeight]]:
    """The files of a quantized base, all open, and each weight's metadata, by which the files' headers are checked.

    Raises:
        ValueError: If ``folder`` has no complete base.
    """
    path = folder / INDEX
    while True:
        if not path.exists():
            raise ValueError(f"{folder} has no {INDEX}, which save_frozen_params writes")
        before = path.read_bytes()
        try:
            return _read_base(path)
        except ValueError:
            if path.read_bytes() == before:
                raise
            # A save has replaced the index since, and removed the files that the old one named.


def _read_base(path: Path) -> tuple[TensorFiles, dict[str, StoredWeight]]:
    where, index = read_index(path, REMEDY)
    metadata = index.get("metadata")
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is not the index of a quantized base; {REMEDY}")
    # The first indexes had no version.
    if (version := metadata.get("version", VERSION)) != VERSION:
        raise ValueError(
            f"{path} has the format version {version!r}, but this fsdp_zpp reads version {VERSION}; load the base with "
            f"the fsdp_zpp that saved it, or {REMEDY}"
        )
    said = metadata.get("weights")
    if not isinstance(said, dict) or not said:
        raise ValueError(f"{path} is not the index of a quantized base; {REMEDY}")
    weights = {name: _stored_weight(name, of_it, path) for name, of_it in said.items()}
    files = TensorFiles(where, path, REMEDY)
    for name, stored in weights.items():
        for kind, expected in zip((CODES, SCALES), stored.headers(), strict=True):
            key = f"{name}.{kind}"
            if key not in files:
                raise ValueError(f"{path} has no {key}, but lists the weight {name}; {REMEDY}")
            if (found := files.header(key)) != expected:
                raise ValueError(
                    f"{files.file_of(key)} has {key} as {found.dtype} {found.shape}, but {name}, {stored.codec} in "
                    f"blocks of {stored.block} and of shape {stored.shape}, needs {expected.dtype} {expected.shape}; "
                    f"{REMEDY}"
                )
    for key in files:
        files.header(key)  # opens the file, which a save may remove from now on
    return files, weights


def _stored_weight(name: str, said: Any, path: Path) -> StoredWeight:
    """A weight's metadata.

    Raises:
        ValueError: If it does not describe a weight that a codec can have encoded.
    """
    try:
        stored = StoredWeight(tuple(said["shape"]), said["dtype"], said["codec"], said["block"])
        # The type itself, since JSON's true is an int by isinstance.
        sizes_fit = all(type(size) is int and size > 0 for size in stored.shape) and len(stored.shape) > 1
        if not sizes_fit or stored.torch_dtype() not in DTYPES:
            raise ValueError(f"a weight of shape {stored.shape} and dtype {stored.dtype}")
        stored.make_codec()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path} describes {name} as {said!r}, which is not a quantized weight ({error}); {REMEDY}"
        ) from error
    return stored
