"""Quantizes the parameters that were selected of a model, and puts frozen weights in their place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_zpp.codecs.as_stored import AsStored
from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.module_names import model_name

from .base import FrozenBase
from .packed_linear import PackedLinear
from .placement import Placement
from .report import FrozenReport
from .selection import Candidate, Selection
from .stored.format import StoredWeight
from .weight import FrozenWeight, ReadValues

Encoded = tuple[FrozenWeight, Tensor]
"""A frozen weight and its local payload."""

MIN_NUMEL = 4096
"""A weight with fewer values costs more in bookkeeping than it saves in memory."""


@dataclass(frozen=True)
class FrozenOptions:
    """Arguments of :func:`quantize_frozen_params`, with their defaults resolved.

    Attributes:
        codec: How weights are quantized.
        placement: Which rank holds which chunk.
        device: The device that keeps the codes; None keeps each weight's codes on the weight's device.
        dtype: The dtype that weights dequantize to by default; None is each weight's own.
        broadcast: The group whose first rank has the right values; None if every rank has them.
    """

    codec: Codec
    placement: Placement
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    broadcast: dist.ProcessGroup | None = None


def quantize_selected(
    model: nn.Module, selection: Selection, options: FrozenOptions, encoded: Iterable[Encoded] | None = None
) -> tuple[FrozenReport, FrozenBase | None]:
    """Quantize the selected weights of ``model``. The caller has checked the arguments. Collective.

    Args:
        model: The model.
        selection: Its weights to quantize.
        options: How to quantize.
        encoded: The selected weights, already quantized. Default: quantize them from the model.

    Returns:
        A report, and the base that has the weights; None for the base if the model has no frozen weights at all.

    Raises:
        ValueError: If a weight has no values.
    """
    on_meta = [candidate.name for candidate in selection.chosen if candidate.parameter.is_meta]
    if on_meta and encoded is None and options.broadcast is None:
        raise ValueError(
            f"{on_meta[0]} is on the meta device and has no values; give quantize_frozen_params a checkpoint= to read "
            "them from, before you wrap the model, or load it first"
        )
    if encoded is None:
        # A generator: the memory that one weight is gathered or broadcast into is free before the next one's.
        encoded = (encode_candidate(candidate, options) for candidate in selection.chosen)
    # Also if nothing was chosen now: parts of the model may have bases, which become one.
    base = FrozenBase.of(model) if selection.chosen or FrozenBase.below(model) else None
    bytes_before, bytes_after, stored = 0, 0, 0
    for candidate, (weight, row) in zip(selection.chosen, encoded, strict=True):
        assert base is not None
        bytes_before += candidate.parameter.nbytes
        bytes_after += row.nbytes
        stored += isinstance(options.codec, AsStored) and weight.codec != options.codec.otherwise
        if candidate.packed is not None:
            candidate.packed.release()
        base.add(weight, row, candidate.sites)
    left = [parameter for parameters in selection.left.values() for _, parameter in parameters]
    report = FrozenReport(
        model_name(model),
        options.codec,
        options.placement,
        len(selection.chosen),
        sum(candidate.shape.numel() for candidate in selection.chosen),
        bytes_before,
        bytes_after,
        selection.left_names,
        sum(parameter.numel() for parameter in left),
        stored,
    )
    return report, base


def encode_candidate(
    candidate: Candidate, options: FrozenOptions, read: ReadValues | None = None, stored: StoredWeight | None = None
) -> Encoded:
    """Quantize this rank's chunk of one weight, or keep it as it is stored.

    Args:
        candidate: The weight.
        options: How to quantize.
        read: Returns its values. Default: those in the model.
        stored: Its codes, if the codec keeps codes and they are not those in the model.
    """
    parameter = candidate.parameter
    own_dtype = parameter.dtype if candidate.packed is None else candidate.packed.dtype
    device = options.device if options.device is not None else parameter.device
    # A model without values has no device yet either, and files are read on the CPU.
    kept_on = torch.device("cpu") if device.type == "meta" else device
    with torch.no_grad():
        codec: Codec | None = options.codec
        if isinstance(codec, AsStored):
            if read is None and candidate.packed is not None:
                stored = _stored_in_model(candidate.packed, options, device)
            codec = codec.otherwise if stored is None else stored.format.codec
        assert codec is not None, f"{candidate.name} is not stored quantized"
        weight = FrozenWeight(candidate.name, candidate.shape, options.dtype or own_dtype, codec, options.placement)
        if stored is not None:
            return weight, weight.keep(stored, kept_on)
        return weight, weight.encode(_reader(candidate, options, device) if read is None else read, kept_on)


def _stored_in_model(packed: PackedLinear, options: FrozenOptions, device: torch.device) -> StoredWeight:
    """Return the codes that a packed weight has in the model, or in the first rank's. Collective."""
    stored = packed.stored
    if options.broadcast is None:
        return stored
    # As in _reader: all of them, for each rank needs others.
    whole = stored.records(0, stored.format.groups).to(device)
    dist.broadcast(whole, src=dist.get_global_rank(options.broadcast, 0), group=options.broadcast)
    return StoredWeight(stored.format, lambda first, last: whole[first:last])


def _reader(candidate: Candidate, options: FrozenOptions, device: torch.device) -> ReadValues:
    """Return a function that reads values of a weight: from the model, or from the first rank's. Collective."""
    parameter = candidate.parameter
    if options.broadcast is None:
        if candidate.packed is not None:
            return candidate.packed.stored.values
        flat = parameter.detach().reshape(-1)
        return lambda first, last: flat[first:last]
    group = options.broadcast
    # All values at once, though a rank keeps few of them: they are one rank's, and each rank needs others.
    if candidate.packed is not None:
        whole = candidate.packed.stored.values(0, candidate.shape.numel()).to(device)
    else:
        whole = torch.empty_like(parameter, device=device) if parameter.is_meta else parameter.detach().to(device)
    whole = whole.contiguous().view(-1)
    dist.broadcast(whole, src=dist.get_global_rank(group, 0), group=group)
    return lambda first, last: whole[first:last]
