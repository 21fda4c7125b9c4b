"""Identity of a model's quantized base, next to a framework's checkpoint of what is trained on it."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist
from torch import nn

from fsdp_zpp.collectives.agreement import from_first_rank, run_on_first_rank
from fsdp_zpp.frozen.files.identity import WeightIdentity, check_base, describe_base

from ._companions import companion, companions

_NAME = "frozen_base.json"


def save_base_identity(model: nn.Module, checkpoint: Path) -> None:
    """Save the identity of the quantized base of ``model``, if it has one. Collective.

    Raises:
        OSError: On every rank, if rank 0 can't write.
    """
    identity, file = describe_base(model), companion(checkpoint, _NAME)

    def write() -> None:
        remove_base_identity(checkpoint.resolve())  # of an earlier checkpoint of this name
        if identity:
            file.write_text(json.dumps(identity))

    run_on_first_rank(write)


def remove_base_identity(checkpoint: Path) -> None:
    """Remove the saved identity of a base, if there is one; for one rank alone."""
    for file in companions(checkpoint, _NAME):
        if file.is_file():
            file.unlink()


def check_base_identity(model: nn.Module, checkpoint: Path) -> bool:
    """Raise if ``model`` has another quantized base than it had when it was saved. Collective.

    Returns:
        Whether the checkpoint tells which base it was saved with.

    Raises:
        ValueError: On every rank, also if rank 0 can't read what was saved; says what to do.
    """
    saved, failure = from_first_rank(_read(companion(checkpoint, _NAME)) if dist.get_rank() == 0 else ({}, ""))
    if failure:
        raise ValueError(
            f"{companion(checkpoint, _NAME)} can't be read ({failure}): load another checkpoint, or remove this file "
            "if the model has the base that it had when the checkpoint was saved"
        )
    if saved:
        check_base(model, saved, str(checkpoint))
    return bool(saved)


def _read(file: Path) -> tuple[dict[str, WeightIdentity], str]:
    """Return the content of a file, empty if there is none, and why it can't be read, or an empty string."""
    try:
        return (json.loads(file.read_text()) if file.is_file() else {}), ""
    except (OSError, ValueError) as error:
        return {}, str(error)
