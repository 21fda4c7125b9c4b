"""The quantizing that ``Strategy(frozen=...)`` implies; adapters call it before FSDP sees the parameters."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_zpp.collectives.devices import compute_device
from fsdp_zpp.collectives.mesh import ProcessMesh
from fsdp_zpp.config.strategy import Strategy

from .encoding import FrozenOptions, quantize_selected
from .modules import frozen_modules
from .placement import Placement
from .resharding import follow_strategy
from .selection import select

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
) -> None:
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

    Raises:
        ValueError: If weights have no values, or weights that were quantized before can't move.
    """
    follow_strategy(module, mesh)
    if strategy.frozen is None:
        return
    options = FrozenOptions(
        strategy.frozen,
        Placement(strategy.parameters, mesh),
        device=compute_device(dist.group.WORLD, device),
        dtype=dtype,
        broadcast=broadcast,
    )
    report, base = quantize_selected(module, select(module, options.min_numel, ignored), options)
    if base is not None and report.weights:
        # Logged at the first use, when the model is complete: parts that are wrapped one by one make one line.
        base.reports.append(report)


def warn_if_nothing_is_frozen(root: nn.Module, model: str, strategies: Iterable[tuple[Strategy, ProcessMesh]]) -> None:
    """Warn once if a strategy has a codec for frozen weights, but none of the model's weights was quantized."""
    for strategy, mesh in strategies:
        if strategy.frozen is not None and mesh.rank == 0 and not any(True for _ in frozen_modules(root)):
            logger.warning(
                "%s: frozen=%s is NOT active: no frozen weight can or should be quantized", model, strategy.frozen
            )
            return
