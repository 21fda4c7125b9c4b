"""Labels of a chart's points, placed so that none covers another or a point."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

Labelled = tuple[str, tuple[float, float], bool]
"""A name, where its point is, and whether it is to be read first (black) or is in the background (grey)."""

_NEAR = 0.01
"""Points that are closer than this fraction of both axes share a label."""
_NAMES = 3
"""Names in a label; of more, it says how many there are."""
_REACH = 30
"""How far a label may be moved from its point, in steps of half its height."""
_POINT = 4
"""Half the size of a point, in pixels."""
_GAP = 6
"""Pixels between a point and a label beside it."""


def write_labels(axes: Axes, figure: Figure, points: Sequence[Labelled]) -> None:
    """Write the names beside the points, with a line to those that lie further off.

    Args:
        axes: The axes, whose limits and scales are set.
        figure: The figure that they are in.
        points: The points, the most important first: they get the best places.
    """
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()  # sets the layout, on which places depend
    figure.set_layout_engine("none")
    spots = [axes.transData.transform(at) for _, at, _ in points]
    taken = [Bbox.from_bounds(x - _POINT, y - _POINT, 2 * _POINT, 2 * _POINT) for x, y in spots]
    to_points = 72 / figure.dpi  # an image of any resolution has the same layout in points
    line = {"arrowstyle": "-", "color": "0.7", "lw": 0.6, "shrinkA": 0, "shrinkB": 2}
    for names, at, first in _grouped(axes, points):
        more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
        options: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "color": "black" if first else "0.5"}
        text = ", ".join(names[:_NAMES]) + more
        # Without its line, which would count as a part of it.
        label = axes.annotate(text, at, xytext=(0, 0), **options)
        (dx, dy), box = _place(label.get_window_extent(), taken, axes.get_window_extent())
        label.remove()
        axes.annotate(text, at, xytext=(dx * to_points, dy * to_points), **options, arrowprops=line)
        taken.append(box)


def _grouped(axes: Axes, points: Sequence[Labelled]) -> list[tuple[list[str], tuple[float, float], bool]]:
    """Put together names whose points nearly coincide as the eye sees them, after the scaling of both axes."""
    to_axes = axes.transData + axes.transAxes.inverted()
    groups: list[tuple[list[str], tuple[float, float], bool]] = []
    for name, at, first in points:
        x, y = to_axes.transform(at)
        for names, other, _ in groups:
            other_x, other_y = to_axes.transform(other)
            if abs(x - other_x) < _NEAR and abs(y - other_y) < _NEAR:
                names.append(name)
                break
        else:
            groups.append(([name], at, first))
    return groups


def _place(box: Bbox, taken: Sequence[Bbox], inside: Bbox) -> tuple[tuple[float, float], Bbox]:
    """Return how far to move a label's box to the nearest free place inside the axes, and the box there."""
    for dx, dy in _offsets(box.width, box.height):
        moved = box.translated(dx, dy)
        within = inside.x0 <= moved.x0 and moved.x1 <= inside.x1 and inside.y0 <= moved.y0 and moved.y1 <= inside.y1
        if within and not any(moved.overlaps(other) for other in taken):
            return (dx, dy), moved
    return (_GAP, _GAP), box.translated(_GAP, _GAP)


def _offsets(width: float, height: float) -> Iterator[tuple[float, float]]:
    """Return places around a point, the nearest first: to its right and left, then higher and lower."""
    for step in range(_REACH):
        for dy in (step * height / 2 - height / 2, -step * height / 2 - height / 2):
            for dx in (_GAP, -_GAP - width, -width / 2):
                yield dx, dy
