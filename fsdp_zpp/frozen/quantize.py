"""Quantization of frozen weights: which of them, by which codec, and from where."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter, FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_zpp.codecs import NAMED, AsStored, Codec, FrozenName, check_place
from fsdp_zpp.comm.agreement import agree, check_agreement
from fsdp_zpp.comm.mesh import ProcessMesh, as_launched, compute_device
from fsdp_zpp.frozen.stored.format import NoStackError, StoredWeight
from fsdp_zpp.names import explains_arguments, model_name, parameter_name
from fsdp_zpp.runtime._torch_rank_layout import launched_node_size
from fsdp_zpp.runtime.api import DTYPES, check_module, ranks_of
from fsdp_zpp.runtime.full_tensors import reshard
from fsdp_zpp.runtime.unit import StrategyUnit, is_packed
from fsdp_zpp.strategy.strategy import Strategy

from ._torch_modules import (
    FrozenModule,
    frozen_sites,
    packed_linear,
    plain_class,
    sharded_parameters,
    unfreeze,
    unpack_linear,
)
from .checkpoint_reading import OTHER_FILES, ModelTensor, PlainTensor, find_tensors
from .frozen_base import FrozenBase, FrozenReport, check_nodes, log_report
from .weight import FrozenWeight, Placement, ReadValues, place_base

# ---- finite
#
# Refuses NaN and infinite values in a base: with one of them, all values of its block decode to NaN.
#
# A model on such a base has a loss of NaN from the first step on, and nothing points to the base.


def refuse_infinite_values(values: Tensor, name: str, remedy: str) -> None:
    """Raise ValueError, with the tensor's name and a ``remedy``, if it has NaN or infinite values."""
    if values.is_meta or not values.numel() or not values.is_floating_point():
        return
    # The least and the largest value are both NaN if any value is.
    if not torch.stack(torch.aminmax(values)).isfinite().all():
        raise ValueError(f"{name} has values that are NaN or infinite, which no codec can represent; {remedy}")


def finite_values(read: ReadValues, name: str, remedy: str) -> ReadValues:
    def checked(first: int, last: int) -> Tensor:
        values = read(first, last)
        refuse_infinite_values(values, name, remedy)
        return values

    return checked


# ---- selection
#
# Selects the parameters of a model that are worth quantizing, and says why the others are not.
#
# Two kinds are chosen: weights of nn.Linear and nn.Embedding, and stacks of matrices, such as the experts of an MoE
# layer. A stack is a 3-D parameter with shape[0] > 1 of a module outside torch.nn. Vectors, the routers of MoE layers,
# convolutions, and position embeddings of shape [1, positions, width] stay as they are.

SHARDED = "sharded by FSDP already"
PACKED = "packed already"
PLAIN = "not stored quantized"
OTHERWISE_SHARDED = "sharded by another parallelism"


@dataclass(eq=False)  # found by identity
class QuantizableWeight:
    """A weight and all modules that use it, each with its path and the weight's name there.

    ``packed`` has its codes, if another library has packed it.
    """

    parameter: nn.Parameter
    sites: list[tuple[str, nn.Module, str]]
    packed: StoredWeight | None = None

    @property
    def shape(self) -> torch.Size:
        return self.parameter.shape if self.packed is None else self.packed.shape  # unpacked

    @property
    def name(self) -> str:
        path, _, own_name = self.sites[0]
        return f"{path}.{own_name}".removeprefix(".")


@dataclass
class Selection:
    """Weights to quantize, in the order of the model, and parameters that stay as they are, by the reason."""

    chosen: list[QuantizableWeight] = field(default_factory=list)
    left: dict[str, list[tuple[str, nn.Parameter]]] = field(default_factory=dict)

    def leave(self, candidate: QuantizableWeight, reason: str) -> None:
        self.chosen.remove(candidate)
        self.left.setdefault(reason, []).append((candidate.name, candidate.parameter))

    def leave_plain(self) -> None:
        """Leave all weights that no library has packed: they have no codes to keep."""
        for candidate in [each for each in self.chosen if each.packed is None]:
            self.leave(candidate, PLAIN)

    @property
    def left_names(self) -> dict[str, tuple[str, ...]]:
        return {reason: tuple(name for name, _ in parameters) for reason, parameters in self.left.items()}

    def refuse_infinite(self) -> None:
        """Raise ValueError if weights that are to be quantized have NaN or infinite values on this rank."""
        for candidate in self.chosen:
            if candidate.packed is None:
                refuse_infinite_values(candidate.parameter.detach(), candidate.name, "load it again")

    def refuse_sharded(self, remedy: str) -> None:
        """Raise ValueError, with a ``remedy``, if weights to quantize are already sharded, by FSDP or otherwise."""
        if sharded := self.left.get(SHARDED):
            raise ValueError(f"{sharded[0][0]} is sharded by FSDP already; {remedy}")
        if sharded := self.left.get(OTHERWISE_SHARDED):
            raise ValueError(
                f"{sharded[0][0]} is sharded by another parallelism (tensor parallelism, or FSDP around this module), "
                "and a frozen base is made of whole weights; call quantize_frozen_params before FSDP shards them, or "
                "pass them in ignored_params, which leaves them as they are"
            )

    def check_agreement(
        self,
        call: str,
        model: nn.Module,
        group: dist.ProcessGroup | None,
        gpus_per_node: int | None,
        facts: dict[str, object],
    ) -> None:
        """Raise ValueError on all ranks unless they select the same weights by the same arguments. Collective."""
        if group is None:
            return
        # Distinguish an explicit size from an equal default: only the default may be changed by a strategy later.
        nodes = gpus_per_node or f"{launched_node_size(group)} (as launched)"
        chosen = {f"weight {c.name}": f"{c.parameter.dtype} {list(c.parameter.shape)}" for c in self.chosen}
        check_agreement(group, f"{call}({model_name(model)})", {"gpus_per_node": nodes} | facts | chosen)


def select(model: nn.Module, min_numel: int, ignored: Collection[Tensor] = (), unpack: bool = False) -> Selection:
    """Choose frozen weights with at least ``min_numel`` values, tied ones once. See the top of this section.

    Parts that FSDP has sharded are resharded. With ``unpack``, weights packed by other libraries are chosen, too.
    """
    reshard(model)  # a parameter that fully_shard has gathered is a plain tensor, but still FSDP's
    selection, seen = Selection(), set()
    ignored_ids, adapters = {id(tensor) for tensor in ignored}, _adapter_modules(model)
    sites_of, sharded = _sites_by_parameter(model), sharded_parameters(model)
    fsdp_modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    under_fsdp = {part for module in fsdp_modules for part in module.modules()}
    for path, module in model.named_modules():
        shapes = {name: shape for name, (_, shape) in sharded[module].items()}
        # Under FullyShardedDataParallel, modules do not show all parameters that it has sharded.
        shown = module._parameters | {name: parameter for name, (parameter, _) in sharded[module].items()}
        for name, parameter in shown.items():
            if parameter is None or parameter.requires_grad or id(parameter) in seen:
                continue
            is_sharded = name in shapes and _fits(module, name, shapes[name])
            if isinstance(parameter, FlatParameter) and not is_sharded:
                continue  # not seen yet: another part of this FlatParameter may be a weight
            seen.add(id(parameter))
            sites = sites_of.get(id(parameter), [(path, module, name)])
            packed = packed_linear(parameter, [site for _, site, _ in sites]) if unpack and not is_sharded else None
            if id(parameter) in ignored_ids:
                reason: str | None = "to be ignored"
            elif any(id(site) in adapters for _, site, _ in sites):
                reason = "an adapter's"
            elif is_sharded:
                # Before the other checks: a sharded parameter may have another shape and class now.
                by_another = isinstance(parameter, DTensor) and module not in under_fsdp
                reason = OTHERWISE_SHARDED if by_another else SHARDED
            else:
                reason = _unfit(parameter, sites, min_numel, packed)
            if reason is None:
                selection.chosen.append(QuantizableWeight(parameter, sites, packed))
            else:
                selection.left.setdefault(reason, []).append((parameter_name(path, name), parameter))
    return selection


def _unfit(
    parameter: nn.Parameter, sites: list[tuple[str, nn.Module, str]], min_numel: int, packed: StoredWeight | None
) -> str | None:
    """Return why a parameter can't or should not be quantized; None if it should be."""
    kind = type(parameter)
    if parameter.dim() == 1:
        return "1-D"
    for _, module, name in sites:
        if not _fits(module, name, parameter.shape):
            return f"of {type(module).__name__}, not nn.Linear or nn.Embedding"
        if hasattr(module, "parametrizations"):
            return "parametrized"
        if getattr(module, "max_norm", None) is not None:
            return "an nn.Embedding with max_norm, which writes to it"
    if packed is None and is_packed(parameter):
        return f"{PACKED} as {kind.__name__}"
    if packed is None and (kind not in (nn.Parameter, Tensor) or parameter.dtype not in DTYPES):
        return f"a {kind.__name__} of {parameter.dtype}"
    if (parameter.numel() if packed is None else packed.shape.numel()) < min_numel:
        return f"smaller than {min_numel} values"
    return None


def _fits(module: nn.Module, name: str, shape: torch.Size) -> bool:
    """Return whether a parameter is a weight of the kind that is quantized. See the top of this section."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        return name == "weight"
    of_torch = any(cls.__module__.startswith("torch.nn.") and cls is not nn.Module for cls in type(module).__mro__)
    return len(shape) == 3 and shape[0] > 1 and not of_torch


def _sites_by_parameter(model: nn.Module) -> dict[int, list[tuple[str, nn.Module, str]]]:
    sites: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                sites.setdefault(id(parameter), []).append((path, module, name))
    return sites


def _adapter_modules(model: nn.Module) -> set[int]:
    """Return the ids of the modules of PEFT's adapters: inactive ones are frozen, but not part of the base."""
    modules = set()
    for module in model.modules():
        for name in (*getattr(module, "adapter_layer_names", ()), "modules_to_save"):
            container = getattr(module, name, None)
            if isinstance(container, nn.Module):
                modules |= {id(inner) for inner in container.modules()}
    return modules


# ---- encoding
#
# Quantizes the parameters that were selected of a model, and puts frozen weights in their place.

Encoded = tuple[FrozenWeight, Tensor]  # a weight and its local payload

MIN_NUMEL = 4096  # a weight with fewer values costs more in bookkeeping than it saves in memory


@dataclass(frozen=True)
class FrozenOptions:
    """Arguments of :func:`quantize_frozen_params`, with their defaults resolved.

    Attributes:
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
    """Quantize the selected weights of ``model``, or replace them by the ``encoded`` ones. Collective.

    The caller has checked the arguments. The base is None if the model has no frozen weights at all.

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
        # A generator: memory that one weight is gathered or broadcast into is freed before the next one needs any.
        encoded = (encode_candidate(candidate, options) for candidate in selection.chosen)
    # Made even if nothing was chosen now: parts of the model may have bases, which are merged into this one.
    base = FrozenBase.of(model) if selection.chosen or FrozenBase.below(model) else None
    bytes_before, bytes_after, stored = 0, 0, 0
    for candidate, (weight, row) in zip(selection.chosen, encoded, strict=True):
        assert base is not None
        bytes_before += candidate.parameter.nbytes
        bytes_after += row.nbytes
        stored += isinstance(options.codec, AsStored) and weight.codec != options.codec.otherwise
        if candidate.packed is not None:
            for _, module, _ in candidate.sites:
                unpack_linear(module)
        base.add(weight, row, candidate.sites)
    report = FrozenReport(
        model_name(model),
        options.codec,
        options.placement,
        len(selection.chosen),
        sum(candidate.shape.numel() for candidate in selection.chosen),
        bytes_before,
        bytes_after,
        selection.left_names,
        stored,
    )
    return report, base


@dataclass(frozen=True)
class ReadTensors:
    """Selected weights, quantized, and the other tensors of a model, read from files.

    ``summary`` is text that must be the same on all ranks.
    """

    options: FrozenOptions
    encoded: list[Encoded]
    others: list[tuple[ModelTensor, Tensor]]
    summary: str


def put_in(
    model: nn.Module,
    selection: Selection,
    group: dist.ProcessGroup | None,
    read: Callable[[], ReadTensors],
) -> FrozenReport:
    """Put what ``read`` returns into ``model``: weights, in the order of the selection, and other tensors. Collective.

    If it raises on any rank, every rank raises.
    """
    # Read all of it before the model changes: if one rank's files are broken, no rank's model may be half quantized.
    found = agree(group, read, lambda found: found.summary, OTHER_FILES)
    report, _ = quantize_selected(model, selection, found.options, found.encoded)
    log_report([report])
    for tensor, value in found.others:
        tensor.fill(value, found.options.device or torch.device("cpu"))
    return report


def encode_candidate(
    candidate: QuantizableWeight,
    options: FrozenOptions,
    read: ReadValues | None = None,
    stored: StoredWeight | None = None,
) -> Encoded:
    """Quantize this rank's chunk of one weight, or keep it as it is stored.

    Args:
        candidate: The weight.
        options: How to quantize.
        read: Returns its values. Default: those in the model.
        stored: Its codes in a checkpoint, if there are any and the codec keeps stored codes.
    """
    parameter, packed = candidate.parameter, candidate.packed
    own_dtype = parameter.dtype if packed is None else packed.format.dtype
    device = options.device if options.device is not None else parameter.device
    # A weight on the meta device has no other device yet, so the CPU, where files are read, keeps its codes.
    kept_on = torch.device("cpu") if device.type == "meta" else device
    with torch.no_grad():
        if read is None and packed is not None:
            stored = packed if options.broadcast is None else _packed_by_first(packed, options.broadcast, device)
        codec: Codec | None = options.codec
        if isinstance(codec, AsStored):
            codec = codec.otherwise if stored is None else stored.format.codec
        elif stored is not None:
            read, stored = stored.values, None
        assert codec is not None, f"{candidate.name} is not stored quantized"
        weight = FrozenWeight(candidate.name, candidate.shape, options.dtype or own_dtype, codec, options.placement)
        if stored is not None:
            return weight, weight.keep(stored, kept_on)
        return weight, weight.encode(read or _reader(parameter, options.broadcast, device), kept_on)


def _packed_by_first(packed: StoredWeight, group: dist.ProcessGroup, device: torch.device) -> StoredWeight:
    """Return the first rank's codes of a packed weight. Collective."""
    whole = _from_first(packed.records(0, packed.format.num_groups).to(device), group)
    return StoredWeight(packed.format, lambda first, last: whole[first:last])


def _reader(parameter: nn.Parameter, broadcast: dist.ProcessGroup | None, device: torch.device) -> ReadValues:
    """Return a function that reads values of a weight: from this rank's model, or from the first rank's. Collective."""
    if broadcast is None:
        flat = parameter.detach().reshape(-1)
    else:
        whole = torch.empty_like(parameter, device=device) if parameter.is_meta else parameter.detach().to(device)
        flat = _from_first(whole.contiguous().view(-1), broadcast)
    return lambda first, last: flat[first:last]


def _from_first(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    # The whole tensor is sent, though each rank keeps little of it: each needs another part, and only the first rank
    # has all.
    dist.broadcast(whole, src=dist.get_global_rank(group, 0), group=group)
    return whole


# ---- from strategy
#
# Quantizes what a strategy with ``frozen=`` wraps; adapters call it before FSDP sees the parameters.

logger = logging.getLogger("fsdp_zpp")


def quantize_for(
    strategy: Strategy,
    module: nn.Module,
    mesh: ProcessMesh,
    *,
    ignored: Collection[Tensor] = (),
    device: torch.device | int | None = None,
    dtype: torch.dtype | None = None,
    broadcast: dist.ProcessGroup | None = None,
    is_part: bool = False,
) -> dict[str, tuple[str, ...]]:
    """Quantize the frozen weights of ``module`` if its strategy has a codec for them. Collective.

    Args:
        strategy: The strategy. Its parameter scope places the weights: ``G`` leaves a copy in each node, as ``I`` does.
        module: The module that is about to be sharded, over the ranks of ``mesh``.
        mesh: The ranks of the strategy.
        ignored: Parameters that FSDP was told to ignore.
        device: Where FSDP moves the module to.
        dtype: The dtype that FSDP computes in.
        broadcast: The group whose first rank has the right values; None if every rank has them.
        is_part: True if other strategies shard the rest of the module; weights that are quantized already then stay
            where they are.

    Returns:
        Names of frozen parameters that stay as they are, by the reason.
    """
    if not is_part:
        check_nodes(module, mesh)
    codec = strategy.frozen_codec
    if codec is None:
        return {}
    options = FrozenOptions(
        codec,
        Placement.of_strategy(strategy.parameters, as_launched(mesh)),
        device=compute_device(mesh.group, device),
        dtype=dtype,
        broadcast=broadcast,
    )
    selection = select(module, MIN_NUMEL, ignored, unpack=True)
    if codec == AsStored():
        selection.leave_plain()
    has_values = broadcast is None or mesh.rank == 0
    agree(mesh.group, lambda: selection.refuse_infinite() if has_values else None)
    report, base = quantize_selected(module, selection, options)
    if base is not None and report.weights:
        # Logged at the first use, when the model is complete: parts that are wrapped one by one make one line.
        base.reports.append(report)
    return report.left


def left_to_shard(
    strategy: object, modules: Iterable[nn.Module], named: Iterable[tuple[str, nn.Parameter]]
) -> list[tuple[str, nn.Parameter]]:
    """Return the ``named`` parameters of ``modules`` without those that :func:`quantize_for` takes over."""
    taken: set[int] = set()
    for module in modules if isinstance(strategy, Strategy) and strategy.frozen is not None else ():
        for layer in module.modules():
            weight = layer._parameters.get("weight")
            packed = None if weight is None or weight.requires_grad else packed_linear(weight, [layer])
            if packed is not None and packed.shape.numel() >= MIN_NUMEL:
                taken.add(id(weight))
    return [(name, parameter) for name, parameter in named if id(parameter) not in taken]


def prepare_frozen(root: nn.Module) -> None:
    """Make the units of the frozen base below ``root``, as :meth:`FrozenBase.prepare` does. Collective."""
    for base in FrozenBase.below(root):
        base.prepare()


def log_frozen(root: nn.Module, model: str, units: Sequence[StrategyUnit]) -> None:
    """Log what was quantized for strategies, or why nothing was."""
    bases = FrozenBase.below(root)
    for base in bases:
        base.log_reports()
    quantizing = [unit for unit in units if unit.strategy.frozen is not None]
    if not quantizing or bases:
        return
    left: dict[str, list[str]] = {}
    for unit in quantizing:
        for reason, names in unit.left_unquantized.items():
            left.setdefault(reason, []).extend(names)
    # When a model is wrapped in parts, a later call finds parameters of earlier parts as SHARDED. The earlier call has
    # given the real reason why they were left, so SHARDED is named only if there is no other reason.
    reasons = {reason: names for reason, names in left.items() if reason != SHARDED or len(left) == 1}
    stays = "; ".join(f"{len(names)} {reason} ({names[0]}, ...)" for reason, names in reasons.items())
    why = f"; frozen parameters that stay as they are: {stays}" if stays else ""
    # Packed weights take no more memory than the strategy wants, so they are no reason to warn.
    level = logging.INFO if any(reason.startswith(PACKED) for reason in left) else logging.WARNING
    if quantizing[0].ranks.rank == 0:
        logger.log(
            level,
            "%s: frozen=%s is NOT active: no frozen weight can or should be quantized%s",
            model,
            quantizing[0].strategy.frozen,
            why,
        )


# ---- quantize
#
# Turns frozen parameters into sharded codes outside of FSDP: ``quantize_frozen_params``, and its inverse.


@explains_arguments
def quantize_frozen_params(
    model: nn.Module,
    codec: Codec | FrozenName = "auto",
    *,
    placement: str = "I",
    gpus_per_node: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
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
        placement: A parameter scope: ``I`` keeps the base in every node, sharded inside; ``N`` keeps all of it on every
            rank. Either sends no byte between nodes.
        gpus_per_node: The node size. If the strategy that will wrap the model has a gpus_per_node, pass the same one.
            Default: the launcher's.
        process_group: The data-parallel ranks. Default: those that a part of the model is sharded over; all ranks if
            none is; this process alone if there is no process group.
        checkpoint: Where to read the weights: a safetensors file, an index of several, or a folder with
            ``model.safetensors`` or its index. Each rank reads the rows that it keeps. The checkpoint must have all
            frozen parameters and persistent buffers, quantized or not; trainable parameters are read, too, if a file
            has them. Default: take the weights from the model.
        min_numel: Weights with fewer values stay as they are.
        device: The device that keeps the codes. Default: this process's accelerator if the process group communicates
            through it, otherwise the device that each weight is on.
        dtype: The dtype of ``module.weight`` and of embeddings' outputs: your mixed precision's ``param_dtype``. Linear
            layers compute in the dtype of their input, or autocast's. Default: each weight's own.
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
    # _check_arguments raises, on all ranks, if it is no codec.
    chosen: Any = NAMED.get(codec, codec) if isinstance(codec, str) else codec
    group = ranks_of(model, process_group)
    in_the_model = checkpoint is None and not sync_module_states

    def check() -> tuple[Selection, torch.device | None]:
        _check_arguments(model, chosen, min_numel, dtype)
        selection = select(model, min_numel, ignored_params, unpack=True)
        if chosen == AsStored() and checkpoint is None:
            selection.leave_plain()
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
    if checkpoint is not None:
        return put_in(model, selection, group, lambda: _read(model, checkpoint, selection, options, group))
    report, _ = quantize_selected(model, selection, options)
    log_report([report])
    return report


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


def _read(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    selection: Selection,
    options: FrozenOptions,
    group: dist.ProcessGroup | None,
) -> ReadTensors:
    found, summary = find_tensors(checkpoint, model, warns=group is None or dist.get_rank(group) == 0)
    tensors = {id(tensor.tensor): tensor for tensor in found}
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
            stored = _stored(found[tensor], options.codec)
            read = finite_values(found[tensor].values, f"the checkpoint's {tensor.name}", "give a complete one")
        if stored is None and options.codec == AsStored():
            if tensor is not None:
                tensors[id(candidate.parameter)] = tensor
            selection.leave(candidate, PLAIN)
            continue
        encoded.append(encode_candidate(candidate, options, read, stored))
    others = [(tensor, found[tensor].read(tensor.tensor.dtype)) for tensor in tensors.values()]
    return ReadTensors(options, encoded, others, summary)


def _stored(tensor: PlainTensor, codec: Codec) -> StoredWeight | None:
    if not isinstance(codec, AsStored):
        return None
    try:
        return tensor.stored()
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
