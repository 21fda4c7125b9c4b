"""Errors in checkpoints.

[Note: Errors in checkpoints]
Errors belong to the rank that compresses: no other has them, and what they correct depends on how the ranks are laid
out. So each rank saves its own, under keys that name it, as bytes, which torch.distributed.checkpoint loads without
knowing their sizes beforehand. Beside them stands the layout: on another one, errors start from zero, as after a reset,
with a warning.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .strategy_unit import StrategyUnit
from .topology import ProcessMesh
from .unit_errors import UnitErrors
from .units import unit_of

logger = logging.getLogger("fsdp_zpp")


class RankErrors:
    """This rank's errors of several units, to be saved and loaded.

    Args:
        units: The errors of each unit, by name.
        meshes: The ranks of the units.
    """

    def __init__(self, units: Mapping[str, UnitErrors], meshes: Iterable[ProcessMesh]) -> None:
        self._units = units
        layouts = sorted({str(mesh.topology) for mesh in meshes})
        self._layout = f"{dist.get_world_size()} ranks as {' and '.join(layouts)}"
        self._prefix = f"rank{dist.get_rank()}/"

    def state_dict(self) -> dict[str, Any]:
        """Each unit's errors, as bytes, under keys that no other rank has; and the layout of all."""
        own = {self._prefix + name: _to_bytes(errors.state_dict()) for name, errors in self._units.items()}
        return {"layout": self._layout, **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over errors that were saved on this layout; of another one, start from zero and warn.

        Raises:
            ValueError: If they were saved for other units, or under another configuration.
        """
        if state.get("layout") != self._layout:
            for errors in self._units.values():
                errors.reset()
            if dist.get_rank() == 0:
                logger.warning(
                    "the errors of error feedback were saved on %s, which is now %s: they start from zero",
                    state.get("layout"),
                    self._layout,
                )
            return
        missing = [name for name in self._units if self._prefix + name not in state]
        if missing:
            raise ValueError(f"no errors were saved for {missing}; was the model wrapped in another way?")
        for name, errors in self._units.items():
            errors.load_state_dict(torch.load(io.BytesIO(state[self._prefix + name]), weights_only=True))


class ErrorFeedbackState:
    """The errors of a model with ``Strategy(error_feedback=...)``, for checkpoints: a training resumes bit for bit.

    A ``Stateful`` of torch.distributed.checkpoint, of which each rank saves its own part. On another number of ranks
    or nodes, errors start from zero, with a warning. For more ranks than have saved, load with
    ``DefaultLoadPlanner(allow_partial_load=True)``: the checkpoint has no entries for the new ones.

    Args:
        model: A model wrapped with a :class:`Strategy` that has error feedback.

    Raises:
        ValueError: If nothing in the model feeds errors back.

    Example:
        >>> errors = ErrorFeedbackState(model)
        >>> dcp.save({"model": ..., "optimizer": ..., "errors": errors}, checkpoint_id=path)
    """

    def __init__(self, model: nn.Module) -> None:
        units: dict[str, UnitErrors] = {}
        meshes: set[ProcessMesh] = set()
        for path, module in model.named_modules():
            unit = unit_of(module)
            if isinstance(unit, StrategyUnit) and unit.errors is not None:
                units[path] = unit.errors
                meshes.add(unit.mesh)
        if not units:
            raise ValueError(
                f"nothing in this {type(model).__name__} feeds errors back: wrap it with "
                "Strategy(gradients=..., error_feedback=LoCo()) on more than one node, or with hops='both'"
            )
        self._errors = RankErrors(units, meshes)

    def state_dict(self) -> dict[str, Any]:
        """This rank's errors, as bytes by unit."""
        return self._errors.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`state_dict` gave.

        Raises:
            ValueError: If the errors were saved for other units, or under another configuration of error feedback.
        """
        self._errors.load_state_dict(state)


def _to_bytes(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()
