"""How parameters that FSDP has sharded are taken back from it, so that they can be quantized.

``fully_shard`` keeps parameters one by one, so a single one can be taken from it: each has an owner.
FullyShardedDataParallel flattens the parameters of an instance into one, which can only be taken apart as a whole; what
is left of it is flattened again. Adapters register functions that find either in a model, since this package is below
them and does not import them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn


class ShardedParamHandle(Protocol):
    """Owns one sharded parameter."""

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype that it casts the parameter to for the computation; None is the parameter's own."""

    @property
    def kind(self) -> type:
        """The class of the tensor that it shards; a subclass may decide for itself what is gathered."""

    @property
    def can_release(self) -> bool:
        """Whether the parameter is sharded over data-parallel ranks alone, not gathered, and had no forward yet."""

    def whole(self) -> Tensor:
        """All values of the parameter, in its shape. Collective."""

    def release(self) -> None:
        """Take the parameter out of FSDP."""


class FlatParamHandleView(Protocol):
    """Owns parameters that are sharded as one flat parameter."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The original parameters, as modules have them; none if modules show only the flat parameter."""

    @property
    def requires_grad(self) -> bool:
        """Whether any of them is trainable."""

    @property
    def sites(self) -> Sequence[tuple[nn.Module, str, torch.Size]]:
        """Their modules, their names in them, and the shapes that they had before."""

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype that it casts them to for the computation; None is the parameters' own."""

    @property
    def can_open(self) -> bool:
        """Whether :meth:`opened` is possible."""

    def opened(self) -> AbstractContextManager[None]:
        """A context in which they are plain parameters; at its end, those still on their modules are flattened again.

        Entering it is collective.
        """


FindShardedParams = Callable[[nn.Module], Mapping[int, ShardedParamHandle]]
FindFlatParams = Callable[[nn.Module], Sequence[FlatParamHandleView]]
_FINDERS: list[FindShardedParams] = []
_FLAT_PARAM_FINDERS: list[FindFlatParams] = []


def register_sharded_params(find: FindShardedParams) -> None:
    """Register ``find(model)``, which returns the owners of a model's sharded parameters by the parameters' ``id``."""
    _FINDERS.append(find)


def sharded_params_in(model: nn.Module) -> dict[int, ShardedParamHandle]:
    """All owners of sharded parameters in ``model``, by the parameters' ``id``."""
    return {key: owner for find in _FINDERS for key, owner in find(model).items()}


def register_flat_params(find: FindFlatParams) -> None:
    """Register ``find(model)``, which returns a model's flat parameters, in the same order on every rank."""
    _FLAT_PARAM_FINDERS.append(find)


def flat_params_in(model: nn.Module) -> list[FlatParamHandleView]:
    """All flat parameters of ``model``."""
    return [flattened for find in _FLAT_PARAM_FINDERS for flattened in find(model)]
