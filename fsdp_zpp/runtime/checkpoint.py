"""Codec state in checkpoints: the errors of error feedback, and the bases of weight deltas.

Codec state belongs to the rank that sends: no other rank has it, and it depends on how the ranks are laid out. So each
rank saves its own part, under keys that name the rank, as bytes, which torch.distributed.checkpoint loads without
knowing their size beforehand. The layout is saved beside them. On another layout, codec state starts over: errors are
zero, weights are sent whole once, and a warning says so.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_zpp.collectives.error_state import ErrorFeedbackState
from fsdp_zpp.collectives.mesh import ProcessMesh
from fsdp_zpp.collectives.secondary_shard import SecondaryShard

from .api import units
from .unit import StrategyUnit, named_units

logger = logging.getLogger("fsdp_zpp")


SavedState = ErrorFeedbackState | SecondaryShard
"""Codec state of one unit."""


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
        self._layout = f"{dist.get_world_size()} ranks as {' and '.join(layouts)}"
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
            return
        # Before looking for this rank's keys: a checkpoint of fewer ranks has none for the others.
        if state.get("layout") != self._layout:
            for part in self._parts.values():
                part.reset()
            if dist.get_rank() == 0:
                logger.warning(
                    "the codec state was saved on %s, but this is %s: errors start from zero, weights are sent "
                    "whole once",
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
    sends deltas against. It is a ``Stateful`` of torch.distributed.checkpoint; each rank saves its own part. On another
    number of ranks or nodes, errors start from zero and weights are sent whole once, with a warning. If more ranks load
    than have saved, the checkpoint has no entries for some of them: load this part by itself,
    ``dcp.load({"codecs": CodecState(model)}, ..., planner=DefaultLoadPlanner(allow_partial_load=True))``.

    Args:
        model: A model wrapped with one or more instances of :class:`Strategy`, or with a
            :func:`quantized_reduce_hook`. Units without codec state save nothing.

    Raises:
        ValueError: If nothing of fsdp_zpp is in ``model``.

    Example:
        >>> dcp.save({"model": ..., "optimizer": ..., "codecs": CodecState(model)}, checkpoint_id=path)
    """

    def __init__(self, model: nn.Module) -> None:
        next(units(model))  # raises if fsdp_zpp manages nothing of the model, where there would be nothing to save
        parts: dict[str, SavedState] = {}
        meshes: set[ProcessMesh] = set()
        for unit, path in named_units(model).items():
            if unit.errors is not None:
                parts[f"errors of {path}"] = unit.errors
                meshes.add(unit.mesh)
            if isinstance(unit, StrategyUnit) and unit.gather is not None and unit.gather.secondary.sends_deltas:
                parts[f"weights of {path}"] = unit.gather.secondary
                meshes.add(unit.mesh)
        self._state = RankState(parts, meshes)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part, as bytes by unit."""
        return self._state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned.

        Raises:
            ValueError: If it was saved for other units, or under another configuration of error feedback.
        """
        self._state.load_state_dict(state)


def _to_bytes(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()
