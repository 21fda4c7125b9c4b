"""Both of torch's FSDPs by one interface, so that a test is written once and runs over both."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from . import models

STOCK = None
"""Stands for torch's own full sharding where a strategy could be."""


@dataclass(frozen=True)
class Precision:
    """Dtypes of mixed precision; None as in torch's own policies."""

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None


@dataclass(frozen=True)
class Case:
    """A net and how to train it, in terms that both FSDPs know."""

    model: tuple[tuple[str, Any], ...] = ()  # arguments of models.Net
    frozen: bool = False  # the first block
    precision: Precision | None = None
    wrap_blocks: bool = True  # blocks are units of their own
    checkpointing: str = "none"  # "inside" or "outside" of a unit, and "reentrant" or "no_reentrant"
    optimizer: str = "sgd"  # see models.make_optimizer
    steps: int = 3
    micro_batches: int = 1  # of a step
    synced: bool = False  # each of them synchronizes gradients, or the last one only
    clip: float | None = 0.5  # the largest norm of the gradient
    scaler: bool = False


class Adapter:
    """One of torch's FSDPs and how it is called; its instances are values, which travel to the workers."""

    torch_name: ClassVar[str]
    mesh_argument: ClassVar[str]
    state_dict_kinds: ClassVar[tuple[str, ...]]

    def make(self, case: Case, strategy: Any, group: Any = None) -> Any:
        """In a worker: a sharded net, over ``group`` or all ranks."""
        net = models.make_net(frozen=case.frozen, **dict(case.model))
        if case.checkpointing.startswith("inside"):
            models.recompute(net, case.checkpointing, lambda module: isinstance(module, models.Block))
        return self.shard(net, case, strategy, group)

    def wrap(self, module: nn.Module, strategy: Any, **arguments: Any) -> Any:
        """Shard one module on this rank's device; what is sharded still has the original parameters."""
        return self.apply(module, strategy, **arguments)

    # Each FSDP defines these; weights and gradients come from all ranks, in fp32 on the CPU, by name.
    def apply(self, module: nn.Module, strategy: Any, **of_torch: Any) -> Any: ...  # one unit
    def shard(self, net: models.Net, case: Case, strategy: Any, group: Any = None) -> Any: ...  # unit by unit
    def micro_batch(self, model: Any, last: bool, synced: bool) -> AbstractContextManager[None]: ...  # of a step
    def clip(self, model: Any, norm: float) -> None: ...
    def local(self, parameter: nn.Parameter) -> Tensor: ...  # this rank's part
    def full_weights(self, model: Any) -> dict[str, Tensor]: ...
    def full_gradients(self, model: Any) -> dict[str, Tensor]: ...  # of parameters that have one
    def load_from(self, source: Any, target: Any, kind: str) -> None: ...  # a state dict of one of the kinds
    def before_load(self, model: Any) -> None: ...  # from outside


def original_name(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


def on_cpu(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in fp32 on the CPU, by their original names."""
    return {original_name(name): value.detach().float().cpu().clone() for name, value in named.items()}
