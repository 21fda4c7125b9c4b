"""Codec state that was loaded, until it is known to belong to the weights.

[Note: Weights of codec state]
A save that is cut off between weights and codec state, over an older one, leaves both of different steps. So codec
state carries checksums of the weights that it was saved with. Weights may be loaded before codec state or after it. So
codec state is used if they match when it is loaded and none are loaded afterwards, or if they match at the next
forward. If they do not match on all ranks, it is dropped on all of them, those of other parallelisms too: copies of a
parameter would drift apart if one of them were sent with errors and another one without.

If nodes train on their own, a checkpoint has each piece of a weight from an arbitrary node, or the agreed weights.
Codec state has the weights of each node, so pieces are compared with these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from fsdp_zpp.collectives.agreement import from_each_rank, on_any_rank
from fsdp_zpp.collectives.fingerprint import checksums
from fsdp_zpp.collectives.mesh import ProcessMesh

from .fragment import Fragment, Span
from .unit import Checksums, StrategyUnit, Unit


def trained_checksums(unit: Unit) -> Checksums:
    """Return the checksums of a unit's trained parameters, which are what tells one step from another."""
    trained = set(unit.sharded.trained_names())
    return checksums({name: shard for name, shard in unit.sharded.named_shards().items() if name in trained})


class LoadedState:
    """Codec state that was loaded for several units. See [Note: Weights of codec state].

    Args:
        saved_with: Checksums by unit, of the weights that it was saved with.
        modules: The modules of these units.
        drop: Starts over without it.
    """

    def __init__(
        self, saved_with: Mapping[Unit, Checksums], modules: Iterable[nn.Module], drop: Callable[[], None]
    ) -> None:
        self.saved_with, self._drop = saved_with, drop
        self._held = {
            unit: (unit.loads, _held(unit, saved)) for unit, saved in saved_with.items() if _fragment_of(unit) is None
        }
        # On all of them: not every model is called by its root. The first that is called removes them.
        self._hooks = [module.register_forward_pre_hook(self._before_forward, prepend=True) for module in modules]
        for unit in saved_with:
            unit.loaded_state = self
            if (fragment := _fragment_of(unit)) is not None:
                fragment.before_restore = self.settle

    def forget(self) -> None:
        """Leave the state as it is: it was settled, or other state was loaded over it."""
        for hook in self._hooks:
            hook.remove()
        for unit in self.saved_with:
            unit.loaded_state = None
            if (fragment := _fragment_of(unit)) is not None:
                fragment.before_restore = lambda: None

    # Not traced: once, and then it is gone.
    @torch.compiler.disable
    def _before_forward(self, module: nn.Module, *inputs: object) -> None:
        self.settle()

    def settle(self) -> None:
        """Drop the state unless it belongs to the weights of all ranks. Collective."""
        self.forget()
        differs = not all(self._is_of_same(unit) for unit in self.saved_with if _fragment_of(unit) is None)
        local = [unit for unit in self.saved_with if _fragment_of(unit) is not None]
        # First the comparison over all ranks, which raises if some of them make another call.
        differs = self._on_any_rank(differs) or (bool(local) and self._on_any_rank(not self._nodes_hold(local)))
        if differs:
            self._drop()

    def _on_any_rank(self, differs: bool) -> bool:
        """Return whether ``differs`` is true on any rank, those of other parallelisms too. Collective."""
        # Dicts, not sets: ranks must go through them in the same order, and a set's order differs by process.
        groups = dict.fromkeys(unit.ranks.group for unit in self.saved_with)
        other_axes = dict.fromkeys(axis for unit in self.saved_with for axis in unit.sharded.other_axes())
        for group in (*groups, *other_axes):
            differs = on_any_rank(differs, group, "the first use of codec state that was loaded")
        return differs

    def _is_of_same(self, unit: Unit) -> bool:
        saved, (loads, held) = self.saved_with[unit], self._held[unit]
        return (loads == unit.loads and _match(held, saved)) or _match(_held(unit, saved), saved)

    def _nodes_hold(self, units: Sequence[Unit]) -> bool:
        """Return whether weights of units are those of any node or, all of them, the agreed ones. Collective."""
        meshes = dict.fromkeys(unit.ranks for unit in units)
        # Every rank communicates over each mesh, whatever it has found on the one before.
        found = [self._nodes_of_mesh_hold([unit for unit in units if unit.ranks == mesh], mesh) for mesh in meshes]
        return all(found)

    def _nodes_of_mesh_hold(self, units: Sequence[Unit], mesh: ProcessMesh) -> bool:
        fragments = [(each, self.saved_with[unit]) for unit in units if (each := _fragment_of(unit)) is not None]
        agreed = all(fragment.holds_loaded_agreed(names) for fragment, names in fragments)
        own = {
            (index, name): same
            for index, (fragment, names) in enumerate(fragments)
            for name, same in fragment.same_as_loaded(names).items()
        }
        # Of what was trained there, which may differ. An elastic node is alone, and has saved by itself.
        by_node = [own] if mesh.inter is None else from_each_rank(own, mesh.inter)
        return agreed or all(
            _cover(numel, [span for node in by_node for span in node.get(parameter, (0, []))[1]])
            for parameter, (numel, _) in own.items()
        )


def _fragment_of(unit: Unit) -> Fragment | None:
    return unit.fragment if isinstance(unit, StrategyUnit) else None


def _held(unit: Unit, saved: Checksums) -> Checksums:
    """Return the checksums of what this rank holds of parameters that were saved."""
    return checksums({name: shard for name, shard in unit.sharded.named_shards().items() if name in saved})


def _match(held: Checksums, saved: Checksums) -> bool:
    """Return whether parameters are those that were saved, perhaps in another dtype."""
    return all(dtype != saved[name][0] or value == saved[name][1] for name, (dtype, value) in held.items())


def _cover(numel: int, spans: Iterable[Span]) -> bool:
    """Return whether spans leave no gap in a tensor."""
    reached = 0
    for start, stop in sorted(spans):
        if start > reached:
            break
        reached = max(reached, stop)
    return reached >= numel
