"""Optimizers of this process, from their construction on, by the parameters that they were given.

A node that joins takes over states before its own optimizers have stepped. Those that have are in known_optimizers.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn
from torch.optim.optimizer import Optimizer

_MADE = "_fsdp_zpp_made"


def note_optimizer(optimizer: Optimizer) -> None:
    """Remember ``optimizer`` for as long as it exists; a part of its construction."""
    # On torch's class, where torch's own hooks are, rather than in a global of this module; in the order in which they
    # were made, which is the same in all processes that run the same program.
    known: dict[int, weakref.ref[Optimizer]] | None = vars(Optimizer).get(_MADE)
    if known is None:
        known = {}
        setattr(Optimizer, _MADE, known)
    key = id(optimizer)
    if key not in known:
        known[key] = weakref.ref(optimizer, lambda reference: _forget(known, key, reference))


def _forget(known: dict[int, weakref.ref[Optimizer]], key: int, reference: weakref.ref[Optimizer]) -> None:
    if known.get(key) is reference:  # ids are used again
        del known[key]


def optimizers_of(parameters: Iterable[nn.Parameter]) -> list[Optimizer]:
    """Return the optimizers that hold any of ``parameters``, in the order in which they were made."""
    ids = {id(parameter) for parameter in parameters}
    known: dict[int, weakref.ref[Optimizer]] = vars(Optimizer).get(_MADE, {})
    optimizers = [optimizer for reference in list(known.values()) if (optimizer := reference()) is not None]
    return [each for each in optimizers if any(id(p) in ids for group in each.param_groups for p in group["params"])]
