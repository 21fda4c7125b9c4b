"""Who holds a frozen weight that is sharded before it is quantized, and gives it up.

``fully_shard`` keeps parameters one by one, so that one can be taken from it; the flat parameters of
FullyShardedDataParallel can't be taken apart. An adapter registers what finds the owners in a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


FindOwners = Callable[[nn.Module], Mapping[int, Owner]]
_FINDERS: list[FindOwners] = []


def register_owners(find: FindOwners) -> None:
    """Have ``find(model)`` tell the owners of a model's sharded parameters, by the parameters' ``id``."""
    _FINDERS.append(find)


def owners_in(model: nn.Module) -> dict[int, Owner]:
    """All owners in ``model``."""
    return {key: owner for find in _FINDERS for key, owner in find(model).items()}
