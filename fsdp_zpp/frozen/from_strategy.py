"""Quantizes what a strategy with ``frozen=`` wraps; adapters call it before FSDP sees the parameters."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_zpp.codecs.as_stored import AsStored
from fsdp_zpp.collectives.agreement import agree
from fsdp_zpp.collectives.devices import compute_device
from fsdp_zpp.collectives.mesh import ProcessMesh, as_launched
from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.runtime.unit import StrategyUnit

from .base import FrozenBase
from .encoding import MIN_NUMEL, FrozenOptions, quantize_selected
from .packed_linear import packed_linear
from .placement import Placement
from .resharding import follow_strategy
from .selection import PACKED, SHARDED, select

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

    A base that is already quantized is resharded over the strategy's nodes.

    Args:
        strategy: The strategy; its parameter scope places the weights.
        module: The module that is about to be sharded.
        mesh: The ranks of the strategy.
        ignored: Parameters that FSDP was told to ignore.
        device: The device that FSDP was told to move the module to.
        dtype: The dtype that FSDP was told to compute in.
        broadcast: The group whose first rank has the right values; None if every rank has them.
        is_part: Whether other strategies shard the rest of the module, so that quantized weights stay where they are.

    Returns:
        Names of frozen parameters that stay as they are, by the reason.

    Raises:
        ValueError: If weights have no values, or infinite ones, or weights that were quantized before can't move.
    """
    if not is_part:
        follow_strategy(module, mesh)
    codec = strategy.frozen_codec
    if codec is None:
        return {}
    options = FrozenOptions(
        codec,
        Placement(strategy.parameters, as_launched(mesh)),
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
    """Return which of some parameters FSDP is to shard: not those of layers that :func:`quantize_for` takes over.

    Args:
        strategy: The strategy.
        modules: The modules that are about to be sharded.
        named: Their parameters, with names.
    """
    taken: set[int] = set()
    for module in modules if isinstance(strategy, Strategy) and strategy.frozen is not None else ():
        for layer in module.modules():
            weight = layer._parameters.get("weight")
            packed = None if weight is None or weight.requires_grad else packed_linear(weight, [layer])
            if packed is not None and packed.shape.numel() >= MIN_NUMEL:
                beside = [layer._parameters.get(name) for name in packed.beside]
                taken |= {id(parameter) for parameter in (weight, *beside) if parameter is not None}
    return [(name, parameter) for name, parameter in named if id(parameter) not in taken]


def prepare_frozen(root: nn.Module) -> None:
    """Make the units of the frozen base below ``root``, with all checks of a first use, and log nothing. Collective.

    Raises:
        ValueError: Where :meth:`FrozenBase.make_units` raises it.
    """
    for base in FrozenBase.below(root):
        base.prepare()


def _log_base_on_host(model: str, bases: Sequence[FrozenBase], units: Sequence[StrategyUnit]) -> None:
    """Log that a base does not lie on the nodes of its model's strategies, if links have decided on those."""
    nodes = next((unit.ranks.topology for unit in units if unit.ranks.by_links and unit.ranks.rank == 0), None)
    placements = (weight.placement for base in bases for weight in base.weights)
    on_host = next((each for each in placements if each.scope != "N" and not each.by_name), None)
    if nodes is not None and on_host is not None:
        logger.info(
            "%s: the frozen base stays sharded over %s, for a GPU may have no room for all of it; gpus_per_node=%d "
            "places it on %s",
            model,
            on_host.mesh.topology,
            nodes.gpus_per_node,
            nodes,
        )


def log_frozen(root: nn.Module, model: str, units: Sequence[StrategyUnit]) -> None:
    """Log what was quantized for strategies; if nothing was, though they have a codec for it, log that and why."""
    bases = FrozenBase.below(root)
    for base in bases:
        base.log_reports()
    _log_base_on_host(model, bases, units)
    quantizing = [unit for unit in units if unit.strategy.frozen is not None]
    if not quantizing or bases:
        return
    left: dict[str, list[str]] = {}
    for unit in quantizing:
        for reason, names in unit.left_unquantized.items():
            left.setdefault(reason, []).extend(names)
    # A call that wraps more of a model finds what earlier calls have left, and wrapped.
    reasons = {reason: names for reason, names in left.items() if reason != SHARDED or len(left) == 1}
    stays = "; ".join(f"{len(names)} {reason} ({names[0]}, ...)" for reason, names in reasons.items())
    why = f"; frozen parameters that stay as they are: {stays}" if stays else ""
    # Weights that are packed already take as little memory as the strategy wants.
    level = logging.INFO if any(reason.startswith(PACKED) for reason in left) else logging.WARNING
    if quantizing[0].ranks.rank == 0:
        logger.log(
            level,
            "%s: frozen=%s is NOT active: no frozen weight can or should be quantized%s",
            model,
            quantizing[0].strategy.frozen,
            why,
        )
