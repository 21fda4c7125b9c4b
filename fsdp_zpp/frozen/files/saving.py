"""Writes a quantized base to safetensors files: ``save_frozen_params``. See the top of file_format.py."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn

from fsdp_zpp.collectives.agreement import agree, from_first_rank
from fsdp_zpp.module_names import base_fqns, original_path
from fsdp_zpp.runtime.model_ranks import ranks_of
from fsdp_zpp.runtime.tensors_of_model import tensors_of
from fsdp_zpp.runtime.validation import check_folder, check_module

from ..full_tensors import on_first_rank
from ..weight import FrozenWeight
from .base_writer import BaseWriter
from .file_format import CODES, SCALES, SavedWeight, full_codes
from .model_tensors import frozen_names

_SIZE = re.compile(r"([0-9]+|[0-9]*\.[0-9]+)\s*([KMGT])B", re.IGNORECASE)


def save_frozen_params(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_file_size: int | str = 5 * 2**30,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write the quantized base of ``model``, codes and scales, to safetensors files in a folder. Collective.

    The model's first rank gathers and writes one weight at a time. It also writes frozen parameters that are not
    quantized and persistent buffers, but neither trainable parameters nor adapters. ``load_frozen_params`` reads the
    files on any number of ranks, without quantizing again. The model in memory does not change. A base that is already
    in the folder is replaced only when the new one is completely on disk; until then the disk must have space for both.
    If several jobs save into one folder, it has the base of the last that is complete.

    Args:
        model: A model whose frozen weights are quantized, sharded by FSDP or not.
        path: The folder.
        max_file_size: Bytes that a file may have, or a text such as ``"5GB"``, as transformers takes it for
            ``max_shard_size``; a larger weight has a file of its own.
        process_group: The ranks of the model, of which the first writes. Default: those that the base is sharded over.

    Raises:
        TypeError: If an argument has the wrong type, on any rank; every rank raises.
        ValueError: If no weight of ``model`` is quantized, a weight has a user-defined codec, or ``max_file_size`` is
            not a size, on any rank; every rank raises.
        RuntimeError: If the first rank can't write; every rank raises. A base that was in the folder before is still
            there.
    """
    group = ranks_of(model, process_group)
    task = agree(
        group,
        lambda: _check(model, path, max_file_size),
        lambda task: repr(list(task.stored.items())),
        "called save_frozen_params with other quantized weights than",
    )
    rest = _not_quantized(model, group)
    writer = BaseWriter(task.folder, task.limit) if group is None or dist.get_rank(group) == 0 else None
    for weight, name in task.weights.items():  # on all ranks, since gathering is collective
        codes, scales = full_codes(weight)
        if writer is not None:
            writer.add({f"{name}.{CODES}": codes, f"{name}.{SCALES}": scales})
    error = ""
    if writer is not None:
        error = writer.finish(rest, task.stored)
    if error := from_first_rank(error, group):
        raise RuntimeError(f"the frozen base could not be saved to {task.folder}: {error}")


@dataclass(frozen=True)
class _Task:
    """Arguments of :func:`save_frozen_params`, checked, and what is derived from them."""

    folder: Path
    limit: int
    weights: dict[FrozenWeight, str]
    stored: dict[str, SavedWeight]


def _check(model: nn.Module, path: str | os.PathLike[str], max_file_size: int | str) -> _Task:
    check_module(model)
    weights = {weight: names[0] for weight, names in frozen_names(model).items()}
    if not weights:
        raise ValueError(f"nothing of this {type(model).__name__} is quantized; call quantize_frozen_params first")
    stored = {name: SavedWeight.of(weight) for weight, name in weights.items()}
    return _Task(check_folder(path), _nbytes(max_file_size), weights, stored)


def _nbytes(size: object) -> int:
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match is not None:
        size = int(float(match[1]) * 1000 ** (" KMGT".index(match[2].upper())))
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise (ValueError if isinstance(size, (int, str)) else TypeError)(
            f'max_file_size must be a positive number of bytes, or a text such as "5GB" or "200MB", got {size!r}'
        )
    return size


def _not_quantized(model: nn.Module, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Gather the rest of the base by names in the base: frozen parameters and persistent buffers. Collective.

    Ranks other than the first get nothing.
    """
    bases = {original_path(path): base for path, base, _ in base_fqns(model)}

    def name_of(path: str) -> str | None:
        module, _, own_name = path.rpartition(".")
        base = bases[module]
        return None if base is None else f"{base}.{own_name}".removeprefix(".")

    wanted = [
        tensor
        for tensor in tensors_of(model)
        if (tensor.is_buffer or not tensor.full.requires_grad) and name_of(tensor.names[0]) is not None
    ]
    named = {name_of(path): tensor for path, tensor in on_first_rank(wanted, group).items()}
    return {name: tensor for name, tensor in named.items() if name is not None}
