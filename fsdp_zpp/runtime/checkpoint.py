"""Codec state in checkpoints: the errors of error feedback, the bases of weight deltas, and the training of a node.

Codec state belongs to the rank that sends: no other rank has it, and it depends on how the ranks are laid out. So each
rank saves its own part, under keys that name the rank, as bytes, which torch.distributed.checkpoint loads without
knowing their size beforehand. The layout is saved beside them. On another layout, codec state starts over: errors are
zero, weights are sent whole once, nodes begin their local steps anew, and a warning says so.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fsdp_zpp.collectives.error_state import ErrorFeedbackState
from fsdp_zpp.collectives.mesh import ProcessMesh
from fsdp_zpp.collectives.secondary_shard import SecondaryShard

from .api import units
from .fragment import Fragment
from .optimizer_state import OptimizerState
from .unit import StrategyUnit, named_units

logger = logging.getLogger("fsdp_zpp")


SavedState = ErrorFeedbackState | SecondaryShard | Fragment | OptimizerState
"""Codec state of one unit, or of one optimizer."""


class RankState:
    """The codec state of several units on this rank.

    Args:
        parts: The state of each unit, by a name that is the same on all ranks.
        meshes: The ranks of the units.
    """

    def __init__(self, parts: Mapping[str, SavedState], meshes: Iterable[ProcessMesh]) -> None:
        self._parts = parts
        # Sorted, so that the text is the same in every process: the order of a set of strings is not.
        layouts = sorted({str(mesh.topology) for mesh in meshes})
        self._layout = f"{dist.get_world_size()} ranks" + (f" as {' and '.join(layouts)}" if layouts else "")
        self._prefix = f"rank{dist.get_rank()}/"

    def state_dict(self) -> dict[str, Any]:
        """Each part as bytes, under a key that no other rank uses, and the layout of the ranks."""
        own = {self._prefix + name: _to_bytes(part.state_dict()) for name, part in self._parts.items()}
        return {"layout": self._layout, **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what was saved on this layout; if it was saved on another, start over and warn.

        Raises:
            ValueError: If it was saved for other units, or under another configuration.
        """
        if not self._parts:
            saved_on = state.get("layout", "")
            # torch.distributed.checkpoint loads nothing else here; it says as what nodes if there was codec state.
            if " as " in saved_on and dist.get_rank() == 0:
                logger.warning(
                    "the codec state was saved on %s, but this model has none: error feedback, weight deltas and local "
                    "steps are inactive on its ranks, so what was saved is not used",
                    saved_on,
                )
            return
        # Before looking for this rank's keys: a checkpoint of fewer ranks has none for the others.
        if state.get("layout") != self._layout:
            for part in self._parts.values():
                part.reset()
            if dist.get_rank() == 0:
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
        # All keys are there now, so no unit is loaded while another can't be.
        for name, part in self._parts.items():
            part.load_state_dict(torch.load(io.BytesIO(state[self._prefix + name]), weights_only=True))


class CodecState:
    """The codec state of a model, for checkpoints from which training resumes bit for bit.

    It holds the errors of ``Strategy(error_feedback=...)`` and the secondary shards that ``weights=Int4Delta(...)``
    sends deltas against; of ``Strategy(local_steps=...)``, what differs from node to node: weights, states of
    optimizers and of exchanges. It is a ``Stateful`` of torch.distributed.checkpoint; each rank saves its own part. On
    another number of ranks or nodes, errors start from zero, weights are sent whole once and nodes begin their local
    steps anew, with a warning. If more ranks load than have saved, the checkpoint has no entries for some of them: load
    this part by itself,
    ``dcp.load({"codecs": CodecState(model)}, ..., planner=DefaultLoadPlanner(allow_partial_load=True))``.

    With local steps, weights and optimizer states in torch's own checkpoints come from an arbitrary node. On the same
    layout this state replaces them, before the next forward. For other layouts, save weights under
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
        next(units(model))  # raises if fsdp_zpp manages nothing of the model, where there would be nothing to save
        parts: dict[str, SavedState] = {}
        meshes: set[ProcessMesh] = set()
        for unit, path in named_units(model).items():
            if unit.errors is not None:
                parts[f"errors of {path}"] = unit.errors
                meshes.add(unit.ranks)
            if isinstance(unit, StrategyUnit) and unit.gather is not None and unit.gather.secondary.sends_deltas:
                parts[f"weights of {path}"] = unit.gather.secondary
                meshes.add(unit.ranks)
            if isinstance(unit, StrategyUnit) and unit.fragment is not None:
                parts[f"local steps of {path}"] = unit.fragment
                meshes.add(unit.ranks)
        self._state = RankState(parts | _optimizer_states(model, optimizers, parts), meshes)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part, as bytes by unit."""
        return self._state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` returned.

        Raises:
            ValueError: If it was saved for other units, or under another configuration of error feedback.
        """
        self._state.load_state_dict(state)


def _optimizer_states(
    model: nn.Module, optimizers: Optimizer | Sequence[Optimizer], parts: Mapping[str, SavedState]
) -> dict[str, SavedState]:
    given = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    fragments = [part for part in parts.values() if isinstance(part, Fragment) and part.was_trained]
    if not fragments:
        return {}
    if not given:
        raise ValueError(
            f"with local_steps, each node of this {type(model).__name__} has optimizer states of its own: pass "
            "CodecState(model, optimizer), or a list if there are several optimizers"
        )
    return {f"optimizer {index}": OptimizerState(optimizer, fragments[0]) for index, optimizer in enumerate(given)}


def _to_bytes(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()
