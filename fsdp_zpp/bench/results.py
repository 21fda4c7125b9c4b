"""Files of results, and tables and charts of them."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fsdp_zpp.names import how_to_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# ---- task
#
# What all strategies of a run train: a model, its data, and the ranks that share the work.


@dataclass(frozen=True)
class Task:
    """Model and the data that all strategies of a run train on.

    Attributes:
        config: The model's configuration, one of transformers' for causal language models.
        nodes: Number of nodes.
        gpus_per_node: Ranks of each.
        lora: Rank of the adapters; 0 trains the whole model.
        micro_batch: Sequences a rank in a micro-batch.
        micro_batches: Micro-batches a step, all but the last without synchronization.
        sequence: Tokens a sequence.
        checkpointing: Whether the activations of each layer are recomputed.
        compile: Whether torch.compile compiles each layer.
        device: ``cuda``, or ``cpu`` to try things out.
    """

    config: Any
    nodes: int
    gpus_per_node: int
    lora: int = 0
    micro_batch: int = 1
    micro_batches: int = 1
    sequence: int = 1024
    checkpointing: bool = False
    compile: bool = False
    device: str = "cuda"

    @property
    def place(self) -> torch.device:
        """Return this rank's device."""
        return torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")

    def tokens(self, rank: int) -> torch.Tensor:
        """Return the tokens of ``rank``, [micro-batches, sequences, tokens], the same for every strategy."""
        shape = (self.micro_batches, self.micro_batch, self.sequence)
        vocabulary = self.config.get_text_config().vocab_size
        return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(rank)).to(self.place)


# ---- manifest
#
# Manifests: when and where a run was made, with which versions, by which command.

PACKAGES = ("fsdp_zpp", "torch", "triton", "transformers", "numpy", "deepspeed", "megatron-fsdp", "peft")


def manifest(command: list[str] | None = None) -> dict[str, Any]:
    """Return the manifest of this run.

    Args:
        command: Command that started it; by default, this process's own.

    Returns:
        ``date`` (ISO 8601, UTC), ``machine`` (names and counts of CPUs and GPUs), ``versions``, and ``command``, as one
        types it.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "command": shlex.join(command or ["python", *sys.argv]),
    }


def machine() -> dict[str, Any]:
    """Return names and counts of CPU cores and GPUs, without ``gpu`` where there is none."""
    names: dict[str, Any] = {"cpu": cpu_name(), "cores": os.cpu_count()}
    if torch.cuda.is_available():
        names |= {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()}
    return names


def cpu_name() -> str:
    """Return the processor's name, or its architecture if the system does not tell."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of Python, of the installed ``PACKAGES``, and of NCCL where there is a GPU."""
    numbers = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            numbers[package] = importlib.metadata.version(package)
    # torch's metadata leave out the build, as in 2.13.0+cpu.
    numbers["torch"] = str(torch.__version__)
    if torch.cuda.is_available():
        numbers["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return numbers


# ---- result file
#
# Results: one JSON file a run, which says how it was made before its measurements.
#
#     {"manifest": {...}, "arguments": {...}, "rows": [{...}, ...]}
#
# A result may have more beside its rows.

Row = dict[str, Any]
Result = dict[str, Any]
NOT_RECORDED = ("out", "output", "resume", "worker", "json", "chart", "run", "parser", "version")
"""Options that change no figure: where a result goes, and those of a script to its own processes."""


def write(path: Path, manifest: dict[str, Any], arguments: object, rows: list[Row], **others: Any) -> None:
    """Write one run's result, a line for each row; the file is there when it is complete.

    Args:
        path: File; its folder is made.
        manifest: When, where and how the result was made.
        arguments: Object whose attributes are the options; those of ``NOT_RECORDED`` are left out.
        rows: Measurements, a row for each case.
        others: Further entries of the result.
    """
    options = {name: value for name, value in vars(arguments).items() if name not in NOT_RECORDED}
    head = {"manifest": manifest, "arguments": options, **others}
    lines = [f"{json.dumps(name)}: {json.dumps(value, default=str)}," for name, value in head.items()]
    lines += ['"rows": [', ",\n".join(json.dumps(row) for row in rows), "]"]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text("\n".join(["{", *lines, "}\n"]))
    partial.replace(path)


def check_writable(option: str, path: Path) -> None:
    """Make the folder of ``path``, and raise unless the file can be written; one that is there stays as it is.

    Raises:
        OSError: If it can't be written. It names the ``option``.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise OSError(f"{option} {path} can't be written: {error}; name a file where rank 0 may write") from error


# ---- columns
#
# Columns of tables of steps: the text of each for a row of a result, beside the others of its run.


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        heading: Text over it.
        cell: Function that returns its text for the rows of one strategy, given all rows of that run; empty if they
            lack the figure.
    """

    heading: str
    cell: Callable[[list[Row], list[Row]], str]


def each(heading: str, text: Callable[[Row], str]) -> Column:
    """Make a column with a text for every measurement of a strategy."""
    return Column(heading, lambda own, _: " and ".join(filter(None, dict.fromkeys(map(text, own)))))


def measured(heading: str, key: str, form: str) -> Column:
    """Make a column with one figure of a row."""
    return each(heading, lambda row: form.format(row[key]) if row.get(key) is not None else "")


def _step(row: Row) -> str:
    if "step_ms" not in row:
        return str(row.get("failed", ""))
    return f"{row['step_ms']:.0f} ({row['fastest_ms']:.0f}-{row['slowest_ms']:.0f})"


def _peak(own: list[Row], _: list[Row]) -> str:
    if any(row.get("peak_counts_others") for row in own):
        return "not known"
    peaks = [row["peak_gib"] for row in own if row.get("peak_gib") is not None]
    return f"{max(peaks):.1f}" if peaks else ""


def _exposed(row: Row) -> str:
    return f"{row['exposed_ms']:.0f} ({row['exposed_share']:.0%})" if row.get("exposed_share") else ""


def sent(heading: str, hop: str) -> Column:
    """Make a column with the MiB that a rank sends over one hop a step: weights + gradients."""

    def text(row: Row) -> str:
        figures = [mib for name, mib in row.get("sent_mib_a_step", {}).items() if name.endswith(hop)]
        shown = " + ".join(f"{mib:.0f}" if mib >= 10 else f"{mib:.2f}" for mib in figures)
        return f"~{shown}" if row.get("sent_is_planned") else shown

    return each(heading, text)


def figures_of(rows: list[Row], key: str, strategy: str = "") -> list[float]:
    """Return a figure of the rows that have it, or of those of one strategy."""
    return [row[key] for row in rows if row.get(key) and strategy in ("", row["strategy"])]


def times_as_fast(than: str, heading: str, form: str = "{:.2f}", to: str = "-") -> Column:
    """Make a column with the speedup over ``than``: from the lowest ratio of measurements ``to`` the highest."""

    def cell(own: list[Row], rows: list[Row]) -> str:
        references, times = figures_of(rows, "step_ms", than), figures_of(own, "step_ms")
        if not references or not times:
            return ""
        if own[0]["strategy"] == than:
            return f"{form.format(1)}x"
        ends = (form.format(min(references) / max(times)), form.format(max(references) / min(times)))
        return f"{to.join(dict.fromkeys(ends))}x"

    return Column(heading, cell)


STEP = each("step, ms (fastest-slowest)", _step)
PEAK = Column("peak, GiB", _peak)
EXPOSED = each("exposed communication, ms (share)", _exposed)
HOST = measured("CPU finished after, ms", "host_ms", "{:.0f}")
UTILIZATION = measured("of the GPUs' peak FLOP/s", "utilization", "{:.1%}")
BETWEEN_NODES = sent("sent between nodes, MiB", "inter")


def filled(rows: list[Row], columns: Iterable[Column]) -> dict[str, list[str]]:
    """Return the cells of each column, a row each, by its heading, without columns that would be empty."""
    cells = {column.heading: [column.cell([row], rows) for row in rows] for column in columns}
    return {heading: texts for heading, texts in cells.items() if any(texts)}


def of_a_run(rows: list[Row]) -> list[Column]:
    """Return the columns of one run's table: all figures that :mod:`.measuring` has."""
    return [
        each("strategy", lambda row: str(row.get("label", row["strategy"]))),
        STEP,
        times_as_fast(rows[0]["strategy"], "speedup over the first"),
        PEAK,
        measured("tokens/s", "tokens_per_s", "{:.0f}"),
        HOST,
        UTILIZATION,
        EXPOSED,
        BETWEEN_NODES,
        sent("sent inside a node, MiB", "intra"),
    ]


# ---- chart
#
# Bars of strategies: the time of a step with its speedup, and beside it peak memory.

INK, SOFT, PEER, OURS = "#1f2430", "#5b6472", "#8a93a3", "#2b66d1"
"""Colors: of text, of what is less important, of other libraries' bars, of fsdp_zpp's."""
ON_BAR = {PEER: "#10141b", OURS: "#ffffff"}
"""Colors of text on bars."""
WIDTH, TEXT = 640, 16
"""Width of a figure and size of its text, in points: on 640 pixels, text is as large as that of a page."""
_ROW, _LINE, _BAR, _GAP = 31, 20, 20, 9
_PEAKS = 132
"""Width of the bars of memory with their text and heading."""


@dataclass(frozen=True)
class Bar:
    """What is drawn of one strategy.

    Attributes:
        name: Text before its bars.
        text: Text at the bar of its time.
        speedup: Bold text behind that one; empty for what others are compared with.
        color: Color of its bars.
        rows: Its measurements.
    """

    name: str
    text: str
    speedup: str
    color: str
    rows: Sequence[Row]

    @property
    def peak(self) -> float:
        """Return the largest peak of memory in GiB, 0 if it is not known."""
        if any(row.get("peak_counts_others") for row in self.rows):
            return 0.0
        return max((row.get("peak_gib") or 0.0 for row in self.rows), default=0.0)


def draw_steps(rows: Sequence[Row], path: Path) -> None:
    """Draw the rows that have a time to an image file, whose suffix sets the format.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
        ValueError: If matplotlib can't write the format, or nothing was measured.
    """
    measured = [row for row in rows if "step_ms" in row]
    if not measured:
        raise ValueError(f"nothing was measured, so there is nothing to draw to {path}")
    first = measured[0]
    speedup = times_as_fast(first["strategy"], "", "{:.1f}")
    bars = [
        Bar(
            row["label"],
            f"{row['step_ms']:.0f}",
            "" if row is first else speedup.cell([row], measured),
            PEER if row["is_torchs"] else OURS,
            [row],
        )
        for row in measured
    ]
    steps_figure(bars, f"Step time in ms, and speedup over {first['label']}").savefig(
        path, dpi=150, bbox_inches="tight", pad_inches=0.1
    )


def check_format(path: Path) -> None:
    """Raise unless :func:`draw_steps` can write to ``path``.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
        ValueError: If matplotlib can't write the format.
    """
    known = new_figure(1).canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ValueError(f"--chart {path} is not an image; allowed are the suffixes .{', .'.join(sorted(known))}")


def new_figure(height: float) -> Figure:
    """Return an empty figure of this height in points.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"the chart needs matplotlib: {how_to_install('bench')}") from error
    # Without pyplot there is neither a window nor a global figure that somebody must close.
    return Figure(figsize=(WIDTH / 72, height / 72))


def steps_figure(bars: Sequence[Bar], heading: str, note: str = "") -> Figure:
    """Return a figure with the times of steps, and with peaks of memory if any are known.

    Args:
        bars: Strategies, from top to bottom.
        heading: Text over the times.
        note: What was measured on what, at the bottom.
    """
    names = [textwrap.fill(bar.name, 26, break_long_words=False) for bar in bars]
    rows = [_ROW + _LINE * name.count("\n") for name in names]
    figure, axes = _canvas(_ROW + sum(rows) + (_ROW if note else 4))
    peak = max(bar.peak for bar in bars)
    left = max(width_of(line) for name in names for line in name.splitlines()) + _GAP
    right = WIDTH - (_PEAKS + 2 * _GAP if peak else 0)
    room = right - left
    scale = _scale(bars, room)
    _write(axes, 0, _ROW / 2, heading, weight="bold")
    if peak:
        _write(axes, WIDTH - _PEAKS, _ROW / 2, "Memory, GiB", weight="bold")
        peak_scale = (_PEAKS - _GAP - width_of(f"{peak:.1f}")) / peak
    top = float(_ROW)
    for bar, name, row in zip(bars, names, rows, strict=True):
        middle = top + row / 2
        _write(axes, left - _GAP, middle, name, ha="right")
        _draw_time(axes, left, middle, bar, scale, room)
        if bar.peak:
            axes.barh(middle, bar.peak * peak_scale, left=WIDTH - _PEAKS, height=_BAR, color=bar.color)
            _write(axes, WIDTH - _PEAKS + bar.peak * peak_scale + _GAP, middle, f"{bar.peak:.1f}")
        top += row
    _write(axes, 0, top + _ROW / 2, note, color=SOFT)
    return figure


def peaks_figure(bars: Sequence[Bar], heading: str, note: str = "") -> Figure:
    """Return a figure with peaks of memory alone; arguments are as for :func:`steps_figure`."""
    figure, axes = _canvas(_ROW * (len(bars) + 1) + (_ROW if note else 4))
    left = max(width_of(bar.name) for bar in bars) + _GAP
    scale = (WIDTH - left - 2 * _GAP - max(width_of(bar.text) for bar in bars)) / max(bar.peak for bar in bars)
    _write(axes, 0, _ROW / 2, heading, weight="bold")
    for place, bar in enumerate(bars):
        middle = _ROW * (place + 1.5)
        _write(axes, left - _GAP, middle, bar.name, ha="right")
        axes.barh(middle, bar.peak * scale, left=left, height=_BAR, color=bar.color)
        _write(axes, left + bar.peak * scale + _GAP, middle, bar.text)
    _write(axes, 0, _ROW * (len(bars) + 1.5), note, color=SOFT)
    return figure


def width_of(text: str, weight: str = "normal") -> float:
    """Return how wide a text is in matplotlib's font, in points; fonts of most systems are narrower."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=TEXT, weight=weight)
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0])


def _canvas(height: float) -> tuple[Figure, Axes]:
    """Return a figure with axes over all of it, whose unit is the point and which show nothing."""
    figure = new_figure(height)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(height, 0))
    axes.set_axis_off()
    return figure, axes


def _write(axes: Axes, x: float, y: float, text: str, ha: str = "left", **look: Any) -> None:
    axes.text(x, y, text, ha=ha, va="center", fontsize=TEXT, **({"color": INK} | look))


def _texts_width(bar: Bar) -> float:
    """Return the width of the texts at a bar, with the gaps around them."""
    return 3 * _GAP + width_of(bar.text) + width_of(bar.speedup, "bold")


def _ends(bar: Bar, key: str) -> tuple[float, float]:
    """Return the lowest and the highest of a figure of a strategy's measurements."""
    figures = [row[key] for row in bar.rows]
    return min(figures), max(figures)


def _text_place(bar: Bar, scale: float, room: float) -> float | None:
    """Return where texts start: behind the bar if there is room, else in one of the longest; None if neither."""
    behind = _ends(bar, "slowest_ms")[1] * scale
    if behind + _texts_width(bar) <= room:
        return behind + _GAP
    is_long = behind >= 0.7 * room and _ends(bar, "step_ms")[0] * scale >= _texts_width(bar)
    return _GAP if is_long else None


def _scale(bars: Sequence[Bar], room: float) -> float:
    """Return the largest number of points a ms with which all texts have room; with a tenth of it, all do."""
    largest = room / max(_ends(bar, "slowest_ms")[1] for bar in bars)
    scales = [largest * part / 50 for part in range(50, 4, -1)]
    return next((scale for scale in scales if all(_text_place(bar, scale, room) for bar in bars)), scales[-1])


def _draw_time(axes: Axes, left: float, middle: float, bar: Bar, scale: float, room: float) -> None:
    """Draw a strategy's median time, paler from its lowest to its highest, and a line from the fastest step on."""
    low, high = _ends(bar, "step_ms")
    axes.barh(middle, high * scale, left=left, height=_BAR, color=bar.color, alpha=0.5)
    axes.barh(middle, low * scale, left=left, height=_BAR, color=bar.color)
    steps = (_ends(bar, "fastest_ms")[0], _ends(bar, "slowest_ms")[1])
    axes.plot([left + step * scale for step in steps], [middle + _BAR / 2 + 2] * 2, color=SOFT, lw=1.5)
    place = _text_place(bar, scale, room) or steps[1] * scale + _GAP
    color = INK if place > _GAP else ON_BAR[bar.color]
    _write(axes, left + place, middle, bar.text, color=color)
    _write(axes, left + place + width_of(bar.text) + _GAP, middle, bar.speedup, color=color, weight="bold")
