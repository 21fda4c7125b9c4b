"""Quantizing implied by ``Strategy(frozen=...)``, for the adapters: before FSDP sees the parameters."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..strategy import Strategy
from ..topology import ProcessMesh
from .module import frozen_modules
from .placement import Placement
from .quantize import FrozenOptions, device_of, quantize_selected
from .selection import select
from .wrapped import follow_strategy

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
    """Quantize the frozen weights of ``module`` as its strategy says, if it does; logged when the model is complete.

    A base that is already quantized moves to the strategy's nodes.

    Args:
        strategy: The strategy; its parameter letter places them.
        module: What is about to be sharded.
        mesh: Its ranks.
        ignored: Parameters that FSDP was told to leave alone.
        device: Where FSDP was told to move the module.
        dtype: What FSDP was told to compute in.
        broadcast: The group whose first rank has the true weights; None if every rank has them.

    Raises:
        ValueError: If weights have no values, or what was quantized before can't move.
    """
    follow_strategy(module, mesh)
    if strategy.frozen is None:
        return
    options = FrozenOptions(
        strategy.frozen,
        Placement(strategy.parameters, mesh),
        device=device_of(dist.group.WORLD, device),
        dtype=dtype,
        broadcast=broadcast,
    )
    report, base = quantize_selected(module, select(module, options.min_numel, ignored), options)
    if base is not None and report.weights:
        base.reports.append(report)


def warn_if_nothing_is_frozen(root: nn.Module, model: str, strategies: Iterable[tuple[Strategy, ProcessMesh]]) -> None:
    """Say so, once, if a strategy has a codec for frozen weights and a model has none."""
    for strategy, mesh in strategies:
        if strategy.frozen is not None and mesh.rank == 0 and not any(True for _ in frozen_modules(root)):
            logger.warning("%s: frozen=%s is NOT active: no frozen weight was worth it", model, strategy.frozen)
            return
