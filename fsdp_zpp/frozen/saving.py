"""``save_frozen_params``: the quantized base to safetensors files. See [Note: Files of a frozen base]."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from .base import parameter_name
from .file_format import StoredWeight, whole_codes, write_index
from .module import frozen_sites
from .source import stored_name
from .weight import FrozenWeight
from .whole import whole_parameters


def save_frozen_params(model: nn.Module, path: str | os.PathLike[str], *, max_file_size: int = 5 * 2**30) -> None:
    """Write the quantized base of ``model``, codes and scales, to safetensors files in a folder. Collective.

    Rank 0 writes, one weight at a time. :func:`load_frozen_params` reads them on as many ranks as there are then,
    without quantizing again. The model in memory stays as it is.

    Args:
        model: A model whose frozen weights are quantized, sharded by FSDP or not.
        path: The folder.
        max_file_size: Bytes after which there is another file.

    Raises:
        ValueError: If nothing of ``model`` is quantized, or by a codec of one's own.
        RuntimeError: If rank 0 could not write; on every rank.
    """
    weights: dict[FrozenWeight, str] = {}
    for path, _, own_name, weight in frozen_sites(model):
        weights.setdefault(weight, stored_name(parameter_name(path, own_name)))
    if not weights:
        raise ValueError(f"nothing of this {type(model).__name__} is quantized; see quantize_frozen_params")
    stored = {name: StoredWeight.of(weight) for weight, name in weights.items()}
    left = whole_parameters(model, lambda name, p: not p.requires_grad and "lora_" not in name)
    writer = _Writer(Path(path), max_file_size) if not dist.is_initialized() or dist.get_rank() == 0 else None
    for weight, name in weights.items():
        codes, scales = whole_codes(weight)
        if writer is not None:
            writer.add({f"{name}.codes": codes, f"{name}.scales": scales})
    error = ""
    if writer is not None:
        error = writer.finish({stored_name(name): tensor for name, tensor in left.items()}, stored)
    if dist.is_initialized():
        said = [error]
        dist.broadcast_object_list(said, src=0)
        (error,) = said
    if error:
        raise RuntimeError(f"the frozen base could not be saved to {os.fspath(path)}: {error}")


class _Writer:
    """Safetensors files of limited size. What goes wrong is said at the end: other ranks wait in collectives."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._pending: dict[str, Tensor] = {}
        self._files: dict[str, str] = {}
        self._error = ""

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Put tensors into the file at hand, or another."""
        nbytes = sum(tensor.nbytes for tensor in (*self._pending.values(), *tensors.values()))
        if self._pending and nbytes > self._limit:
            self._flush()
        self._pending |= tensors

    def finish(self, left: dict[str, Tensor], stored: dict[str, StoredWeight]) -> str:
        """Write the rest, and the index; returns what went wrong, if anything did."""
        self.add(left)
        self._flush()
        if not self._error:
            try:
                write_index(self._folder, self._files, stored)
            except OSError as failure:
                self._error = str(failure)
        return self._error

    def _flush(self) -> None:
        name = f"frozen_base-{len(set(self._files.values())) + 1:05}.safetensors"
        if not self._error:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                save_file(self._pending, self._folder / name, {"format": "fsdp_zpp"})
            except Exception as failure:
                self._error = str(failure)
        self._files |= dict.fromkeys(self._pending, name)
        self._pending = {}
