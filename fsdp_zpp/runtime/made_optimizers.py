"""Optimizers of this process, from their construction on, by the parameters that they were given.

A node that joins takes over states before its own optimizers have stepped. Those that have are in known_optimizers.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

_MADE = "_fsdp_zpp_made"


def note_optimizer(optimizer: Optimizer) -> None:
    """Remember ``optimizer`` for as long as it exists; a part of its construction."""
    _made().setdefault(id(optimizer), optimizer)


def optimizers_of(parameters: Iterable[nn.Parameter]) -> list[Optimizer]:
    """Return the optimizers that hold any of ``parameters``, in the order in which they were made."""
    ids = {id(parameter) for parameter in parameters}
    return [
        each for each in _made().values() if any(id(p) in ids for group in each.param_groups for p in group["params"])
    ]


def _made() -> weakref.WeakValueDictionary[int, Optimizer]:
    # On torch's class, where torch's own hooks are, rather than in a global of this module; in the order in which they
    # were made, which is the same in all processes that run the same program. Python's dictionary forgets the dead even
    # while the interpreter shuts down, when a callback of ours would find the globals of its module gone.
    if _MADE not in vars(Optimizer):
        setattr(Optimizer, _MADE, weakref.WeakValueDictionary())
    made: weakref.WeakValueDictionary[int, Optimizer] = vars(Optimizer)[_MADE]
    return made
