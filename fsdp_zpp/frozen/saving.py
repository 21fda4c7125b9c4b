"""``save_frozen_params`` writes a quantized base to safetensors files. See the top of file_format.py."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from fsdp_zpp.collectives.agreement import from_first_rank
from fsdp_zpp.module_names import base_fqns, original_path

from .file_format import CODES, FORMAT, INDEX, SCALES, StoredWeight, full_codes, index_text
from .full_tensors import full_buffers, full_parameters
from .model_tensors import frozen_names

# With the token of a save, or without, as before saves had one; and drafts of the index.
_OURS = re.compile(rf"frozen_base-(?:[0-9a-f]{{16}}-)?[0-9]{{5}}\.safetensors|{re.escape(INDEX)}\.[0-9a-f]{{16}}")


def save_frozen_params(model: nn.Module, path: str | os.PathLike[str], *, max_file_size: int = 5 * 2**30) -> None:
    """Write the quantized base of ``model``, codes and scales, to safetensors files in a folder. Collective.

    Rank 0 gathers and writes one weight at a time. It also writes frozen parameters that are not quantized and
    persistent buffers, but neither trainable parameters nor adapters. ``load_frozen_params`` reads the files on any
    number of ranks, without quantizing again. The model in memory does not change. A base that is already in the folder
    is replaced only when the new one is completely on disk; until then the disk must have space for both.

    Args:
        model: A model whose frozen weights are quantized, sharded by FSDP or not.
        path: The folder.
        max_file_size: Bytes that a file may have; a larger weight has a file of its own.

    Raises:
        ValueError: If nothing of ``model`` is quantized, or a weight has a user-defined codec.
        RuntimeError: If rank 0 can't write; every rank raises. A base that was in the folder before is still there.
    """
    weights = {weight: names[0] for weight, names in frozen_names(model).items()}
    if not weights:
        raise ValueError(f"nothing of this {type(model).__name__} is quantized; call quantize_frozen_params first")
    stored = {name: StoredWeight.of(weight) for weight, name in weights.items()}
    left = _not_quantized(model)
    writer = _Writer(Path(path), max_file_size) if not dist.is_initialized() or dist.get_rank() == 0 else None
    for weight, name in weights.items():  # on all ranks, since gathering is collective
        codes, scales = full_codes(weight)
        if writer is not None:
            writer.add({f"{name}.{CODES}": codes, f"{name}.{SCALES}": scales})
    error = ""
    if writer is not None:
        error = writer.finish(left, stored)
    if error := from_first_rank(error):
        raise RuntimeError(f"the frozen base could not be saved to {os.fspath(path)}: {error}")


def _not_quantized(model: nn.Module) -> dict[str, Tensor]:
    """The rest of the base, by names in the base: frozen parameters and persistent buffers. Collective."""
    bases = {original_path(path): base for path, base, _ in base_fqns(model)}

    def name_of(path: str) -> str | None:
        module, _, own_name = path.rpartition(".")
        base = bases[module]
        return None if base is None else f"{base}.{own_name}".removeprefix(".")

    parameters = full_parameters(model, lambda path, p: not p.requires_grad and name_of(path) is not None)
    named = {name_of(path): tensor for path, tensor in (parameters | full_buffers(model)).items()}
    return {name: tensor for name, tensor in named.items() if name is not None}


class _Writer:
    """Writes safetensors files of limited size, and their index. See the top of file_format.py.

    It reports an error at the end only: until then the other ranks need this one in collectives.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        # A random token in file names, so that they differ from those of any earlier save, complete or cut off.
        self._folder, self._limit, self._save = folder, limit, secrets.token_hex(8)
        self._pending: dict[str, Tensor] = {}
        self._files: dict[str, str] = {}
        self._error = ""

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Put tensors into the current file, or into the next if they would make it too large."""
        nbytes = sum(tensor.nbytes for tensor in (*self._pending.values(), *tensors.values()))
        if self._pending and nbytes > self._limit:
            self._flush()
        self._pending |= tensors

    def finish(self, left: dict[str, Tensor], stored: dict[str, StoredWeight]) -> str:
        """Write the rest, and the index; returns the error if there was one, else an empty string."""
        for name, tensor in left.items():
            self.add({name: tensor})
        self._flush()
        replaced = False
        if not self._error:
            draft = self._folder / f"{INDEX}.{self._save}"
            try:
                draft.write_text(index_text(self._files, stored))
                _to_disk(draft)
                _to_disk(self._folder)  # the files' names must be on disk before an index that refers to them
                draft.replace(self._folder / INDEX)  # atomic: readers see the old index or the new one
                replaced = True
                _to_disk(self._folder)  # and the new index, before the files of the old one are removed
            except OSError as failure:
                self._error = str(failure)
        if not replaced:
            self._remove(lambda name: self._save in name)
            self._error += "; what was there before still is"
        elif not self._error:
            self._remove(lambda name: _OURS.fullmatch(name) is not None and name not in self._files.values())
        return self._error

    def _flush(self) -> None:
        name = f"frozen_base-{self._save}-{len(set(self._files.values())) + 1:05}.safetensors"
        if not self._error:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                save_file(self._pending, self._folder / name, {"format": FORMAT})
                _to_disk(self._folder / name)
            except Exception as failure:  # any at all, see the top of this class
                self._error = str(failure)
        self._files |= dict.fromkeys(self._pending, name)
        self._pending = {}

    def _remove(self, is_waste: Callable[[str], bool]) -> None:
        """Remove files of this save or of older ones; it ignores errors, since leftover files do no harm."""
        with suppress(OSError):
            for file in self._folder.glob("frozen_base*"):
                if is_waste(file.name):
                    file.unlink()


def _to_disk(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
