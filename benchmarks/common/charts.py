"""Charts as SVG: the same bytes every time, legible on light and on dark pages, as wide as the column they stand in.

[Note: Colors] In the SVG each color of COLORS becomes a CSS variable, to which a style sheet in the file gives one
value, and another one where the reader prefers dark pages. The background is transparent. Diagrams that are drawn by
hand have the same variables, the same width and text of about the same size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from io import StringIO
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # without pyplot there is no window and no global figure
from step_charts import INK, SOFT, TEXT, new_figure

GRID, WEIGHTS, GRADIENTS = "#d3d8e0", "#2b66d1", "#bf5408"
SERIES = (WEIGHTS, GRADIENTS, "#23804f", "#8a3fa0", "#b8354a")
"""Colors of lines, in their order."""
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.2, 1.6)), (0, (6, 2, 1.2, 2)), (0, (9, 3)))
"""Dashes of the same lines, by which they differ without colors, too."""
COLORS = {
    INK: ("ink", "#e8ebf1"),
    SOFT: ("soft", "#a9b2c0"),
    GRID: ("grid", "#3b424e"),
    WEIGHTS: ("weights", "#7fadff"),
    GRADIENTS: ("gradients", "#ffa45c"),
    SERIES[2]: ("good", "#63cf95"),
    SERIES[3]: ("fourth", "#d3a4f5"),
    SERIES[4]: ("fifth", "#ff8f96"),
}
"""Names and dark values of the colors that have two."""
_FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
_STYLE = {
    "svg.hashsalt": "fsdp_zpp",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": TEXT,
    "figure.titlesize": TEXT,
    "figure.titleweight": "bold",
    "axes.titlesize": TEXT,
    "axes.titlelocation": "left",
    "axes.labelsize": TEXT,
    "xtick.labelsize": TEXT,
    "ytick.labelsize": TEXT,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.edgecolor": SOFT,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 2.2,
    "lines.dash_capstyle": "butt",
    "legend.frameon": False,
    "legend.fontsize": TEXT,
}


def drawn(draw: Callable[..., Figure]) -> Callable[..., str]:
    """Make a function that draws a figure one that returns its SVG, whatever matplotlib's settings are."""

    @wraps(draw)
    def as_svg(*arguments: Any, **options: Any) -> str:
        with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_STYLE}):
            return _svg(draw(*arguments, **options))

    return as_svg


def laid_out(height: float) -> Figure:
    """Return an empty figure of this height in points, which matplotlib lays out."""
    figure = new_figure(height)
    figure.set_layout_engine("constrained", h_pad=4 / 72, w_pad=2 / 72)
    return figure


def entitle(figure: Figure, *lines: str) -> None:
    """Write the title of a figure at its left edge."""
    figure.suptitle("\n".join(lines), x=0.003, ha="left")


@dataclass(frozen=True)
class End:
    """The end of a line, with what is written beside it.

    Attributes:
        y: Last value.
        text: Text.
        look: The line's color and dashes.
    """

    y: float
    text: str
    look: dict[str, Any]


def look(index: int) -> dict[str, Any]:
    """Return color and dashes of a line."""
    return {"color": SERIES[index % len(SERIES)], "ls": DASHES[index % len(DASHES)]}


def label_ends(axes: Axes, ends: Sequence[End]) -> None:
    """Write texts right of the axes, each beside the end of its line and with a piece of it, apart from each other.

    The axes' limits and height must be final but for small changes.
    """
    low, high = axes.get_ylim()
    height = axes.get_position().height * axes.figure.get_figheight() * 72
    ends = sorted(ends, key=lambda end: end.y)
    heights = [1.3 * TEXT * (end.text.count("\n") + 1) * (high - low) / height for end in ends]
    places = [end.y for end in ends]
    for _ in range(100):  # until each pair is apart
        for index in range(1, len(places)):
            apart = (heights[index - 1] + heights[index]) / 2
            if (overlap := places[index - 1] + apart - places[index]) > 0:
                places[index - 1] -= overlap / 2
                places[index] += overlap / 2
    for end, place in zip(ends, places, strict=True):
        at = {"transform": axes.get_yaxis_transform(), "clip_on": False}
        axes.plot([1.03, 1.10], [place, place], lw=2.2, **end.look, **at)
        axes.text(1.12, place, end.text, va="center", **at)
    axes.set_ylim(low, high)


def _svg(figure: Figure) -> str:
    file = StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = re.sub(r"'DejaVu Sans'[^;\"]*", _FONTS, file.getvalue())
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    # Without a size of its own, an image fills its column.
    text = re.sub(r'(<svg [^>]*?) width="[^"]*" height="[^"]*"', r"\1", text, count=1)
    for color, (name, _) in COLORS.items():
        text = text.replace(color, f"var(--{name})")
    light, dark = ("; ".join(f"--{name}: {value}" for name, value in of.items()) for of in _values())
    sheet = f"svg {{ {light} }}\n@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}"
    return re.sub(r"(<svg [^>]*>\n)", rf"\1 <style>\n{sheet}\n </style>\n", text, count=1)


def _values() -> tuple[dict[str, str], dict[str, str]]:
    """Return the values of the variables on light and on dark pages."""
    return {name: color for color, (name, _) in COLORS.items()}, dict(COLORS.values())


def same(old: str, new: str) -> bool:
    """Return whether two SVG are the same; from different versions of matplotlib, whether their texts are."""
    versions = [re.findall(r"<dc:title>(Matplotlib [^<]+)<", text) for text in (old, new)]
    if versions[0] == versions[1]:
        return old == new
    texts = [re.findall(r"<text[^>]*>([^<]*)</text>", text) for text in (old, new)]
    return texts[0] == texts[1]
