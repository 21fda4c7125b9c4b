"""``quantize_frozen_params``: from frozen parameters to codes that are sharded and owned outside of either FSDP."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..accelerator import accelerator
from ..codecs import Codec, Int8
from ..support import DTYPES, model_name
from ..topology import ProcessMesh, Topology, process_mesh
from .base import FrozenBase, Unsettled, base_for
from .model_tensors import ModelTensor
from .module import FrozenModule, freeze, frozen_modules, frozen_sites, unfreeze
from .outcome import agree
from .owners import Flattened
from .placement import Placement
from .report import FrozenReport, log_report, merge, named_left
from .selection import SHARDED, Candidate, Selection, select
from .source import Source, source_from
from .weight import FrozenWeight, ReadRows
from .wrapped import check_base_agreement, wrapping_mesh

Encoded = tuple[FrozenWeight, Tensor]
"""A frozen weight and this rank's chunk of its codes."""

MIN_NUMEL = 4096
"""Below it a weight costs more to look after than it takes."""


@dataclass(frozen=True)
class FrozenOptions:
    """How to quantize; the arguments of :func:`quantize_frozen_params` as they work out.

    Attributes:
        codec: How weights are quantized.
        placement: Where they are to be.
        min_numel: Smaller ones are left.
        device: Where codes are kept; None is where each weight is.
        dtype: What weights pass for; None is each one's own.
        broadcast: The group whose first rank has the true weights; None if every rank has them.
    """

    codec: Codec
    placement: Placement
    min_numel: int = MIN_NUMEL
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    broadcast: dist.ProcessGroup | None = None


def quantize_frozen_params(
    model: nn.Module,
    codec: Codec | None = None,
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
    """Quantize every frozen weight worth it, once, shard the codes, and say what was done. Collective.

    Weights of nn.Linear and nn.Embedding are taken, and the stacks of matrices that hold the experts of an MoE layer,
    tied ones once; ``module.weight`` then stands for the dequantized weight. They are no parameters any more: no FSDP
    gathers them, ``model.state_dict()`` has none of them (:func:`save_frozen_params` saves them), and no gradient is
    ever allocated for them. Called again, it takes what was frozen since.

    Call it before wrapping, or let ``Strategy(frozen=...)`` do so, or call it on a model that is sharded already, by
    our strategies or torch's, before its first forward and before its optimizer is made. From ``fully_shard`` weights
    are then gathered and taken one by one. Units of FullyShardedDataParallel with ``use_orig_params=True`` are gathered
    and taken apart one by one, before anything else has FSDP find out which instance is the root: a state dict saved or
    loaded, parameters summoned, a hook registered.

    Args:
        model: Any model with frozen parameters, a PEFT model for one. On the meta device, with a ``checkpoint``.
        codec: How weights are quantized. Default: ``Int8(256)``.
        placement: A parameter letter: ``I`` keeps the base in every node, sharded inside, and sends no byte between
            nodes; ``G`` shards it over all ranks until the first gather, which leaves each node a copy; ``N`` keeps
            all of it on every rank.
        gpus_per_node: As in :class:`Strategy`. Default: the strategy's that the model is wrapped with, before or after.
        process_group: The data-parallel ranks. Default: all of them, or this process alone without a process group.
        checkpoint: Where the weights are: a safetensors file, an index of several, a folder with either, or a function
            of the name that a parameter has without adapters. Each rank reads the rows that it keeps. It must have all
            frozen parameters and persistent buffers, quantized or not; what is trained is read, too, if it is in a
            file. Default: in the model.
        min_numel: Weights with fewer values are left as they are.
        device: Where the codes are kept. Default: this process's accelerator, if ranks talk through it; else where
            the weights are.
        dtype: What the weights pass for, which embeddings come out in: your mixed precision's ``param_dtype``. Linear
            layers compute in the dtype of their input, or autocast's. Default: each weight's own, or, of weights that
            are sharded, their mixed precision's.
        ignored_params: Parameters to be left as they are.
        sync_module_states: Whether the first rank's weights are broadcast, one at a time, as FSDP's option does.

    Returns:
        What was quantized, what it takes now, and what was left and why.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, weights have no values, or weights are sharded already: in a model
            that had a forward (or, under FullyShardedDataParallel, the like), by FullyShardedDataParallel without
            ``use_orig_params``, over ranks that are not data-parallel, or with ``checkpoint`` or
            ``sync_module_states``, which are for weights that are not. If a checkpoint is broken or is not of this
            model, on any rank; then every rank raises, and the model is unchanged.

    Example:
        >>> model = get_peft_model(AutoModelForCausalLM.from_pretrained(path), LoraConfig(...))
        >>> quantize_frozen_params(model, Int8(256))
        >>> model = FullyShardedDataParallel(model, sharding_strategy=Strategy.zeropp(), use_orig_params=True, ...)
    """
    codec = Int8(256) if codec is None else codec
    if not isinstance(codec, Codec):
        raise TypeError(f"codec must be a codec such as Int8(256) or Int4(128), got {codec!r}")
    if isinstance(min_numel, bool) or not isinstance(min_numel, int) or min_numel < 1:
        raise ValueError(f"min_numel must be a positive int, got {min_numel!r}")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype!r}")
    group = process_group if process_group is not None else dist.group.WORLD
    in_the_model = checkpoint is None and not sync_module_states
    selection = select(model, min_numel, ignored_params, take_sharded=in_the_model)
    refuse_sharded(
        selection,
        f"call quantize_frozen_params(model, {codec!r}) before you wrap the model, or, without checkpoint= and "
        "sync_module_states=, before its first forward (under FullyShardedDataParallel with use_orig_params=True and "
        "before a state dict is saved or loaded)",
    )
    facts = {"codec": codec, "placement": placement, "min_numel": min_numel, "dtype": dtype, "from": in_the_model}
    facts |= {"from a checkpoint": checkpoint is not None}
    check_base_agreement("quantize_frozen_params", model, group, gpus_per_node, selection, facts)
    options = FrozenOptions(
        codec,
        place_base(placement, group, gpus_per_node, wrapping_mesh(model, group) if gpus_per_node is None else None),
        min_numel,
        device_of(group, device),
        dtype,
        group if sync_module_states else None,
    )
    read = None
    if checkpoint is not None:
        read = agree(group, lambda: _read(model, checkpoint, selection, options), lambda read: read.summary)
    parts = [_quantize_flattened(model, holder, options, ignored_params) for holder in selection.to_open]
    report = merge([*parts, quantize_selected(model, selection, options, read.encoded if read else None)[0]])
    log_report([report])
    for tensor, value in read.others if read is not None else ():
        tensor.fill(value, options.device or torch.device("cpu"))
    return report


@dataclass(frozen=True)
class _Read:
    """What a checkpoint holds for a model, read and quantized but not yet put into the model."""

    encoded: list[Encoded]
    others: list[tuple[ModelTensor, Tensor]]
    summary: str


def _read(model: nn.Module, checkpoint: Source, selection: Selection, options: FrozenOptions) -> _Read:
    """Read a checkpoint, after checking that it has all of the model, and quantize the selected weights."""
    source = source_from(checkpoint)
    tensors = {id(tensor.tensor): tensor for tensor in source.cover(model)}
    encoded = []
    for candidate in selection.chosen:
        tensor = tensors.pop(id(candidate.parameter), None)
        if tensor is None and candidate.parameter.is_meta:
            raise ValueError(
                f"{candidate.name} is on the meta device and is not part of the base, so no checkpoint is read for it; "
                "give it values first"
            )
        encoded.append(_encode(candidate, options, None if tensor is None else source.reader(tensor)))
    return _Read(encoded, [(tensor, source.read(tensor)) for tensor in tensors.values()], source.summary())


def refuse_sharded(selection: Selection, remedy: str) -> None:
    """Raise if weights stay with FSDP.

    Raises:
        ValueError: Naming one.
    """
    if sharded := selection.left.get(SHARDED):
        raise ValueError(
            f"{sharded[0][0]} is sharded by FSDP already; {remedy}, or wrap it with Strategy(..., frozen=...), which "
            "quantizes what it wraps"
        )


def quantize_selected(
    model: nn.Module, selection: Selection, options: FrozenOptions, encoded: Iterable[Encoded] | None = None
) -> tuple[FrozenReport, FrozenBase | None]:
    """Quantize what was chosen of ``model``; arguments are taken as checked, but for weights without values.

    Args:
        model: The model.
        selection: What was chosen of it.
        options: How to quantize.
        encoded: The selected weights, already quantized. Default: quantize them from the model, one at a time.
    """
    on_meta = [candidate.name for candidate in selection.chosen if candidate.parameter.is_meta]
    if on_meta and encoded is None and options.broadcast is None:
        raise ValueError(
            f"{on_meta[0]} is on the meta device and has no values; give quantize_frozen_params a checkpoint= to read "
            "them from, before you wrap the model, or load it first"
        )
    if encoded is None:
        encoded = (_encode(candidate, options) for candidate in selection.chosen)
    base = base_for(model) if selection.chosen or any(True for _ in frozen_modules(model)) else None
    before, after = 0, 0
    for candidate, (weight, row) in zip(selection.chosen, encoded, strict=True):
        assert base is not None
        before += candidate.parameter.nbytes
        after += row.nbytes
        put_in_place(candidate, weight, row, base)
    left = [parameter for parameters in selection.left.values() for _, parameter in parameters]
    report = FrozenReport(
        model_name(model),
        options.codec,
        options.placement,
        len(selection.chosen),
        sum(candidate.parameter.numel() for candidate in selection.chosen),
        before,
        after,
        named_left(selection.left),
        sum(parameter.numel() for parameter in left),
    )
    return report, base


def _quantize_flattened(
    model: nn.Module, holder: Flattened, options: FrozenOptions, ignored: Collection[Tensor]
) -> FrozenReport:
    """Quantize what is worth it of parameters that are sharded as one."""
    parameters = [parameter for parameter in holder.parameters if not parameter.requires_grad]
    with holder.opened():
        selection = select(model, options.min_numel, ignored, only=parameters)
        report, _ = quantize_selected(model, selection, replace(options, dtype=options.dtype or holder.compute_dtype))
    return report


def _encode(candidate: Candidate, options: FrozenOptions, read: ReadRows | None = None) -> Encoded:
    """Quantize one weight, from what ``read`` reads or where it is now."""
    parameter = candidate.parameter
    own_dtype = (candidate.owner.compute_dtype if candidate.owner is not None else None) or parameter.dtype
    weight = FrozenWeight(candidate.name, parameter.shape, options.dtype or own_dtype, options.codec, options.placement)
    device = options.device if options.device is not None else parameter.device
    read = _reader(candidate, options, device) if read is None else read
    with torch.no_grad():
        return weight, weight.encode(read, torch.device("cpu") if device.type == "meta" else device)


def put_in_place(candidate: Candidate, weight: FrozenWeight, row: Tensor, base: FrozenBase) -> None:
    """Replace a parameter by a frozen weight, of which this rank holds ``row``."""
    if candidate.owner is not None:
        candidate.owner.release()
    weight.base, weight.held = base, Unsettled(row)
    base.weights.append(weight)
    for _, module, name in candidate.sites:
        freeze(module, name, weight)


def _reader(candidate: Candidate, options: FrozenOptions, device: torch.device) -> ReadRows:
    """What reads rows of a weight: from the model, or from its first rank."""
    parameter = candidate.parameter
    if candidate.owner is not None:
        whole = candidate.owner.whole()
        return lambda first, last: whole[first:last]
    if options.broadcast is None:
        return lambda first, last: parameter[first:last]
    group = options.broadcast
    whole = torch.empty_like(parameter, device=device) if parameter.is_meta else parameter.detach().to(device)
    whole = whole.contiguous()
    dist.broadcast(whole, src=dist.get_global_rank(group, 0), group=group)
    return lambda first, last: whole[first:last]


def dequantize_frozen_params(model: nn.Module) -> int:
    """Give every quantized weight of ``model`` back to its module as a frozen parameter, dequantized. Collective.

    What an adapter is to be merged into, or a layer that is to be trained after all, must be a plain parameter. All
    of the model is then on every rank in full precision, so call it on a part of a large one, and before sharding.

    Args:
        model: A model or a part of one.

    Returns:
        How many weights there were.
    """
    sites: dict[FrozenWeight, list[tuple[FrozenModule, str]]] = {}
    for _, module, name, weight in frozen_sites(model):
        sites.setdefault(weight, []).append((module, name))
    for weight, users in sites.items():
        parameter = nn.Parameter(weight.dequantize(), requires_grad=False)
        for module, name in users:
            unfreeze(module, name, parameter)
    for base in {weight.base: None for weight in sites}:
        base.forget(set(sites))
    return len(sites)


def place_base(
    letter: str, group: dist.ProcessGroup | None, gpus_per_node: int | None, wrapping: ProcessMesh | None = None
) -> Placement:
    """A placement on ``group``, or on this process alone; without ``gpus_per_node``, on the mesh of ``wrapping``."""
    if group is None:
        return Placement(letter, ProcessMesh(Topology(1, 1), 0, None, None))
    if gpus_per_node is None and wrapping is not None and wrapping.group is group:
        return Placement(letter, wrapping)
    return Placement(letter, process_mesh(group, gpus_per_node), by_name=gpus_per_node is not None)


def device_of(group: dist.ProcessGroup | None, device: torch.device | str | int | None) -> torch.device | None:
    """Where codes are to be kept; None is where the weights are."""
    found = accelerator()
    if isinstance(device, int):
        return torch.device("cpu" if found is None else found.type, device)
    if device is not None:
        return torch.device(device)
    if found is None or group is None or dist.get_backend(group) == "gloo":
        return None
    return torch.device(found.type, torch.accelerator.current_device_index())
