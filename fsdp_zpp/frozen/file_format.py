"""What the quantized base looks like in safetensors files.

[Note: Files of a frozen base]
For each weight there are two tensors: ``<name>.codes``, uint8, the codes of its flat values, and ``<name>.scales``,
fp32, one for each block. Chunks are whole blocks ([Note: Frozen chunks] in placement.py), so a chunk of any layout is
a slice of both: its payload is put together from them without quantizing again, at any world size. What is frozen but
not quantized is stored as it is, and so are the buffers that state dicts have. Names are those of the model without
adapters and wrappers. An index has the file of each tensor and, as metadata, each weight's shape, dtype and codec.

[Note: A save is all or nothing]
Each save writes files under new names, then replaces the index, then removes the files of the older base. So a folder
holds the older base until the index is replaced and the newer one afterwards, never a mix, wherever a save is cut off.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..codecs import Int4, Int8
from ..nf4 import NF4
from ..support import DTYPES
from .tensor_files import Header, TensorFiles, read_index
from .weight import FrozenWeight

INDEX = "frozen_base.safetensors.index.json"
FORMAT = "fsdp_zpp"
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
        """The headers that its codes and its scales must have in files."""
        layout = self.make_codec().layout
        blocks = layout.blocks(torch.Size(self.shape).numel())
        codes = Header((layout.codes_nbytes(blocks * layout.block),), torch.uint8)
        return codes, Header((blocks,), torch.float32)


def whole_codes(weight: FrozenWeight) -> tuple[Tensor, Tensor]:
    """All codes, uint8, and scales, fp32, of a weight, on the CPU. Collective."""
    codes, scales = codes_in(weight, weight.held.rows_of(weight, weight.device))
    return codes.cpu().clone(), scales.cpu().clone()


def codes_in(weight: FrozenWeight, rows: Tensor) -> tuple[Tensor, Tensor]:
    """All codes and scales of a weight in its chunks, uint8 [chunks, row_nbytes], without what is past its end."""
    assert isinstance(weight.codec, Storable)
    layout, chunk = weight.codec.layout, weight.chunk_numel
    start = layout.scales_offset(chunk)
    codes = rows[:, : layout.codes_nbytes(chunk)].reshape(-1)
    scales = rows[:, start : start + 4 * layout.blocks(chunk)].contiguous().view(torch.float32).reshape(-1)
    # How much of the last chunks is past the weight's end depends on the layout, how many blocks it has does not.
    blocks = layout.blocks(weight.shape.numel())
    return codes[: layout.codes_nbytes(blocks * layout.block)], scales[:blocks]


def row_from_slices(weight: FrozenWeight, codes: Any, scales: Any) -> Tensor:
    """This rank's chunk, uint8 [row_nbytes] on the CPU, of what :func:`whole_codes` returned, or slices of files."""
    assert isinstance(weight.codec, Storable)
    layout = weight.codec.layout
    row = torch.zeros(weight.row_nbytes, dtype=torch.uint8)
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
    metadata = {"format": FORMAT, "weights": {name: asdict(stored) for name, stored in weights.items()}}
    return json.dumps({"metadata": metadata, "weight_map": files}, indent=1)


def read_base(folder: Path) -> tuple[TensorFiles, dict[str, StoredWeight]]:
    """The files of a quantized base, and each weight's metadata; codes and scales are checked against it.

    Raises:
        ValueError: If ``folder`` holds no complete base.
    """
    path = folder / INDEX
    if not path.exists():
        raise ValueError(f"{folder} has no {INDEX}, which save_frozen_params writes")
    where, index = read_index(path, REMEDY)
    metadata = index.get("metadata")
    said = metadata.get("weights") if isinstance(metadata, dict) and metadata.get("format") == FORMAT else None
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
    return files, weights


def _stored_weight(name: str, said: Any, path: Path) -> StoredWeight:
    """A weight's metadata.

    Raises:
        ValueError: If it describes no weight that a codec can have encoded.
    """
    try:
        stored = StoredWeight(tuple(said["shape"]), said["dtype"], said["codec"], said["block"])
        sizes_fit = all(type(size) is int and size > 0 for size in stored.shape) and len(stored.shape) > 1
        if not sizes_fit or stored.torch_dtype() not in DTYPES:
            raise ValueError(f"a weight of shape {stored.shape} and dtype {stored.dtype}")
        stored.make_codec()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path} describes {name} as {said!r}, which is not a quantized weight ({error}); {REMEDY}"
        ) from error
    return stored
