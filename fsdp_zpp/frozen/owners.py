"""Who holds a frozen weight that is sharded before it is quantized, and gives it up.

``fully_shard`` keeps parameters one by one, so that one can be taken from it: each has an owner. What
FullyShardedDataParallel has flattened can only be taken apart as a whole, and what is left of it be flattened again. An
adapter registers what finds either in a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn


class Owner(Protocol):
    """Holds one sharded parameter."""

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """What it casts the parameter to for the computation; None is the parameter's own."""

    @property
    def kind(self) -> type:
        """The class of what it shards: a plain tensor's, or one that decides itself what is gathered."""

    @property
    def can_release(self) -> bool:
        """Whether the parameter is sharded over data-parallel ranks alone, not gathered, and had no forward yet."""

    def whole(self) -> Tensor:
        """The parameter's values. Collective."""

    def release(self) -> None:
        """Forget the parameter."""


class Flattened(Protocol):
    """Holds parameters that are sharded as one."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """As modules have them; none where only the one that they make up is shown."""

    @property
    def requires_grad(self) -> bool:
        """Whether any of them is trainable."""

    @property
    def sites(self) -> Sequence[tuple[nn.Module, str, torch.Size]]:
        """Their modules, their names in them, and their shapes before."""

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """What it casts them to for the computation; None is the parameters' own."""

    @property
    def can_open(self) -> bool:
        """Whether :meth:`opened` is possible."""

    def opened(self) -> AbstractContextManager[None]:
        """A context in which they are plain parameters; those still on their modules at its end are flattened again.

        Collective on entering.
        """


FindOwners = Callable[[nn.Module], Mapping[int, Owner]]
FindFlattened = Callable[[nn.Module], Sequence[Flattened]]
_FINDERS: list[FindOwners] = []
_FLATTENED_FINDERS: list[FindFlattened] = []


def register_owners(find: FindOwners) -> None:
    """Have ``find(model)`` tell the owners of a model's sharded parameters, by the parameters' ``id``."""
    _FINDERS.append(find)


def owners_in(model: nn.Module) -> dict[int, Owner]:
    """All owners in ``model``."""
    return {key: owner for find in _FINDERS for key, owner in find(model).items()}


def register_flattened(find: FindFlattened) -> None:
    """Have ``find(model)`` tell what is flattened in a model, in the same order on every rank."""
    _FLATTENED_FINDERS.append(find)


def flattened_in(model: nn.Module) -> list[Flattened]:
    """All that is flattened in ``model``."""
    return [flattened for find in _FLATTENED_FINDERS for flattened in find(model)]
