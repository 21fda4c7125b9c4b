"""Charts as SVG: the same bytes every time, legible on light and on dark pages.

[Note: Ink] Text, axes and grid are drawn in colors that stand for ink. In the SVG they become CSS variables, to which a
style sheet in the file gives one value, and another one where the reader prefers dark pages. The background is
transparent; colors of data are chosen to be seen on both.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from io import StringIO
from typing import Any

import matplotlib
from matplotlib.figure import Figure  # without pyplot there is no window and no global figure

INK, FAINT, GRID = "#1f2329", "#59636f", "#d1d9e1"
PEER, OURS, OURS_TOO, MEMORY = "#8b95a1", "#2f7fe0", "#16a085", "#d9822b"
SERIES = (OURS, MEMORY, OURS_TOO, "#d6455d", "#8e63ce")
"""Colors of data: other libraries', ours, memory, and lines of a chart in their order."""

_ON_DARK = {INK: "#e6edf3", FAINT: "#9aa5b1", GRID: "#3d444d"}
_NAMES = {INK: "ink", FAINT: "faint", GRID: "grid"}
_FONTS = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
_STYLE = {
    "svg.hashsalt": "fsdp_zpp",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": matplotlib.cycler(color=SERIES),
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def drawn(draw: Callable[..., Figure]) -> Callable[..., str]:
    """Make a function that draws a figure one that returns its SVG, whatever matplotlib's settings are."""

    @wraps(draw)
    def as_svg(*arguments: Any, **options: Any) -> str:
        with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_STYLE}):
            return _svg(draw(*arguments, **options))

    return as_svg


def _svg(figure: Figure) -> str:
    file = StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = re.sub(r"'DejaVu Sans'[^;\"]*", _FONTS, file.getvalue())
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    for color, name in _NAMES.items():
        text = text.replace(color, f"var(--{name})")
    light = " ".join(f"--{name}: {color};" for color, name in _NAMES.items())
    dark = " ".join(f"--{name}: {_ON_DARK[color]};" for color, name in _NAMES.items())
    sheet = f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    return re.sub(r"(<svg [^>]*>\n)", rf"\1 <style>\n{sheet}\n </style>\n", text, count=1)


def same(old: str, new: str) -> bool:
    """Return whether two SVG are the same; from different versions of matplotlib, whether their texts are."""
    versions = [re.findall(r"<dc:title>(Matplotlib [^<]+)<", text) for text in (old, new)]
    if versions[0] == versions[1]:
        return old == new
    texts = [re.findall(r"<text[^>]*>([^<]*)</text>", text) for text in (old, new)]
    return texts[0] == texts[1]
