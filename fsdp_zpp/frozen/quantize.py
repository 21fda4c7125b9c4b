"""Turns frozen parameters into sharded codes outside of FSDP: ``quantize_frozen_params``, and its inverse."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_zpp.codecs.as_stored import NAMED, AsStored, FrozenName
from fsdp_zpp.codecs.base import Codec, check_place
from fsdp_zpp.collectives.agreement import agree
from fsdp_zpp.collectives.devices import compute_device
from fsdp_zpp.runtime.model_ranks import ranks_of
from fsdp_zpp.runtime.validation import DTYPES, check_module
from fsdp_zpp.suggestions import explains_arguments

from .base import FrozenBase
from .encoding import MIN_NUMEL, Encoded, FrozenOptions, encode_candidate, quantize_selected
from .files.model_tensors import ModelTensor
from .files.source import Source, WeightSource, source_from
from .files.tensor_files import OTHER_FILES
from .finite import finite_values
from .modules import FrozenModule, frozen_sites, plain_class, unfreeze
from .placement import place_base
from .report import FrozenReport, log_report
from .selection import PLAIN, Selection, select
from .stored.format import NoStackError, StoredWeight
from .weight import FrozenWeight


@explains_arguments
def quantize_frozen_params(
    model: nn.Module,
    codec: Codec | FrozenName = "auto",
    *,
    placement: str = "I",
    gpus_per_node: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    checkpoint: Source | None = None,
    min_numel: int = MIN_NUMEL,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    ignored_params: Collection[Tensor] = (),
    sync_module_states: bool = False,
) -> FrozenReport:
    """Quantize every frozen weight that is worth it, once, shard the codes, and return a report. Collective.

    Quantizes the weights of nn.Linear and nn.Embedding, and the stacks of matrices that hold the experts of an MoE
    layer, tied ones once; ``module.weight`` then stands for the dequantized weight. Quantized weights are not
    parameters any more: FSDP does not gather them, they are not in ``model.state_dict()`` (``save_frozen_params`` saves
    them), and no gradient is ever allocated for them. A second call quantizes what was frozen since the first.

    Call it before you wrap the model, or let ``Strategy(frozen=...)`` do so. If a part of the model is wrapped already,
    it quantizes the rest: pass frozen weights that FSDP has sharded in ``ignored_params``.

    Args:
        model: Any model with frozen parameters, such as a PEFT model. It may be on the meta device if there is a
            ``checkpoint``.
        codec: How weights are quantized. ``"as stored"`` keeps the codes of those that the checkpoint, or the model,
            has quantized, and leaves all others as they are; ``"auto"`` keeps them, too, and encodes the others in
            ``Int8(256)``.
        placement: A parameter scope: ``I`` keeps the base in every node, sharded inside, and sends no byte between
            nodes; ``G`` shards it over all ranks until the first gather, which leaves each node a copy; ``N`` keeps
            all of it on every rank.
        gpus_per_node: The node size, as in ``Strategy``. Default: that of the strategy that will wrap the model.
        process_group: The data-parallel ranks. Default: those that a part of the model is sharded over; all ranks if
            none is; this process alone if there is no process group.
        checkpoint: Where to read the weights: a safetensors file, an index of several, a folder with either, or a
            function of the name that a parameter has without adapters. Each rank reads the rows that it keeps. The
            checkpoint must have all frozen parameters and persistent buffers, quantized or not; trainable parameters
            are read, too, if a file has them. Default: take the weights from the model.
        min_numel: Weights with fewer values stay as they are.
        device: The device that keeps the codes. Default: this process's accelerator if the process group communicates
            through it, otherwise the device that each weight is on.
        dtype: The dtype that weights show and embeddings return: your mixed precision's ``param_dtype``. Linear layers
            compute in the dtype of their input, or autocast's. Default: each weight's own.
        ignored_params: Parameters that stay as they are.
        sync_module_states: Whether to broadcast the first rank's weights, one at a time, as FSDP's option does.

    Returns:
        A report: what was quantized, how many bytes it takes now, what stays as it is and why.

    Raises:
        TypeError: If an argument has the wrong type, on any rank; every rank raises.
        ValueError: If an argument is out of range, on any rank; if weights are sharded already, by FSDP or by another
            parallelism; if they have no values, or NaN or infinite ones; or if a checkpoint is broken or not this
            model's. Every rank raises, and the model is unchanged.

    Examples:
        >>> model = get_peft_model(AutoModelForCausalLM.from_pretrained(path), LoraConfig(...))
        >>> quantize_frozen_params(model, Int8(256))
        >>> model = FullyShardedDataParallel(model, sharding_strategy=Strategy.zeropp(), use_orig_params=True, ...)
    """
    chosen = _codec_of(codec)
    group = ranks_of(model, process_group)
    in_the_model = checkpoint is None and not sync_module_states

    def check() -> tuple[Selection, torch.device | None]:
        _check_arguments(model, chosen, min_numel, dtype)
        selection = select(model, min_numel, ignored_params, unpack=True)
        if chosen == AsStored():
            if checkpoint is None:
                selection.leave_plain()
            elif callable(checkpoint):
                raise ValueError(
                    f"codec={chosen!r} keeps the codes of files, and the checkpoint is a function; give a path"
                )
        selection.refuse_sharded(
            f"call quantize_frozen_params(model, {chosen!r}) before you wrap the model, or wrap it with "
            f"Strategy(..., frozen={chosen!r}), which quantizes what it wraps"
        )
        if in_the_model or (sync_module_states and group is not None and dist.get_rank(group) == 0):
            selection.refuse_infinite()
        return selection, compute_device(group, device)

    selection, kept_on = agree(group, check)
    facts = {"codec": chosen, "placement": placement, "min_numel": min_numel, "dtype": dtype, "from": in_the_model}
    facts |= {"from a checkpoint": checkpoint is not None}
    selection.check_agreement("quantize_frozen_params", model, group, gpus_per_node, facts)
    options = FrozenOptions(
        chosen,
        place_base(model, placement, group, gpus_per_node),
        kept_on,
        dtype,
        group if sync_module_states else None,
    )
    read = None
    if checkpoint is not None:
        # All of it, before the model changes: if one rank's files are broken, no rank's model may be half quantized.
        read = agree(
            group, lambda: _read(model, checkpoint, selection, options, group), lambda read: read.summary, OTHER_FILES
        )
    report, _ = quantize_selected(model, selection, options, read.encoded if read else None)
    log_report([report])
    for tensor, value in read.others if read is not None else ():
        tensor.fill(value, options.device or torch.device("cpu"))
    return report


def _codec_of(codec: object) -> Codec:
    """Return the codec that a name stands for; what is none is refused later, on all ranks."""
    given: Any = NAMED.get(codec, codec) if isinstance(codec, str) else codec
    return given


def _check_arguments(model: object, codec: object, min_numel: object, dtype: object) -> None:
    check_module(model)
    if not isinstance(codec, Codec):
        names = " or ".join(map(repr, NAMED))
        raise TypeError(f"codec must be a codec such as Int8(256) or Int4(128), {names}, got {codec!r}")
    check_place("codec", codec, "frozen")
    if isinstance(min_numel, bool) or not isinstance(min_numel, int) or min_numel < 1:
        raise ValueError(f"min_numel must be a positive int, got {min_numel!r}")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype!r}")


@dataclass(frozen=True)
class _Read:
    """Contents of a checkpoint for a model, read and quantized but not yet put into the model."""

    encoded: list[Encoded]
    others: list[tuple[ModelTensor, Tensor]]
    summary: str


def _read(
    model: nn.Module,
    checkpoint: Source,
    selection: Selection,
    options: FrozenOptions,
    group: dist.ProcessGroup | None,
) -> _Read:
    """Check that a checkpoint has all of the model, then read it and quantize the selected weights."""
    source = source_from(checkpoint, warns=group is None or dist.get_rank(group) == 0)
    tensors = {id(tensor.tensor): tensor for tensor in source.cover(model)}
    encoded = []
    for candidate in list(selection.chosen):
        tensor = tensors.pop(id(candidate.parameter), None)
        if tensor is None and candidate.parameter.is_meta:
            raise ValueError(
                f"{candidate.name} is on the meta device but is not part of the base, so it is not read from the "
                "checkpoint; give it values first"
            )
        read, stored = None, None
        if tensor is not None:
            stored = _stored(source, tensor, options.codec)
            read = finite_values(source.reader(tensor), f"the checkpoint's {tensor.name}", "give a complete one")
        if stored is None and options.codec == AsStored():
            if tensor is not None:
                tensors[id(candidate.parameter)] = tensor
            selection.leave(candidate, PLAIN)
            continue
        encoded.append(encode_candidate(candidate, options, read, stored))
    others = [(tensor, source.read(tensor)) for tensor in tensors.values()]
    return _Read(encoded, others, source.summary())


def _stored(source: WeightSource, tensor: ModelTensor, codec: Codec) -> StoredWeight | None:
    """Return a tensor as it is stored, if the codec is to keep it so."""
    if not isinstance(codec, AsStored):
        return None
    try:
        return source.stored(tensor)
    except NoStackError:
        if codec.otherwise is None:
            raise
        return None


def dequantize_frozen_params(model: nn.Module) -> int:
    """Turn every quantized weight of ``model`` back into a plain, frozen parameter. Collective.

    Use it to merge adapters, or to train a layer after all: both need plain parameters. Every rank then has all of them
    in full size, so call it before sharding, and only on the part of a large model that needs it.

    Args:
        model: A model or a part of one.

    Returns:
        The number of weights that were dequantized.

    Raises:
        RuntimeError: If another parameter of a quantized module is parametrized.
    """
    sites = agree(
        ranks_of(model),
        lambda: _sites(model),
        lambda sites: repr([name for users in sites.values() for _, name in users]),
        "called dequantize_frozen_params with other quantized weights than",
    )
    bases = FrozenBase.below(model)
    for weight, users in sites.items():
        parameter = nn.Parameter(weight.dequantize(), requires_grad=False)
        for module, name in users:
            unfreeze(module, name, parameter)
    for base in bases:
        base.drop(sites)
    return len(sites)


def _sites(model: nn.Module) -> dict[FrozenWeight, list[tuple[FrozenModule, str]]]:
    """Return the modules of each frozen weight, with its names in them; raise before anything has changed."""
    check_module(model)
    sites: dict[FrozenWeight, list[tuple[FrozenModule, str]]] = {}
    for _, module, name, weight in frozen_sites(model):
        plain_class(module)
        sites.setdefault(weight, []).append((module, name))
    return sites
