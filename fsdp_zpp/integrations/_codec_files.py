"""Codec state beside a framework's checkpoint: a folder of torch.distributed.checkpoint's."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from fsdp_zpp.runtime.checkpoint import CodecState

logger = logging.getLogger("fsdp_zpp")

FOLDER = "fsdp_zpp_codecs"


def save_codec_state(model: nn.Module, checkpoint: str | os.PathLike[str], index: int = 0) -> None:
    """Save the codec state of ``model``, the one of this index in its job, into a checkpoint's folder. Collective."""
    dcp.save({"codecs": CodecState(model)}, checkpoint_id=Path(checkpoint) / f"{FOLDER}_{index}")


def load_codec_state(model: nn.Module, checkpoint: str | os.PathLike[str], index: int = 0) -> None:
    """Load what :func:`save_codec_state` saved, once the weights are loaded or before; collective.

    A checkpoint without codec state, of another strategy or of none, is loaded with a warning: errors start from zero,
    weights are sent whole once.
    """
    folder = Path(checkpoint) / f"{FOLDER}_{index}"
    # Of a folder that only some nodes see, all ranks must think the same.
    found = [folder.is_dir()]
    dist.broadcast_object_list(found)
    if not found[0]:
        if dist.get_rank() == 0:
            logger.warning("%s holds no codec state: errors start from zero, weights are sent whole once", checkpoint)
        return
    # If it is of fewer ranks, the others find no entries.
    dcp.load({"codecs": CodecState(model)}, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))
