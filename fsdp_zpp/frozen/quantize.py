"""Quantizes frozen weights: selects the weights, reads their values or codes, and encodes them."""

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

from ._torch_modules import FrozenModule, frozen_sites, packed_linear, plain_class, sharded_parameters, unfreeze
from .checkpoint_reading import OTHER_FILES, ModelTensor, PlainTensor, find_tensors
from .frozen_base import FrozenBase, FrozenReport, check_nodes, log_report
from .weight import FrozenWeight, Placement, ReadValues, place_base

# ---- finite
#
# Refuses NaN and infinite values in a base: a single one makes the whole block around it decode to NaN.
#
# The loss would be NaN from the first step on, and nothing would point to the base.


def refuse_infinite_values(values: Tensor, name: str, remedy: str) -> None:
    """Raise ValueError, with ``name`` and ``remedy``, if ``values`` has NaN or infinite values."""
    if values.is_meta or not values.numel() or not values.is_floating_point():
        return
    # The minimum and the maximum are both NaN if any value is.
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
# Selects the frozen parameters of a model that are worth quantizing, and says why the others are not.
#
# Two kinds are chosen: weights of nn.Linear and nn.Embedding, and stacks of matrices, such as the experts of an MoE
# layer. A stack is a 3-D parameter, with shape[0] > 1, of a module outside torch.nn. Vectors, the routers of MoE
# layers, convolutions, and position embeddings of shape [1, positions, width] stay as they are.

SHARDED = "sharded by FSDP already"
PACKED = "packed already"
PLAIN = "not stored quantized"
OTHERWISE_SHARDED = "sharded by another parallelism"


@dataclass(eq=False)  # found by identity
class QuantizableWeight:
    """A weight and its sites: for each module that uses it, the module's path, the module, and the weight's name in it.

    ``packed`` is the weight as another library has packed it; None if it is plain.
    """

    parameter: nn.Parameter
    sites: list[tuple[str, nn.Module, str]]
    packed: StoredWeight | None = None

    @property
    def shape(self) -> torch.Size:
        return self.parameter.shape if self.packed is None else self.packed.shape  # decoded

    @property
    def name(self) -> str:
        path, _, own_name = self.sites[0]
        return f"{path}.{own_name}".removeprefix(".")


@dataclass
class Selection:
    """The weights to quantize, in the order of the model, and the parameters that stay as they are, by the reason."""

    chosen: list[QuantizableWeight] = field(default_factory=list)
    left: dict[str, list[tuple[str, nn.Parameter]]] = field(default_factory=dict)

    def leave(self, candidate: QuantizableWeight, reason: str) -> None:
        self.chosen.remove(candidate)
        self.left.setdefault(reason, []).append((candidate.name, candidate.parameter))

    def leave_plain(self) -> None:
        """Deselect the weights that no library has packed, since they have no codes to keep."""
        for candidate in [each for each in self.chosen if each.packed is None]:
            self.leave(candidate, PLAIN)

    def refuse_infinite(self) -> None:
        """Raise ValueError if weights to quantize have NaN or infinite values on this rank."""
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
        """Raise ValueError on all ranks unless they select the same weights, by the same arguments. Collective."""
        if group is None:
            return
        # Distinguish an explicit size from an equal default: strategies replace or check only a default.
        nodes = gpus_per_node or f"{launched_node_size(group)} (as launched)"
        chosen = {f"weight {c.name}": f"{c.parameter.dtype} {list(c.parameter.shape)}" for c in self.chosen}
        check_agreement(group, f"{call}({model_name(model)})", {"gpus_per_node": nodes} | facts | chosen)


def select(model: nn.Module, min_numel: int, ignored: Collection[Tensor] = (), unpack: bool = False) -> Selection:
    """Choose frozen weights with at least ``min_numel`` values, tied ones once; see the top of this section.

    Unsharded parts are resharded first. With ``unpack``, weights packed by other libraries are chosen, too.
    """
    reshard(model)  # an unsharded parameter of fully_shard is a plain tensor, but FSDP still owns it
    selection, seen = Selection(), set()
    ignored_ids, adapters = {id(tensor) for tensor in ignored}, _adapter_modules(model)
    sites_of, sharded = _sites_by_parameter(model), sharded_parameters(model)
    fsdp_modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    under_fsdp = {part for module in fsdp_modules for part in module.modules()}
    for path, module in model.named_modules():
        shapes = {name: shape for name, (_, shape) in sharded[module].items()}
        # FullyShardedDataParallel takes some parameters out of module._parameters.
        shown = module._parameters | {name: parameter for name, (parameter, _) in sharded[module].items()}
        for name, parameter in shown.items():
            if parameter is None or parameter.requires_grad or id(parameter) in seen:
                continue
            is_sharded = name in shapes and _fits(module, name, shapes[name])
            if isinstance(parameter, FlatParameter) and not is_sharded:
                continue  # not added to ``seen``: another part of this FlatParameter may be a weight
            seen.add(id(parameter))
            sites = sites_of.get(id(parameter), [(path, module, name)])
            packed = packed_linear(parameter, [site for _, site, _ in sites]) if unpack and not is_sharded else None
            if id(parameter) in ignored_ids:
                reason: str | None = "to be ignored"
            elif any(id(site) in adapters for _, site, _ in sites):
                reason = "an adapter's"
            elif is_sharded:
                # Before _unfit, since sharding may have changed the parameter's shape and class.
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
    """Return whether a parameter is one of the two kinds that are quantized; see the top of this section."""
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
    """Return the ids of the modules of PEFT's adapters: inactive adapters are frozen, but are not part of the base."""
    modules = set()
    for module in model.modules():
        for name in (*getattr(module, "adapter_layer_names", ()), "modules_to_save"):
            container = getattr(module, name, None)
            if isinstance(container, nn.Module):
                modules |= {id(inner) for inner in container.modules()}
    return modules


# ---- encoding
#
# Quantizes the selected parameters of a model, and puts frozen weights in their place.

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
        # A generator, so that the memory of one weight's broadcast is freed before the next broadcast.
        encoded = (encode_candidate(candidate, options) for candidate in selection.chosen)
    # FrozenBase.of merges the bases of the model's parts into one, also if no weight is chosen.
    base = FrozenBase.of(model) if selection.chosen or FrozenBase.below(model) else None
    bytes_before, bytes_after, stored = 0, 0, 0
    for candidate, (weight, row) in zip(selection.chosen, encoded, strict=True):
        assert base is not None
        bytes_before += candidate.parameter.nbytes
        bytes_after += row.nbytes
        stored += isinstance(options.codec, AsStored) and weight.codec != options.codec.otherwise
        if candidate.packed is not None:
            for _, module, _ in candidate.sites:
                module.__class__ = nn.Linear
                vars(module).pop("quant_state", None)
        base.add(weight, row, candidate.sites)
    report = FrozenReport(
        model_name(model),
        options.codec,
        options.placement,
        len(selection.chosen),
        sum(candidate.shape.numel() for candidate in selection.chosen),
        bytes_before,
        bytes_after,
        {reason: tuple(name for name, _ in parameters) for reason, parameters in selection.left.items()},
        stored,
    )
    return report, base


@dataclass(frozen=True)
class ReadTensors:
    """Tensors of a model that were read from files: the selected weights, encoded, and the others.

    ``summary`` must be the same on all ranks.
    """

    options: FrozenOptions
    encoded: list[Encoded]
    others: list[tuple[ModelTensor, Tensor]]
    summary: str


def put_in(
    model: nn.Module, selection: Selection, group: dist.ProcessGroup | None, read: Callable[[], ReadTensors]
) -> FrozenReport:
    """Put the tensors that ``read`` returns into ``model``; weights are in the order of the selection. Collective.

    If ``read`` raises on any rank, every rank raises.
    """
    # Read everything before the model changes, so that broken files on one rank leave no rank with half a base.
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
    """Return a frozen weight with this rank's chunk, quantized or kept as stored.

    Args:
        candidate: The weight.
        options: How to quantize.
        read: Returns the weight's values. Default: those in the model.
        stored: The weight as a checkpoint stores it, if its codes are to be kept.
    """
    parameter, packed = candidate.parameter, candidate.packed
    own_dtype = parameter.dtype if packed is None else packed.format.dtype
    device = options.device if options.device is not None else parameter.device
    # A weight on the meta device has no device yet, so its codes stay on the CPU, where files are read.
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
    """Return a packed weight with the first rank's codes. Collective."""
    whole = _from_first(packed.records(0, packed.format.num_groups).to(device), group)
    return StoredWeight(packed.format, lambda first, last: whole[first:last])


def _reader(parameter: nn.Parameter, broadcast: dist.ProcessGroup | None, device: torch.device) -> ReadValues:
    """Return a reader of a weight's values on this rank, or on the first rank of ``broadcast``. Collective."""
    if broadcast is None:
        flat = parameter.detach().reshape(-1)
    else:
        whole = torch.empty_like(parameter, device=device) if parameter.is_meta else parameter.detach().to(device)
        flat = _from_first(whole.contiguous().view(-1), broadcast)
    return lambda first, last: flat[first:last]


def _from_first(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    # Send the whole weight, though each rank keeps only a part: parts differ, and only the first rank has them.
    dist.broadcast(whole, src=dist.get_global_rank(group, 0), group=group)
    return whole


# ---- from strategy
#
# Quantizes the modules that a strategy with ``frozen=`` wraps, before FSDP sees their parameters.

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
        strategy: The strategy. Its parameter scope places the weights: ``G`` shards them inside each node, like ``I``.
        module: The module that is about to be sharded.
        mesh: The ranks to shard it over.
        ignored: Parameters that FSDP was told to ignore.
        device: The device that FSDP moves the module to.
        dtype: The dtype that FSDP computes in.
        broadcast: The group whose first rank has the right values; None if every rank has them.
        is_part: True if other strategies shard the rest of the module. Weights that are quantized already are
            then not checked against the nodes of ``mesh``.

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
        # Logged at the first use, when the model is complete, so that parts wrapped one by one make one line.
        base.reports.append(report)
    return report.left


def left_to_shard(
    strategy: object, modules: Iterable[nn.Module], named: Iterable[tuple[str, nn.Parameter]]
) -> list[tuple[str, nn.Parameter]]:
    """Return ``named`` without the packed parameters of ``modules`` that :func:`quantize_for` takes over."""
    taken: set[int] = set()
    for module in modules if isinstance(strategy, Strategy) and strategy.frozen is not None else ():
        for layer in module.modules():
            weight = layer._parameters.get("weight")
            packed = None if weight is None or weight.requires_grad else packed_linear(weight, [layer])
            if packed is not None and packed.shape.numel() >= MIN_NUMEL:
                taken.add(id(weight))
    return [(name, parameter) for name, parameter in named if id(parameter) not in taken]


def prepare_frozen(root: nn.Module) -> None:
    """Call :meth:`FrozenBase.prepare` of the bases below ``root``. Collective."""
    for base in FrozenBase.below(root):
        base.prepare()


def log_frozen(root: nn.Module, model: str, units: Sequence[StrategyUnit]) -> None:
    """Log what strategies have quantized, or why they have quantized nothing."""
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
    # If a model is wrapped in parts, a later call leaves parameters of earlier parts as SHARDED, but the earlier call
    # has left them for the real reason. So SHARDED is named only if there is no other reason.
    reasons = {reason: names for reason, names in left.items() if reason != SHARDED or len(left) == 1}
    stays = "; ".join(f"{len(names)} {reason} ({names[0]}, ...)" for reason, names in reasons.items())
    why = f"; frozen parameters that stay as they are: {stays}" if stays else ""
    # Packed weights are small already, so they are no reason to warn.
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
# ``quantize_frozen_params`` turns frozen parameters into sharded codes; ``dequantize_frozen_params`` turns them back.


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
    """Quantize every frozen weight that is large enough, shard the codes, and return a report. Collective.

    It quantizes the weights of nn.Linear and nn.Embedding, and the stacks of matrices that hold the experts of an MoE
    layer, tied ones once. Reading ``module.weight`` then returns the dequantized weight. Quantized weights are not
    parameters any more: FSDP does not gather them, they are not in ``model.state_dict()`` (``save_frozen_params`` saves
    them), and they never have gradients. A second call quantizes the weights that were frozen since the first.

    Call it before you wrap the model, or pass ``Strategy(frozen=...)`` instead. If a part of the model is wrapped
    already, pass its frozen weights, which FSDP has sharded, in ``ignored_params``; the rest is quantized.

    Args:
        model: Any model with frozen parameters, such as a PEFT model. It may be on the meta device if there is a
            ``checkpoint``.
        codec: The codec of the weights. ``"as stored"`` keeps the codes of weights that are quantized in the checkpoint
            or in the model, and leaves all other weights as they are. ``"auto"`` keeps these codes, too, and encodes
            the other weights in ``Int8(256)``.
        placement: A parameter scope: ``I`` keeps a copy of the base in every node, sharded inside; ``N`` keeps all of
            it on every rank. With either, gathers send no byte between nodes.
        gpus_per_node: The node size. If the strategy that will wrap the model has a gpus_per_node, pass the same one.
            Default: the launcher's.
        process_group: The data-parallel ranks. Default: those that a part of the model is sharded over; all ranks if no
            part is; this process alone if there is no process group.
        checkpoint: The source of the weights: a safetensors file, an index of several, or a folder with
            ``model.safetensors`` or its index. Each rank reads the rows that it keeps. The checkpoint must have all
            frozen parameters and persistent buffers, quantized or not; trainable parameters are read, too, if a file
            has them. Default: take the weights from the model.
        min_numel: Weights with fewer values stay as they are.
        device: The device that keeps the codes. Default: this process's accelerator if the process group communicates
            through it, otherwise the device of each weight.
        dtype: The dtype of ``module.weight`` and of embeddings' outputs; pass your mixed precision's ``param_dtype``.
            Linear layers compute in the dtype of their input, or autocast's. Default: each weight's own.
        ignored_params: Parameters that stay as they are.
        sync_module_states: True to broadcast the first rank's weights, one at a time, as FSDP's option does.

    Returns:
        A report: the weights that were quantized, their bytes now, the parameters that stay as they are, and why.

    Raises:
        TypeError: If an argument has the wrong type, on any rank; every rank raises.
        ValueError: If an argument is out of range, on any rank; if weights are sharded already, by FSDP or by another
            parallelism; if they have no values, or NaN or infinite ones; or if a checkpoint is broken or of another
            model. Every rank raises, and the model is unchanged.

    Examples:
        >>> model = get_peft_model(AutoModelForCausalLM.from_pretrained(path), LoraConfig(...))
        >>> quantize_frozen_params(model, Int8(256))
        >>> model = FullyShardedDataParallel(model, sharding_strategy=Strategy.zeropp(), use_orig_params=True, ...)
    """
    # If it is no codec, _check_arguments raises on all ranks.
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
    where = place_base(model, placement, group, gpus_per_node)
    options = FrozenOptions(chosen, where, kept_on, dtype, group if sync_module_states else None)
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

    Merging adapters into the base, or training a layer after all, takes plain parameters. Every rank then has all of
    these in full size, so call it before sharding, and only on the part of a large model that needs it.

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
    """Return each frozen weight's modules, with its names in them; raise if a module is parametrized."""
    check_module(model)
    sites: dict[FrozenWeight, list[tuple[FrozenModule, str]]] = {}
    for _, module, name, weight in frozen_sites(model):
        plain_class(module)
        sites.setdefault(weight, []).append((module, name))
    return sites
