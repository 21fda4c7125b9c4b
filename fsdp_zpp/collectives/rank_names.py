"""Names of ranks in errors: their global ranks and, where a mesh has several axes, their coordinates on it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import groupby
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

# Set by who is given a mesh, since a process group does not know of which mesh it is an axis.
_axes: WeakKeyDictionary[dist.ProcessGroup, tuple[tuple[str, ...], Tensor]] = WeakKeyDictionary()


def name_by_axes(group: dist.ProcessGroup, names: Sequence[str], ranks: Tensor) -> None:
    """Have errors name the ranks of ``group`` by their coordinates, too.

    Args:
        group: Ranks along one or several axes of a mesh.
        names: The names of the axes.
        ranks: The ranks on the mesh, of as many dimensions.
    """
    _axes[group] = tuple(names), ranks


def name_alike(group: dist.ProcessGroup, other: dist.ProcessGroup) -> None:
    """Have errors name the ranks of ``group`` as those of ``other``, which are the same."""
    if other in _axes:
        _axes[group] = _axes[other]


def named_ranks(ranks: Collection[int], group: dist.ProcessGroup | None = None) -> str:
    """Return ``rank 3``, ``ranks 0-3, 6`` or, where the mesh of ``group`` has several axes, ``rank 3 (dp 1, tp 1)``.

    Coordinates are left out where, axis by axis, they would name more ranks than these.
    """
    listed = f"rank{'s' * (len(ranks) > 1)} {_runs(ranks)}"
    names, mesh = _axes.get(group, ((), None)) if group is not None else ((), None)
    if mesh is None:
        return listed
    places = [(mesh == rank).nonzero()[0].tolist() for rank in ranks]
    along = [set(coordinates) for coordinates in zip(*places, strict=True)]
    if math.prod(map(len, along)) > len(ranks):
        return listed
    return f"{listed} ({', '.join(f'{name} {_runs(each)}' for name, each in zip(names, along, strict=True))})"


def _runs(numbers: Collection[int]) -> str:
    runs = [[number for _, number in run] for _, run in groupby(enumerate(sorted(numbers)), lambda p: p[1] - p[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
