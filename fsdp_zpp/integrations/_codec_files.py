"""Codec state next to a framework's checkpoint.

Frameworks write a folder, with shards in it, or a file, with everything gathered on rank 0. Codec state is each rank's
own, so it goes through torch.distributed.checkpoint into a folder: ``codecs`` inside of a checkpoint that is a folder,
and ``<file>.codecs`` beside one that is a file. A model without codec state leaves no such folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from fsdp_zpp.collectives.agreement import agree, from_first_rank, run_on_first_rank
from fsdp_zpp.runtime.checkpoint import CodecState
from fsdp_zpp.runtime.unit import named_units

from ._companions import companion, companions

State = dict[str, str | bytes]
_NAME = "codecs"
_LAYOUT = "layout"
"""Key that even the state dict of a :class:`CodecState` without any state has."""


def save_codec_state(model: nn.Module, optimizers: Iterable[Optimizer], checkpoint: Path) -> None:
    """Save the codec state of ``model``, if it has any, with what a framework has just saved. Collective.

    Args:
        model: What a strategy has sharded.
        optimizers: All of its optimizers.
        checkpoint: The framework's file or folder, the same on all ranks.

    Raises:
        OSError: On every rank, if rank 0 can't remove the codec state of an earlier checkpoint of this name.
    """
    # All wait for it: a rank that is early would write into the folder that rank 0 is still removing.
    run_on_first_rank(lambda: remove_codec_state(checkpoint))
    if (codec_state := _codec_state_of(model, optimizers)) is not None:
        _, state = codec_state
        dcp.save(state, checkpoint_id=companion(checkpoint, _NAME))


def load_codec_state(model: nn.Module, optimizers: Iterable[Optimizer], checkpoint: Path) -> None:
    """Continue with the codec state next to ``checkpoint``; start over, with a warning, if there is none. Collective.

    Args:
        model: What a strategy has sharded; its weights may be loaded before or after.
        optimizers: All of its optimizers, loaded before or after.
        checkpoint: The framework's file or folder, the same on all ranks.

    Raises:
        ValueError: If it was saved for other units, or under another configuration of error feedback, or if its files
            are not all there; the latter on every rank.
    """
    if (codec_state := _codec_state_of(model, optimizers)) is None:
        return
    codecs, state = codec_state
    folder = companion(checkpoint, _NAME)
    if not from_first_rank(folder.is_dir()):  # ranks that see a shared folder at different times would hang
        codecs.load_state_dict({_LAYOUT: f"no ranks (there is no {folder})"})
        return
    # Only what is there: a checkpoint of fewer ranks, or of other units, lacks keys, and CodecState says what follows.
    try:
        saved = agree(dist.group.WORLD, lambda: _saved_keys(folder), lambda keys: "", "")
        loaded = {key: value for key, value in state.items() if key in saved}
        dcp.load(loaded, checkpoint_id=folder)  # which raises on all ranks if it fails on any
    except (Exception, CheckpointException) as error:
        raise ValueError(
            f"the codec state in {folder} can't be read; its save was cut off, unless files were removed since: resume "
            "from another checkpoint, or remove this folder to go on from this one with codec state that starts over"
        ) from error
    codecs.load_state_dict(loaded)


def _saved_keys(folder: Path) -> set[str]:
    return set(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)


def remove_codec_state(checkpoint: Path) -> None:
    """Remove the codec state next to ``checkpoint``, if there is any; for one rank alone."""
    for folder in companions(checkpoint, _NAME):
        if folder.is_dir():
            shutil.rmtree(folder)


def _codec_state_of(model: nn.Module, optimizers: Iterable[Optimizer]) -> tuple[CodecState, State] | None:
    """Return the codec state of ``model`` and its state dict; None if it has none, the same on all ranks."""
    if not named_units(model):  # only torch's own strategies are in the model
        return None
    codecs = CodecState(model, list(optimizers))
    state = codecs.state_dict()
    return (codecs, state) if state.keys() - {_LAYOUT} else None
