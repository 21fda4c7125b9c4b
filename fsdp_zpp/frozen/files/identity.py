"""Checks that a model has the quantized base that a checkpoint was made on.

A checkpoint from which a training resumes holds what changes, and a quantized base does not change. A model on another
base would load the checkpoint without an error, and compute something else. So a few scales of each weight are saved
with it. They are compared up to rounding, since other kernels may have divided otherwise; another base differs by far
more.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import nn

from fsdp_zpp.module_names import model_name

from ..stored.codec import StoredCodec
from ..weight import FrozenWeight, Storable
from .model_tensors import frozen_names

_SAMPLED = 8
_SAMPLING = Storable | StoredCodec
_TOLERANCE = 1e-3

logger = logging.getLogger("fsdp_zpp")


class WeightIdentity(TypedDict):
    """A quantized weight in a checkpoint that does not hold it: its codec, and a few of its scales."""

    codec: str
    scales: list[float]


def describe_base(model: nn.Module) -> dict[str, WeightIdentity]:
    """Return the codec and a few scales of each quantized weight, by names in the base. Collective.

    All ranks get the same. Weights with a user-defined codec are left out: nothing says where its scales are.
    """
    known = {weight: names for weight, names in frozen_names(model).items() if isinstance(weight.codec, _SAMPLING)}
    weights = {names[0]: weight for weight, names in known.items()}
    return {name: {"codec": str(weight.codec), "scales": _scales(weight)} for name, weight in weights.items()}


def check_base(model: nn.Module, saved: Mapping[str, WeightIdentity], where: str) -> None:
    """Raise if the quantized weights of ``model`` are not those that :func:`describe_base` has described. Collective.

    Args:
        model: The model.
        saved: The description that it returned; the same on all ranks.
        where: What it was saved with, as the error names it.

    Raises:
        ValueError: If weights of the same codec have other values.
    """
    own = {name: weight for name, weight in describe_base(model).items() if name in saved}
    recoded = [name for name, weight in own.items() if weight["codec"] != saved[name]["codec"]]
    other = [name for name in own if name not in recoded and not _is_close(own[name], saved[name])]
    if other:
        raise ValueError(
            f"{where} was saved with another base: {len(other)} of the {len(own)} quantized weights of this "
            f"{model_name(model)} differ ({other[0]}, ...), and the checkpoint holds only what is trained; make the "
            "model from the base that it had then, before it is prepared"
        )
    if recoded and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.warning(
            "%s was saved with %s of %s, which is quantized as %s now: the model computes something else",
            where,
            saved[recoded[0]]["codec"],
            recoded[0],
            own[recoded[0]]["codec"],
        )


def _is_close(own: WeightIdentity, saved: WeightIdentity) -> bool:
    a, b = (torch.tensor(weight["scales"], dtype=torch.float64) for weight in (own, saved))
    return a.shape == b.shape and torch.allclose(a, b, rtol=_TOLERANCE, atol=0.0, equal_nan=True)


def _scales(weight: FrozenWeight) -> list[float]:
    if weight.sampled is None:
        rows = weight.holder.gathered_payload(weight, weight.device)
        if isinstance(weight.codec, StoredCodec):
            # Sums of all bytes: each format has its scales elsewhere.
            groups = -(-weight.shape.numel() // weight.codec.block)
            scales = weight.codec.records(rows, weight.chunk_numel).flatten(0, 1)[:groups].sum(1)
        else:
            _, scales = weight.codes_and_scales(rows)
        places = torch.linspace(0, len(scales) - 1, min(_SAMPLED, len(scales)), dtype=torch.float64).long()
        weight.sampled = scales.cpu()[places].tolist()
    return weight.sampled
