"""What codecs keep from step to step, in checkpoints: errors that are fed back, weights that differences are against.

[Note: Codecs in checkpoints]
It belongs to the rank that sends: no other has it, and it depends on how the ranks are laid out. So each rank saves its
own, under keys that name it, as bytes, which torch.distributed.checkpoint loads without knowing their sizes beforehand.
Beside them stands the layout: on another one, all starts anew - errors from zero, weights with whole ones - and a
warning says so.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from .strategy_unit import StrategyUnit
from .topology import ProcessMesh
from .units import unit_of, units

logger = logging.getLogger("fsdp_zpp")


class Part(Protocol):
    """Something of a unit that is kept from step to step."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def reset(self) -> None: ...


class RankState:
    """What codecs of several units keep on this rank, to be saved and loaded.

    Args:
        parts: What is kept, by names that are the same on all ranks.
        meshes: The ranks of the units.
    """

    def __init__(self, parts: Mapping[str, Part], meshes: Iterable[ProcessMesh]) -> None:
        self._parts = parts
        layouts = sorted({str(mesh.topology) for mesh in meshes})
        self._layout = f"{dist.get_world_size()} ranks as {' and '.join(layouts)}"
        self._prefix = f"rank{dist.get_rank()}/"

    def state_dict(self) -> dict[str, Any]:
        """Each part, as bytes, under a key that no other rank has; and the layout of all."""
        own = {self._prefix + name: _to_bytes(part.state_dict()) for name, part in self._parts.items()}
        return {"layout": self._layout, **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was saved on this layout; of another one, start anew and warn.

        Raises:
            ValueError: If they were saved for other units, or under another configuration.
        """
        if not self._parts:
            return
        if state.get("layout") != self._layout:
            for part in self._parts.values():
                part.reset()
            if dist.get_rank() == 0:
                logger.warning(
                    "what codecs keep was saved on %s, and this is %s: errors start from zero, weights are sent whole",
                    state.get("layout"),
                    self._layout,
                )
            return
        missing = [name for name in self._parts if self._prefix + name not in state]
        if missing:
            raise ValueError(f"nothing was saved for {missing}; was the model wrapped in another way?")
        for name, part in self._parts.items():
            part.load_state_dict(torch.load(io.BytesIO(state[self._prefix + name]), weights_only=True))


class CodecState:
    """What the codecs of a model's strategies keep, for checkpoints: a training resumes bit for bit.

    These are the errors of ``Strategy(error_feedback=...)`` and the resident weights of ``weights=Int4Delta(...)``. A
    ``Stateful`` of torch.distributed.checkpoint, of which each rank saves its own part. On another number of ranks or
    nodes, errors start from zero and weights are sent whole once, with a warning. For more ranks than have saved there
    are no entries in the checkpoint: load this part by itself, ``dcp.load({"codecs": CodecState(model)}, ...,
    planner=DefaultLoadPlanner(allow_partial_load=True))``.

    Args:
        model: A model wrapped with a :class:`Strategy`, or several, or with a :func:`quantized_reduce_hook`. Nothing is
            saved for one that keeps nothing.

    Raises:
        ValueError: If nothing of fsdp_zpp is in ``model``.

    Example:
        >>> dcp.save({"model": ..., "optimizer": ..., "codecs": CodecState(model)}, checkpoint_id=path)
    """

    def __init__(self, model: nn.Module) -> None:
        parts: dict[str, Part] = {}
        meshes: set[ProcessMesh] = set()
        for path, module in model.named_modules():
            unit = unit_of(module)
            if unit is None:
                continue
            if unit.errors is not None:
                parts[f"errors of {path}"] = unit.errors
                meshes.add(unit.mesh)
            if isinstance(unit, StrategyUnit) and unit.gather is not None and unit.gather.sends_differences:
                parts[f"weights of {path}"] = unit.gather
                meshes.add(unit.mesh)
        next(units(model))  # raises if there is none
        self._state = RankState(parts, meshes)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part, as bytes by unit."""
        return self._state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`state_dict` gave.

        Raises:
            ValueError: If it was saved for other units, or under another configuration of error feedback.
        """
        self._state.load_state_dict(state)


def _to_bytes(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()
