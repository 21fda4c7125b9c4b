"""Reads a quantized base from files, at any world size: ``load_frozen_params``. See the top of file_format.py."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_zpp.collectives.agreement import agree
from fsdp_zpp.collectives.devices import compute_device
from fsdp_zpp.module_names import model_name
from fsdp_zpp.runtime.model_ranks import ranks_of
from fsdp_zpp.runtime.validation import check_folder, check_module

from ..base import FrozenBase
from ..finite import FiniteSlice, refuse_infinite_values
from ..placement import Placement, place_base
from ..report import FrozenReport, log_report
from ..selection import Candidate, Selection, select
from ..weight import FrozenWeight
from .completeness import check_header, match_keys
from .file_format import (
    CODES,
    REMEDY,
    SCALES,
    SavedWeight,
    read_base,
)
from .model_tensors import ModelTensor, frozen_names
from .tensor_files import OTHER_FILES, Header, TensorFiles

_REMEDY = (
    "load it into the architecture that it was saved from; tensors that were trainable when it was saved are not in "
    "its files, so they must be trainable and have values here"
)


def load_frozen_params(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    placement: str = "I",
    gpus_per_node: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    device: torch.device | str | int | None = None,
) -> FrozenReport:
    """Put the base that ``save_frozen_params`` wrote into ``model``, without quantizing again. Collective.

    Each rank reads the slices that it keeps. Call it before you wrap the model. The files must have every frozen
    parameter and persistent buffer of ``model``, and ``model`` must have every tensor in the files.

    Args:
        model: The same architecture, its base frozen, with any values or on the meta device, with adapters or without.
            What was trainable when the base was saved is not in the files, and must be trainable here, too.
        path: The folder.
        placement: As for ``quantize_frozen_params``. This and the next three arguments may differ from those that the
            base was saved with.
        gpus_per_node: As for ``quantize_frozen_params``.
        process_group: As for ``quantize_frozen_params``.
        device: As for ``quantize_frozen_params``.

    Returns:
        A report: what is quantized now, and what stays as it is.

    Raises:
        TypeError: If an argument has the wrong type, on any rank; every rank raises.
        ValueError: If the files are broken or don't fit the model exactly, on any rank, or the model is already
            sharded. Every rank raises, and the model is unchanged.
    """
    group = ranks_of(model, process_group)

    def check() -> tuple[Selection, torch.device | None]:
        check_module(model)
        check_folder(path)
        selection = select(model, 1)  # of any size: the files say what is quantized, not a threshold
        selection.refuse_sharded(f"call load_frozen_params(model, {os.fspath(path)!r}) before you wrap the model")
        return selection, compute_device(group, device)

    selection, kept_on = agree(group, check)
    selection.check_agreement("load_frozen_params", model, group, gpus_per_node, {"placement": placement})
    # After the ranks have agreed, since it makes process groups, in which different node sizes would hang.
    where = place_base(model, placement, group, gpus_per_node)
    read = agree(
        group, lambda: _read(model, selection, Path(path), where, kept_on), lambda read: read.index, OTHER_FILES
    )
    base = FrozenBase.of(model)
    bytes_before = sum(weight.candidate.parameter.nbytes for weight in read.weights)
    for quantized in read.weights:
        base.add(quantized.weight, quantized.row, quantized.candidate.sites)
    left = {tensor.name: tensor for tensor, _ in read.others if _is_frozen(tensor)}
    for tensor, value in read.others:
        tensor.fill(value, kept_on or torch.device("cpu"))
    report = FrozenReport(
        type(model).__name__,
        read.weights[0].weight.codec,
        where,
        len(read.weights),
        sum(quantized.weight.shape.numel() for quantized in read.weights),
        bytes_before,
        sum(quantized.row.nbytes for quantized in read.weights),
        {"not quantized in the files": tuple(left)} if left else {},
        sum(tensor.tensor.numel() for tensor in left.values()),
    )
    log_report([report])
    return report


@dataclass(frozen=True)
class _Quantized:
    """A weight of the model, and this rank's chunk of the stored one."""

    candidate: Candidate
    weight: FrozenWeight
    row: Tensor


@dataclass(frozen=True)
class _Read:
    """Contents of a base's files for a model, read but not yet put into the model."""

    index: str
    weights: list[_Quantized]
    others: list[tuple[ModelTensor, Tensor]]


def _read(model: nn.Module, selection: Selection, folder: Path, where: Placement, device: torch.device | None) -> _Read:
    """Check that files and model have the same tensors, then read this rank's part of the base."""
    files, stored = read_base(folder)
    # One key for a quantized weight, under the weight's name, though its codes and scales are two tensors.
    keys = [*stored, *(key for key in files if key.removesuffix(f".{CODES}").removesuffix(f".{SCALES}") not in stored)]
    matches = match_keys(model, keys, f"the base in {folder}", _REMEDY)
    _check_both_ways(model, selection, files, stored, keys, matches)
    candidates = {id(candidate.parameter): candidate for candidate in selection.chosen}
    weights, others = [], []
    for tensor, (key, *_) in matches:
        if key not in stored:
            value = files.read(key)
            if isinstance(tensor.tensor, nn.Parameter):  # masks and the like may have infinite values
                refuse_infinite_values(value, f"{files.file_of(key)} is broken: {key}", REMEDY)
            others.append((tensor, value))
            continue
        candidate, stored_weight = candidates[id(tensor.tensor)], stored[key]
        weight = FrozenWeight(
            candidate.name, candidate.parameter.shape, stored_weight.torch_dtype(), stored_weight.make_codec(), where
        )
        codes, scales = f"{key}.{CODES}", f"{key}.{SCALES}"
        finite = FiniteSlice(files.slice(scales), f"{files.file_of(scales)} is broken: {scales}", REMEDY)
        row = weight.local_payload_from_slices(files.slice(codes), finite)
        kept_on = candidate.parameter.device if device is None else device
        weights.append(_Quantized(candidate, weight, row.to("cpu" if kept_on.type == "meta" else kept_on)))
    index = repr([stored, [(key, files.file_of(key).name) for key in files]])
    return _Read(index, weights, others)


def _check_both_ways(
    model: nn.Module,
    selection: Selection,
    files: TensorFiles,
    stored: dict[str, SavedWeight],
    keys: list[str],
    matches: list[tuple[ModelTensor, list[str]]],
) -> None:
    """Raise unless ``model`` has each stored tensor, in exactly its shape, and frozen if it is quantized."""
    name, source = model_name(model), files.source
    by_key = {key: tensor for tensor, names in matches for key in names}
    if unknown := [key for key in keys if key not in by_key]:
        quantized = {name for names in frozen_names(model).values() for name in names}
        why = "which is already quantized" if unknown[0] in quantized else "which has no place"
        more = f" ({len(unknown)} tensors in all)" if len(unknown) > 1 else ""
        raise ValueError(
            f"{source} has {unknown[0]}, {why} in this {name}{more}; load the base into the architecture that it was "
            "saved from, before you quantize any of it"
        )
    reasons = {id(parameter): reason for reason, left in selection.left.items() for _, parameter in left}
    chosen = {id(candidate.parameter) for candidate in selection.chosen}
    for tensor, (key, *others) in matches:
        if others:
            raise ValueError(
                f"this {name} ties {key} and {others[0]}, but {source} has them untied; construct the model with "
                "tie_word_embeddings=False"
            )
        if key in stored:
            shape, dtype = stored[key].shape, stored[key].torch_dtype()
            check_header(tensor, key, Header(shape, dtype), source)
            if id(tensor.tensor) not in chosen:
                reason = "trainable" if tensor.tensor.requires_grad else reasons.get(id(tensor.tensor), "no weight")
                raise ValueError(
                    f"{source} has {key} as a quantized weight, but in this {name} it is not a frozen weight but "
                    f"{reason}; freeze all weights that were frozen when the base was saved"
                )
        else:
            check_header(tensor, key, files.header(key), files.file_of(key))


def _is_frozen(tensor: ModelTensor) -> bool:
    return isinstance(tensor.tensor, nn.Parameter) and not tensor.tensor.requires_grad
