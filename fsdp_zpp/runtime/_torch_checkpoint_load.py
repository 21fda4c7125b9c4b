"""Private names of torch's distributed checkpoints: weights that ``dcp.load`` has written in place.

A state dict of ``fully_shard`` shows the shards themselves, so a load writes to the weights, whether or not its result
is set on the model afterwards. torch has no hook for that. At each call, all its public functions look up the private
one that loads in the globals of their module. So a replacement there also hears of calls by code that has imported them
before.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection
from typing import Any, Protocol
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader

from fsdp_zpp.collectives.mesh import ProcessMesh

_LISTENERS = "_fsdp_zpp_listeners"


class Listener(Protocol):
    """A unit, whose weights a load may have written."""

    @property
    def ranks(self) -> ProcessMesh:
        """Return the unit's ranks."""

    def weights_loaded(self) -> None:
        """Handle weights that were loaded."""


def hear_of_loads(unit: Listener) -> None:
    """Call ``unit.weights_loaded()`` after each load by all of its ranks, for as long as the unit exists.

    It does not matter which tensors are loaded: a rank may hold nothing of a unit, and could not tell.
    """
    # On torch's function, rather than in a global of this module.
    listeners: WeakSet[Listener] | None = getattr(state_dict_loader._load_state_dict, _LISTENERS, None)
    if listeners is None:
        listeners = _install()
    listeners.add(unit)


def _install() -> WeakSet[Listener]:
    """Wrap the function that loads, once for all units."""
    original = state_dict_loader._load_state_dict
    signature = inspect.signature(original)
    listeners: WeakSet[Listener] = WeakSet()

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> None:
        try:
            original(*args, **kwargs)
        finally:  # a load that fails may have written, too
            given = signature.bind(*args, **kwargs).arguments
            _tell(list(listeners), _loading(given.get("process_group"), alone=bool(given.get("no_dist"))))

    setattr(load, _LISTENERS, listeners)
    state_dict_loader._load_state_dict = load
    return listeners


def _loading(group: dist.ProcessGroup | None, *, alone: bool) -> frozenset[int]:
    """Return the ranks that take part in a load."""
    if not dist.is_initialized() or dist.get_rank(group) < 0:
        return frozenset()
    return frozenset([dist.get_rank()] if alone else dist.get_process_group_ranks(group))


def _tell(units: Collection[Listener], loading: frozenset[int]) -> None:
    # If some ranks of a unit took it for stale and others did not, they would enter different collectives.
    all_load = functools.cache(lambda mesh: mesh.is_within(loading))
    for unit in units:
        if all_load(unit.ranks):
            unit.weights_loaded()
