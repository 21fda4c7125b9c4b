"""Figures of steps on pages: step times beside peak memory, peak memory alone, and the trace of one step."""

from __future__ import annotations

from collections.abc import Iterable

from charts import GRADIENTS, TEXT, WEIGHTS, Figure, drawn, laid_out
from columns import times_as_fast
from labels import label
from matplotlib.patches import Patch
from result_files import Result, Row
from step_charts import BAR, GAP, OURS, PEER, ROW, SOFT, WIDTH, Bar, canvas, steps_figure, width_of, write

REFERENCE = "fsdp2:full_shard"
_SPEEDUP = times_as_fast(REFERENCE, "", "{:.1f}")
_KINDS = {"gather": ("Weights", WEIGHTS, 0.6), "reduce": ("Gradients", GRADIENTS, 1.0), "": ("", PEER, 1.0)}
"""Names, colors and opacities of what a lane shows."""


@drawn
def step_time(result: Result, strategies: Iterable[str]) -> Figure:
    """Draw step times with speedups over FULL_SHARD, and peak memory, of some of a result's strategies."""
    rows = result["rows"]
    bars = []
    for strategy in strategies:
        own = [_with_known_peak(row) for row in rows if row["strategy"] == strategy]
        times = " to ".join(sorted({f"{row['step_ms']:.0f}" for row in own}, key=float))
        speedup = "" if strategy == REFERENCE else _SPEEDUP.cell(own, rows)
        bars.append(Bar(label(strategy), times, speedup, _color(strategy), own))
    return steps_figure(bars, "Step time in ms, and speedup over FULL_SHARD", _setting(result))


def _with_known_peak(row: Row) -> Row:
    """Leave a peak out that has memory of other libraries' earlier contenders."""
    return row | {"peak_gib": None} if row.get("peak_counts_others") else row


@drawn
def memory(result: Result, strategies: Iterable[str]) -> Figure:
    """Draw the peak memory of some of a result's strategies."""
    by_name = {row["strategy"]: row for row in result["rows"]}
    rows = [by_name[strategy] for strategy in strategies]
    bars = [Bar(label(row["strategy"]), f"{row['peak_gib']:.1f}", "", _color(row["strategy"]), [row]) for row in rows]
    figure, axes = canvas(ROW * (len(bars) + 2))
    left = max(width_of(bar.name) for bar in bars) + GAP
    scale = (WIDTH - left - 2 * GAP - max(width_of(bar.text) for bar in bars)) / max(bar.peak for bar in bars)
    write(axes, 0, ROW / 2, "Peak memory of a GPU, GiB", weight="bold")
    for place, bar in enumerate(bars):
        middle = ROW * (place + 1.5)
        write(axes, left - GAP, middle, bar.name, ha="right")
        axes.barh(middle, bar.peak * scale, left=left, height=BAR, color=bar.color)
        write(axes, left + bar.peak * scale + GAP, middle, bar.text)
    write(axes, 0, ROW * (len(bars) + 1.5), _setting(result), color=SOFT)
    return figure


@drawn
def trace(result: Result) -> Figure:
    """Draw when each hop and the computation run in one step."""
    rows, step_ms = result["rows"], result["step_ms"]
    lanes = list(dict.fromkeys(row["lane"] for row in rows))
    figure = laid_out(190)
    axes = figure.subplots()
    for place, lane in enumerate(lanes):
        for kind, (_, color, alpha) in _KINDS.items():
            own = (row for row in rows if (row["lane"], row["kind"]) == (lane, kind))
            bars = [(row["start_ms"], row["end_ms"] - row["start_ms"]) for row in own]
            axes.broken_barh(bars, (place - 0.4, 0.8), color=color, alpha=alpha, lw=0)
    axes.set(yticks=range(len(lanes)), yticklabels=[lane.capitalize() for lane in lanes])
    axes.set(ylim=(len(lanes) - 0.4, -0.6), xlim=(0, step_ms))
    axes.set_xlabel(f"ms since the last optimizer step; this step takes {step_ms:.0f}")
    axes.tick_params(axis="y", length=0)
    patches = [Patch(color=color, alpha=alpha, lw=0, label=name) for name, color, alpha in _KINDS.values() if name]
    figure.legend(handles=patches, loc="outside upper right", ncols=2, fontsize=TEXT)
    return figure


def _setting(result: Result) -> str:
    """Return what was trained on what."""
    given, gpu = result["arguments"], result["manifest"]["machine"]["gpu"].removeprefix("NVIDIA ")
    nodes, gpus = given["nodes"], given["gpus_per_node"]
    lora = " LoRA," if given["lora"] else ""
    return f"{given['size']} Llama,{lora} {nodes * gpus} {gpu} as {nodes} emulated nodes of {gpus}; blue: fsdp_zpp"


def _is_ours(strategy: str) -> bool:
    """Return whether a strategy is one of fsdp_zpp's."""
    return "zeropp" in strategy and "deepspeed" not in strategy


def _color(strategy: str) -> str:
    return OURS if _is_ours(strategy) else PEER
