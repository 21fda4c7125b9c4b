"""Codec state in checkpoints: the state that codecs and nodes keep from step to step."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.optim import Optimizer

from fsdp_zpp.comm.agreement import checksums, from_each_rank, on_any_rank
from fsdp_zpp.comm.error_feedback import ErrorFeedbackState
from fsdp_zpp.comm.mesh import ProcessMesh
from fsdp_zpp.comm.weight_gather import SecondaryShard
from fsdp_zpp.local_steps.fragment import Fragment, Span
from fsdp_zpp.local_steps.local_training import OptimizerState

from .api import communicators
from .unit import Checksums, ParameterUnit, StrategyUnit, named_units

# ---- codec state that was loaded, until it is known to belong to the weights
#
# [Note: Weights of codec state]
# If a save over an older checkpoint is cut off between weights and codec state, the two are of different steps. So
# codec state carries checksums of the weights that it was saved with. Weights may be loaded before or after codec
# state. So codec state is used if the weights match when it is loaded and no weights are loaded later, or if they match
# at the next forward. If the weights differ on any rank, all ranks drop codec state, including ranks of other
# parallelisms: if error feedback started over for only some copies of a parameter, the copies would diverge.
#
# With local steps, a checkpoint has either the agreed weights, or weights whose pieces come from arbitrary nodes. Codec
# state has the weights of every node, so the pieces are compared with these weights instead of checksums.


class LoadedState:
    """Loaded codec state of several units, until it is used or dropped. See [Note: Weights of codec state]."""

    def __init__(
        self, saved_with: Mapping[ParameterUnit, Checksums], modules: Iterable[nn.Module], drop: Callable[[], None]
    ) -> None:
        self.saved_with, self._drop = saved_with, drop
        self._checksums_at_load = {
            unit: (unit.loads, _digest(unit, saved)) for unit, saved in saved_with.items() if _fragment_of(unit) is None
        }
        # All modules get a hook, since not every model is called by its root. The first call removes all hooks.
        self._hooks = [module.register_forward_pre_hook(self.verify_or_drop, prepend=True) for module in modules]
        for unit in saved_with:
            unit.loaded_state = self
            if (fragment := _fragment_of(unit)) is not None:
                fragment.before_restore = self.verify_or_drop

    def forget(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for unit in self.saved_with:
            unit.loaded_state = None
            if (fragment := _fragment_of(unit)) is not None:
                fragment.before_restore = lambda: None

    @torch.compiler.disable  # it runs once
    def verify_or_drop(self, *forward: object) -> None:
        """Drop the state unless it matches the weights of all ranks. Collective."""
        self.forget()
        differs = not all(self._is_of_same(unit) for unit in self.saved_with if _fragment_of(unit) is None)
        local = [unit for unit in self.saved_with if _fragment_of(unit) is not None]
        # Compare over all ranks first: this raises if some rank is in another collective.
        differs = self._on_any_rank(differs) or (bool(local) and self._on_any_rank(not self._nodes_hold(local)))
        if differs:
            self._drop()

    def _on_any_rank(self, differs: bool) -> bool:
        """Return whether ``differs`` is true on any rank, including those of other parallelisms. Collective."""
        # Dicts, not sets: ranks must go through them in the same order, and a set's order differs by process.
        groups = dict.fromkeys(unit.ranks.group for unit in self.saved_with)
        axes = dict.fromkeys(axis for unit in self.saved_with for axis in unit.sharded.model_parallel_groups())
        for group in (*groups, *axes):
            differs = on_any_rank(differs, group, "the first use of codec state that was loaded")
        return differs

    def _is_of_same(self, unit: ParameterUnit) -> bool:
        saved, (loads, at_load) = self.saved_with[unit], self._checksums_at_load[unit]
        return (loads == unit.loads and _match(at_load, saved)) or _match(_digest(unit, saved), saved)

    def _nodes_hold(self, units: Sequence[ParameterUnit]) -> bool:
        """Return whether all weights are the agreed ones, or each piece of a weight is from some node. Collective."""
        meshes = dict.fromkeys(unit.ranks for unit in units)
        # Every rank communicates over each mesh, whatever it has found on the one before.
        found = [self._nodes_of_mesh_hold([unit for unit in units if unit.ranks == mesh], mesh) for mesh in meshes]
        return all(found)

    def _nodes_of_mesh_hold(self, units: Sequence[ParameterUnit], mesh: ProcessMesh) -> bool:
        fragments = [(each, self.saved_with[unit]) for unit in units if (each := _fragment_of(unit)) is not None]
        agreed = all(fragment.holds_loaded_agreed(names) for fragment, names in fragments)
        own = {
            (index, name): same
            for index, (fragment, names) in enumerate(fragments)
            for name, same in fragment.same_as_loaded(names).items()
        }
        # Only weights that the node trained are compared. An elastic node has no inter-node hop: it saves alone.
        by_node = [own] if mesh.inter is None else from_each_rank(own, mesh.inter)
        return agreed or all(
            _cover(numel, [span for node in by_node for span in node.get(parameter, (0, []))[1]])
            for parameter, (numel, _) in own.items()
        )


def _fragment_of(unit: ParameterUnit) -> Fragment | None:
    return unit.fragment if isinstance(unit, StrategyUnit) else None


def _digest(unit: ParameterUnit, names: Collection[str]) -> Checksums:
    return checksums({name: shard for name, shard in unit.sharded.named_shards().items() if name in names})


def _match(present: Checksums, saved: Checksums) -> bool:
    return all(dtype != saved[name][0] or value == saved[name][1] for name, (dtype, value) in present.items())


def _cover(numel: int, spans: Iterable[Span]) -> bool:
    reached = 0
    for start, stop in sorted(spans):
        reached = max(reached, stop) if start <= reached else reached
    return reached >= numel


# ---- codec state in checkpoints
#
# Codec state belongs to the rank that sends: no other rank has it, and it depends on how the ranks are laid out. So
# each rank saves its own part, under keys that name the rank. It saves bytes, since torch.distributed.checkpoint loads
# bytes without knowing their size beforehand. The layout is saved with them. On another layout, or with other weights
# than those that it was saved with ([Note: Weights of codec state]), codec state starts over: errors are zero, weights
# are sent whole once, nodes restart their local steps, and a warning says so.

logger = logging.getLogger("fsdp_zpp")


SavedState = ErrorFeedbackState | SecondaryShard | Fragment | OptimizerState
"""Codec state of one unit, or of one optimizer."""

_SAVED_WITH = "saved_with"
"""In the saved state of each part of a unit: the key of the checksums of the unit's weights."""


class RankState:
    """Codec state of several units on this rank.

    The names of ``parts`` are the same on all ranks. ``units`` maps a part's name to the unit whose checksums are saved
    with it. If ``warns`` is set, this rank logs a warning when state starts over.
    """

    def __init__(
        self,
        parts: Mapping[str, SavedState],
        meshes: Iterable[ProcessMesh],
        units: Mapping[str, ParameterUnit] | None = None,
        modules: Sequence[nn.Module] = (),
        *,
        warns: bool,
    ) -> None:
        self._parts, self._units, self._modules, self._warns = parts, units or {}, modules, warns
        # Sorted, since the order of a set of strings differs by process.
        layouts = sorted({str(mesh.topology) for mesh in meshes})
        self._layout = f"{dist.get_world_size()} ranks" + (f" as {' and '.join(layouts)}" if layouts else "")
        self._prefix = f"rank{dist.get_rank()}/"

    def state_dict(self) -> dict[str, str | bytes]:
        """Return this rank's parts, each as bytes, and the layout of the ranks."""
        saved_with = {unit: _saved_with(unit) for unit in dict.fromkeys(self._units.values())}
        own: dict[str, str | bytes] = {"layout": self._layout}
        for name, part in self._parts.items():
            weights = {_SAVED_WITH: saved_with[self._units[name]]} if name in self._units else {}
            buffer = io.BytesIO()
            torch.save({**part.state_dict(), **weights}, buffer)
            own[self._prefix + name] = buffer.getvalue()
        return own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of ``state_dict``; if it was saved on another layout, start over and warn.

        Raises:
            ValueError: If it was saved for other units, under another configuration of error feedback, or by another
                version of fsdp_zpp.
        """
        if not self._parts:
            saved_on = state.get("layout", "")
            # Without parts, DCP reads only the key "layout". Its value has " as " only if parts were saved.
            if " as " in saved_on and self._warns:
                logger.warning(
                    "the codec state was saved on %s, but this model has none: error feedback, weight deltas and local "
                    "steps are inactive on its ranks, so what was saved is not used",
                    saved_on,
                )
            return
        # Compare layouts before looking for this rank's keys: a checkpoint of fewer ranks may lack them.
        if state.get("layout") != self._layout:
            self._forget_loaded()
            self._reset()
            if self._warns:
                logger.warning(
                    "the codec state was saved on %s, but this is %s: errors start from zero, weights are sent "
                    "whole once, and local steps start over from the loaded weights",
                    state.get("layout"),
                    self._layout,
                )
            return
        missing = [name for name in self._parts if self._prefix + name not in state]
        if missing:
            raise ValueError(
                f"the checkpoint has no codec state for {missing}; wrap the model as it was wrapped when it was saved"
            )
        # Read all parts before the first is loaded: a part that can't be read then leaves this rank's state as it is.
        loaded = {name: torch.load(io.BytesIO(state[self._prefix + name]), weights_only=True) for name in self._parts}
        try:
            saved_with = {unit: loaded[name][_SAVED_WITH] for name, unit in self._units.items()}
            self._forget_loaded()
            for name, part in self._parts.items():
                part.load_state_dict(loaded[name])
        except (KeyError, TypeError) as error:
            lacks = "checksums of its weights" if error.args == (_SAVED_WITH,) else f"entry as expected: {error}"
            raise ValueError(
                f"the codec state has no {lacks}; another version of fsdp_zpp saved it, so leave it out of what you "
                "load: errors then start from zero, weights are sent whole once, and local steps start over"
            ) from error
        if saved_with:
            LoadedState(saved_with, self._modules, self._drop)

    def _forget_loaded(self) -> None:
        for unit in self._units.values():
            if unit.loaded_state is not None:
                unit.loaded_state.forget()

    def _drop(self) -> None:
        self._reset()
        if self._warns:
            logger.warning(
                "the codec state was not saved with the weights that were loaded: its save was cut off, or they are of "
                "another checkpoint; errors start from zero, weights are sent whole once, and local steps start over "
                "from the loaded weights"
            )

    def _reset(self) -> None:
        for part in self._parts.values():
            part.reset()


class CodecState(RankState):
    """Codec state of a model, for checkpoints from which training resumes bit for bit.

    It holds the errors of ``Strategy(error_feedback=...)`` and the secondary shards that ``Int4Delta`` and
    ``Int2Delta`` need. With ``Strategy(local_steps=...)``, it also holds the state that differs from node to node:
    weights, states of optimizers and of exchanges. It is a ``Stateful`` of torch.distributed.checkpoint; each rank
    saves its own part. On another number of ranks or nodes, or if the weights at the next forward are not those that it
    was saved with, errors start from zero, weights are sent whole once and nodes restart their local steps, with a
    warning. If more ranks load than have saved, the checkpoint has no entries for some of them: load codec state by
    itself, ``dcp.load({"codecs": CodecState(model)}, ..., planner=DefaultLoadPlanner(allow_partial_load=True))``.

    With local steps, weights and optimizer states in torch's own checkpoints come from an arbitrary node. On the same
    layout, codec state replaces them before the next forward. For other layouts, save weights under
    ``agreed_weights``.

    Args:
        model: A model wrapped with one or more instances of ``Strategy``, or with a
            ``quantized_reduce_hook``. Units without codec state save nothing.
        optimizers: With local steps, the optimizer of the model, or all of them; otherwise not needed.

    Raises:
        ValueError: If nothing of fsdp_zpp is in ``model``, or optimizers are missing.

    Examples:
        >>> dcp.save({"model": ..., "optimizer": ..., "codecs": CodecState(model)}, checkpoint_id=path)
    """

    def __init__(self, model: nn.Module, optimizers: Optimizer | Sequence[Optimizer] = ()) -> None:
        next(communicators(model))  # raises if there are none, since there is nothing to save then
        names, parts, units_by_part = named_units(model), dict[str, SavedState](), dict[str, ParameterUnit]()
        for unit, fqn in names.items():
            for kind, part in _parts_of(unit):
                name = f"{kind} of {fqn}"
                parts[name], units_by_part[name] = part, unit
        meshes = dict.fromkeys(unit.ranks for unit in units_by_part.values())
        # All sharded modules get hooks: a root without parameters of its own has no unit, but runs first.
        modules = [each for each in model.modules() if isinstance(each, FSDPModule | FullyShardedDataParallel)]
        axes = {axis for unit in names for axis in unit.sharded.model_parallel_groups()}
        warns = any(unit.ranks.rank == 0 for unit in names) and all(dist.get_rank(axis) == 0 for axis in axes)
        parts |= _optimizer_states(model, optimizers, parts)
        super().__init__(parts, meshes, units_by_part, modules, warns=warns)


def _parts_of(unit: ParameterUnit) -> Iterator[tuple[str, SavedState]]:
    if isinstance(unit, StrategyUnit):
        yield from unit.reductions.error_states()
        if unit.gather is not None and unit.gather.secondary.sends_deltas:
            yield "weights", unit.gather.secondary
        if unit.fragment is not None:
            yield "local steps", unit.fragment
    elif unit.errors is not None:
        yield "errors", unit.errors


def _optimizer_states(
    model: nn.Module, optimizers: Optimizer | Sequence[Optimizer], parts: Mapping[str, SavedState]
) -> dict[str, SavedState]:
    listed = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    fragments = [part for part in parts.values() if isinstance(part, Fragment)]
    # A model that is frozen now may have been trained before, so ask its fragments whether they ever were.
    if fragments and not listed and any(fragment.was_trained for fragment in fragments):
        raise ValueError(
            f"with local_steps, each node of this {type(model).__name__} has optimizer states of its own: pass "
            "CodecState(model, optimizer), or a list if there are several optimizers"
        )
    for fragment in fragments:  # steps add optimizers, too, but after a resumption an exchange may come first
        for each in listed:
            fragment.optimizers.add(each)
    return {
        f"optimizer {at}": OptimizerState(each, fragments[0]) for at, each in enumerate(listed if fragments else [])
    }


def _saved_with(unit: ParameterUnit) -> Checksums:
    """Return the checksums of a unit's trained parameters; the others do not change from step to step."""
    if unit.loaded_state is not None:  # which is not used yet
        return unit.loaded_state.saved_with[unit]
    return _digest(unit, set(unit.sharded.trained_names()))
