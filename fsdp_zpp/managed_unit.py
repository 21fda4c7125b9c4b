"""A unit together with the parameters and shards that FSDP holds for it, for code that knows no adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor, nn

from .first_hops import Source

U = TypeVar("U", covariant=True)


@dataclass(frozen=True)
class ManagedUnit(Generic[U]):
    """A unit of a model, and access to its parameters.

    Parameters and shards are looked up at each use, since ``load_state_dict(assign=True)``, a move of the model, or
    FSDP itself may replace them.

    Args:
        name: The unit's name in profiles, errors and log lines.
        unit: The unit.
        parameters: Returns its current parameters, as an optimizer holds them.
        shards: Returns this rank's current shards.
        source: Reads its weights ahead of their gather; None if that is not possible.
        owners: Returns, for each parameter, the modules on which it is registered, where these show other tensors
            while the unit is unsharded.
    """

    name: str
    unit: U
    parameters: Callable[[], Sequence[nn.Parameter]]
    shards: Callable[[], Sequence[Tensor]]
    source: Source | None = None
    owners: Callable[[], Iterable[Sequence[nn.Module]]] = tuple

    @property
    def is_trained(self) -> bool:
        """Whether any of its parameters requires a gradient."""
        return any(parameter.requires_grad for parameter in self.parameters())
