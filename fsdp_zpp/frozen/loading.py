"""``load_frozen_params``: a quantized base from files, at any world size. See [Note: Files of a frozen base]."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from .base import base_for
from .file_format import StoredWeight, read_index, row_from_slices
from .quantize import device_of, place_base, put_in_place, refuse_sharded
from .report import FrozenReport, log_report
from .selection import Candidate, select
from .source import Checkpoint, stored_name
from .weight import FrozenWeight
from .wrapped import check_base_agreement


def load_frozen_params(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    placement: str = "I",
    gpus_per_node: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    device: torch.device | str | int | None = None,
) -> FrozenReport:
    """Put the base that :func:`save_frozen_params` wrote into ``model``, without quantizing again.

    Each rank reads the slices that it keeps. Call it before wrapping.

    Args:
        model: The same architecture, its base frozen, with any values or on the meta device; with adapters or not.
        path: The folder.
        placement, gpus_per_node, process_group, device: As for :func:`quantize_frozen_params`; any that suit the job.

    Returns:
        What is quantized now, and what was left.

    Raises:
        ValueError: If the files don't fit the model, or the model is sharded already.
    """
    group = process_group if process_group is not None else dist.group.WORLD
    files, stored = read_index(Path(path))
    selection = select(model, 1)
    refuse_sharded(selection, "call load_frozen_params before you wrap the model")
    candidates = {stored_name(candidate.name): candidate for candidate in selection.chosen}
    _check(candidates, stored, Path(path))
    check_base_agreement(
        "load_frozen_params", model, group, gpus_per_node, selection, {"placement": placement, **stored}
    )
    where = place_base(placement, group, gpus_per_node)
    checkpoint, base = Checkpoint(files), base_for(model)
    keep = device_of(group, device) or torch.device("cpu")
    before, after = 0, 0
    for name, one in stored.items():
        candidate = candidates[name]
        weight = FrozenWeight(candidate.name, candidate.parameter.shape, one.torch_dtype(), one.make_codec(), where)
        row = row_from_slices(weight, checkpoint.slice(f"{name}.codes"), checkpoint.slice(f"{name}.scales"))
        before += candidate.parameter.nbytes
        after += row.nbytes
        put_in_place(candidate, weight, row.to(keep), base)
    others = _load_others(model, checkpoint, device_of(group, device))
    report = FrozenReport(
        type(model).__name__,
        next(iter(stored.values())).make_codec(),
        where,
        len(stored),
        sum(torch.Size(one.shape).numel() for one in stored.values()),
        before,
        after,
        {"not quantized in the files": tuple(others)} if others else {},
        sum(others.values()),
    )
    log_report([report])
    return report


def _check(candidates: dict[str, Candidate], stored: dict[str, StoredWeight], path: Path) -> None:
    for name, one in stored.items():
        if name not in candidates:
            raise ValueError(f"{path} has a weight {name}, which is no frozen weight of this model")
        shape = tuple(candidates[name].parameter.shape)
        if shape != one.shape:
            raise ValueError(f"{name} is {shape} in the model and {one.shape} in {path}")


def _load_others(model: nn.Module, checkpoint: Checkpoint, device: torch.device | None) -> dict[str, int]:
    """Set what is frozen but not quantized to the values in the files; names and sizes."""
    found = {}
    for path, module in model.named_modules():
        for name, old in list(module._parameters.items()):
            full = f"{path}.{name}".removeprefix(".")
            if old is None or old.requires_grad or (value := checkpoint.read(full)) is None:
                continue
            found[stored_name(full)] = old.numel()
            if old.is_meta:
                value = value.to(device or torch.device("cpu"), old.dtype)
                module._parameters[name] = nn.Parameter(value, requires_grad=False)
            else:
                old.data.copy_(value)
    return found
