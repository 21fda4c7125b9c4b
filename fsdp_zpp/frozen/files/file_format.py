"""Defines the format of a quantized base in safetensors files.

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_zpp.codecs.blockwise import Int4, Int8
from fsdp_zpp.codecs.nf4 import NF4
from fsdp_zpp.runtime.validation import DTYPES

from ..stored.codec import StoredCodec
from ..weight import FrozenWeight, Storable
from .tensor_files import BASE_INDEX, Header, TensorFiles, read_index

FORMAT = "fsdp_zpp"
VERSION = 1
CODES, SCALES = "codes", "scales"
REMEDY = "save the base again with save_frozen_params, into a folder of its own"
CODECS: dict[str, type[Storable]] = {"Int8": Int8, "Int4": Int4, "NF4": NF4}


@dataclass(frozen=True)
class SavedWeight:
    """Metadata of one weight in a base that was saved."""

    shape: tuple[int, ...]
    dtype: str
    codec: str
    block: int

    @classmethod
    def of(cls, weight: FrozenWeight) -> SavedWeight:
        """Return the metadata of ``weight``.

        Raises:
            ValueError: If its codec can't be stored.
        """
        if isinstance(weight.codec, StoredCodec):
            raise ValueError(
                f"{weight.name} is kept {weight.codec}, and its codes are in the checkpoint that it was read from: "
                "instead of saving them again, read that checkpoint again, or name a codec in quantize_frozen_params"
            )
        kind = type(weight.codec).__name__
        # By identity: a user's codec of the same name, or a subclass, may decode otherwise.
        if CODECS.get(kind) is not type(weight.codec):
            raise ValueError(f"{weight.name} is quantized as {weight.codec}, but only {', '.join(CODECS)} can be saved")
        assert isinstance(weight.codec, Storable)
        return cls(tuple(weight.shape), str(weight.dtype).removeprefix("torch."), kind, weight.codec.block)

    def make_codec(self) -> Storable:
        """Return the weight's codec."""
        return CODECS[self.codec](self.block)

    def torch_dtype(self) -> torch.dtype:
        """Return the weight's dtype."""
        return getattr(torch, self.dtype)

    def headers(self) -> tuple[Header, Header]:
        """Return the headers that the weight's codes and scales must have in files."""
        layout = self.make_codec().layout
        blocks = layout.blocks(torch.Size(self.shape).numel())
        codes = Header((layout.codes_nbytes(blocks * layout.block),), torch.uint8)
        return codes, Header((blocks,), torch.float32)


def full_codes(weight: FrozenWeight) -> tuple[Tensor, Tensor]:
    """Gather all codes, uint8, and scales, fp32, of a weight on the CPU. Collective."""
    # Cloned, since on a CPU they are views of a buffer that the next unit is gathered into.
    codes, scales = weight.codes_and_scales(weight.holder.gathered_payload(weight, weight.device))
    return codes.cpu().clone(), scales.cpu().clone()


def index_text(files: dict[str, str], weights: dict[str, SavedWeight]) -> str:
    """Return the text of the index."""
    described = {name: asdict(stored) for name, stored in weights.items()}
    metadata = {"format": FORMAT, "version": VERSION, "weights": described}
    return json.dumps({"metadata": metadata, "weight_map": files}, indent=1)


def read_base(folder: Path) -> tuple[TensorFiles, dict[str, SavedWeight]]:
    """Return the files of a quantized base and each weight's metadata, once headers have been checked against it.

    Raises:
        ValueError: If ``folder`` has no complete base.
    """
    path = folder / BASE_INDEX
    while True:
        if not path.exists():
            raise ValueError(f"{folder} has no {BASE_INDEX}, which save_frozen_params writes")
        content = path.read_bytes()
        try:
            return _read_base(path)
        except ValueError:
            if path.read_bytes() == content:
                raise
            # A save has replaced the index since, and removed the files that the old one named.


def _read_base(path: Path) -> tuple[TensorFiles, dict[str, SavedWeight]]:
    file_of, index = read_index(path, REMEDY)
    metadata = index.get("metadata")
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is not the index of a quantized base; {REMEDY}")
    # The first indexes had no version.
    if (version := metadata.get("version", VERSION)) != VERSION:
        raise ValueError(
            f"{path} has the format version {version!r}, but this fsdp_zpp reads version {VERSION}; load the base with "
            f"the fsdp_zpp that saved it, or {REMEDY}"
        )
    described = metadata.get("weights")
    if not isinstance(described, dict) or not described:
        raise ValueError(f"{path} is not the index of a quantized base; {REMEDY}")
    weights = {name: _saved_weight(name, metadata_of_weight, path) for name, metadata_of_weight in described.items()}
    files = TensorFiles(file_of, path, REMEDY)
    for name, stored in weights.items():
        for kind, expected in zip((CODES, SCALES), stored.headers(), strict=True):
            key = f"{name}.{kind}"
            if key not in files:
                raise ValueError(f"{path} has no {key}, but lists the weight {name}; {REMEDY}")
            if (header := files.header(key)) != expected:
                raise ValueError(
                    f"{files.file_of(key)} has {key} as {header.dtype} {header.shape}, but {name}, {stored.codec} in "
                    f"blocks of {stored.block} and of shape {stored.shape}, needs {expected.dtype} {expected.shape}; "
                    f"{REMEDY}"
                )
    for key in files:
        files.header(key)  # opens the file, which a save may remove from now on
    return files, weights


def _saved_weight(name: str, described: Any, path: Path) -> SavedWeight:
    """Return a weight's metadata.

    Raises:
        ValueError: If it does not describe a weight that a codec can have encoded.
    """
    try:
        stored = SavedWeight(tuple(described["shape"]), described["dtype"], described["codec"], described["block"])
        # The type itself, since JSON's true is an int by isinstance.
        sizes_fit = all(type(size) is int and size > 0 for size in stored.shape) and len(stored.shape) > 1
        if not sizes_fit or stored.torch_dtype() not in DTYPES:
            raise ValueError(f"a weight of shape {stored.shape} and dtype {stored.dtype}")
        stored.make_codec()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path} describes {name} as {described!r}, which is not a quantized weight ({error}); {REMEDY}"
        ) from error
    return stored
