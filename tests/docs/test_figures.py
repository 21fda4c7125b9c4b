"""Figures have one style, fit a page from phone to desktop, light or dark, and are drawn from results by a command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness.benchmarks import BENCHMARKS, RAW_NAME, load
from harness.launch import ROOT

FIGURES = sorted((ROOT / "docs" / "figures").iterdir())
REPORTS = {path.parent.name: load(path.parent.name, "report") for path in sorted(BENCHMARKS.glob("*/report.py"))}


@pytest.mark.parametrize("figure", FIGURES, ids=lambda path: path.name)
def test_a_figure_fills_its_column_and_is_legible(figure: Path) -> None:
    svg = figure.read_text()
    [head] = re.findall(r"<svg [^>]*>", svg)
    assert not re.search(r"\s(width|height)=", head), "with a size of its own it does not fill a column"
    [(width, height)] = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', head)
    assert float(width) == 640
    assert float(height) < 1.2 * float(width)
    sizes = [float(size) for size in re.findall(r"font(?:-size)?:[^;}]*?([\d.]+)px", svg)]
    assert min(sizes) >= 16, "as large as the text of a page of 640 pixels"
    light, dark = (set(re.findall(r"--(\w+):", part)) for part in svg.partition("prefers-color-scheme: dark")[::2])
    assert light >= set(re.findall(r"var\(--(\w+)\)", svg)) - {"none"}
    assert "ink" in dark <= light


@pytest.mark.parametrize("figure", FIGURES, ids=lambda path: path.name)
def test_a_chart_says_where_it_is_from_and_what_draws_it(figure: Path) -> None:
    """That it is what the command draws, test_reports.py says."""
    svg = figure.read_text()
    drawn_by = [folder for folder, report in REPORTS.items() if figure.name in getattr(report, "FIGURES", {})]
    assert bool(drawn_by) == ("Matplotlib" in svg)
    for folder in drawn_by:
        [(results, command)] = re.findall(r"<!-- From `(\S+)`: .* Drawn by: python (\S+) -->", svg)
        assert (results, command) == (f"benchmarks/{folder}/results", f"benchmarks/{folder}/report.py")
        [names] = re.findall(r"<!-- From `\S+`: (.*)Drawn by", svg)
        assert all((ROOT / results / name).exists() for name in re.findall(r"`(\S+)`", names))


def test_reports_draw_no_figure_that_is_not_there() -> None:
    drawn = {name for report in REPORTS.values() for name in getattr(report, "FIGURES", {})}
    assert drawn <= {figure.name for figure in FIGURES}
    assert len(drawn) > 5


@pytest.mark.parametrize("figure", FIGURES, ids=lambda path: path.name)
def test_a_figure_speaks_in_words(figure: Path) -> None:
    texts = re.findall(r"<(?:text|title|tspan)[^>]*>([^<]*)<", figure.read_text())
    assert texts
    assert not [text for text in texts if RAW_NAME.search(text.replace("fsdp_zpp", ""))]
