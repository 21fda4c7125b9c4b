"""What the core knows of a unit and of the parameters that an adapter's FSDP holds for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor, nn

from .first_hops import Source

U = TypeVar("U", covariant=True)


@dataclass(frozen=True)
class ManagedUnit(Generic[U]):
    """A unit of a model, and where its parameters are to be had from.

    Parameters and shards are read anew each time: ``load_state_dict(assign=True)``, a move, or FSDP itself may replace
    them.

    Args:
        name: The unit's name in profiles, errors and log lines.
        unit: The unit.
        parameters: Gives its parameters as an optimizer may hold them by now.
        shards: Gives what this rank holds of it by now.
        source: Where its weights are to be had from ahead of their gather; None if it has none.
        owners: Gives the modules on which its parameters are registered, if those are others while it is unsharded.
    """

    name: str
    unit: U
    parameters: Callable[[], Sequence[nn.Parameter]]
    shards: Callable[[], Sequence[Tensor]]
    source: Source | None = None
    owners: Callable[[], Iterable[nn.Module]] = tuple

    @property
    def is_trained(self) -> bool:
        """Whether any of its parameters requires a gradient."""
        return any(parameter.requires_grad for parameter in self.parameters())
