"""Pages of results show what the results say, in words; each result says how it was made; traces become pictures."""

from __future__ import annotations

import json
import re
import shutil
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.benchmarks import BENCHMARKS, load, results
from harness.launch import launch

from fsdp_zpp.bench.results import write

PAGES = {
    "step": ("step-time", "step-time-tables", "lora"),
    "loss": ("loss",),
    "kernels": ("kernels",),
    "scale": ("scale",),
}
"""The pages of docs/results that show a folder's results."""

DOCS = BENCHMARKS.parent / "docs"
RESULTS = list(results())
REQUIRED = {"date", "machine", "versions", "commit", "command"}
manifest = load("common", "manifest")
result_pages = load("common", "result_pages")
result_files = load("common", "result_files")


def page(name: str) -> str:
    """A page of results."""
    return (DOCS / "results" / f"{name}.md").read_text()


# ---- results


def test_results_say_how_they_were_made() -> None:
    for study, name, result in RESULTS:
        run, made = (study, name), result["manifest"]
        assert made.keys() >= REQUIRED, run
        assert datetime.fromisoformat(made["date"]).tzinfo, run
        assert result["arguments"], run
        assert result["rows"], run
        assert made["versions"]["torch"], run
        if not made.get("recovered"):
            assert made["command"], run
            commit = made["commit"] if "loss" in study.parts else made["commit"].removesuffix("+dirty")
            assert re.fullmatch("[0-9a-f]{7,40}", commit), run


def test_studies_have_all_results_each_of_one_kind_of_machine() -> None:
    studies = {study for study, *_ in RESULTS}
    assert studies == {path for path in BENCHMARKS.glob("*/results/**/*") if path.is_file()}
    assert {study.relative_to(BENCHMARKS).parts[0] for study in studies} == set(PAGES)
    for study, name, result in RESULTS:
        gpu = result["manifest"]["machine"].get("gpu", "cpu")
        assert study.stem.rpartition("-")[2].upper() in gpu.upper(), (study, name)


def test_a_script_adds_runs_to_a_study_and_replaces_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = tmp_path / "results/new-cpu.json"
    study.parent.mkdir()
    for name, steps in (("a", 1), ("b", 2)):
        write(tmp_path / f"{name}.json", manifest.manifest(["python"]), SimpleNamespace(steps=steps), [{}])
    a, b = (str(tmp_path / f"{name}.json") for name in "ab")
    result_files.main(["add", a, b, str(study)])
    result_files.main(["add", b, str(study), "--name", "a"])
    found = result_files.read(study.parent)
    assert {name: run["arguments"]["steps"] for name, run in found.items()} == {"a": 2, "b": 2}
    assert json.loads(study.read_text())["a"] == json.loads(Path(b).read_text())
    assert {run["study"] for run in found.values()} == {"new-cpu"}
    with pytest.raises(SystemExit):
        result_files.main(["add", a, b, str(study), "--name", "c"])
    assert "--name is for one run" in capsys.readouterr().err
    result_files.main(["add", a, str(study.with_name("other-cpu.json"))])
    with pytest.raises(ValueError, match=r"other-cpu.json has runs .* another study has, too: \['a'\]"):
        result_files.read(study.parent)


def test_a_new_result_has_the_same_form(tmp_path: Path) -> None:
    arguments = SimpleNamespace(steps=3, out=tmp_path, worker=False)
    write(tmp_path / "new.json", manifest.manifest(["python", "a b.py"]), arguments, [{"step_ms": 1.0}])
    [(name, result)] = result_files.finished(tmp_path).items()
    assert name == "new"
    assert result["manifest"].keys() == REQUIRED
    assert result["manifest"]["command"] == "python 'a b.py'"
    assert result["arguments"] == {"steps": 3}
    assert result["rows"] == [{"step_ms": 1.0}]


@pytest.mark.parametrize("folder", ["step", "kernels", "scale"])
def test_scripts_put_nothing_on_the_path_but_common(folder: str) -> None:
    """A folder ``kernels`` on the path would hide Hugging Face's package of that name."""
    lines = [line for path in (BENCHMARKS / folder).glob("*.py") for line in path.read_text().splitlines()]
    assert {line for line in lines if "sys.path" in line} == {
        'sys.path.append(str(Path(__file__).parents[1] / "common"))'
    }


# ---- pages


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*/report.py")), ids=lambda path: path.parent.name)
def test_pages_and_figures_show_what_the_results_say(path: Path) -> None:
    checked = launch(1, path, "--check")
    assert checked.returncode == 0, checked.stderr


def test_a_measurement_that_differs_is_found_and_mended(tmp_path: Path) -> None:
    for folder in ("common", "step"):
        shutil.copytree(BENCHMARKS / folder, tmp_path / "benchmarks" / folder)
    for folder in ("results", "guides", "figures"):
        shutil.copytree(DOCS / folder, tmp_path / "docs" / folder)
    readme, chart = tmp_path / "README.md", tmp_path / "docs/figures/step-time-6.7B.svg"
    shutil.copy(DOCS.parent / "README.md", readme)
    study = tmp_path / "benchmarks/step/results/6.7B-h200.json"
    found = json.loads(study.read_text())
    [row] = [row for row in found["6.7B-2x2"]["rows"] if row["strategy"] == "fsdp2:hybrid_shard"]
    row["step_ms"] += 100
    study.write_text(json.dumps(found))
    shown = [*(tmp_path / f"docs/results/step-time{which}.md" for which in ("", "-tables")), readme, chart]
    before = [path.read_text() for path in shown]
    report = tmp_path / "benchmarks/step/report.py"
    checked = launch(1, report, "--check")
    assert checked.returncode != 0
    different = ("step-time.md: summary", "step-time-tables.md: large", "README.md: first-page", "step-time-6.7B.svg")
    assert all(what in checked.stderr for what in different)
    assert "lora-memory.svg" not in checked.stderr
    assert [path.read_text() for path in shown] == before
    assert launch(1, report).returncode == 0
    assert all(path.read_text() != text for path, text in zip(shown, before, strict=True))
    assert launch(1, report, "--check").returncode == 0


def test_a_table_without_a_place_is_an_error() -> None:
    text = "<!-- table: one -->\nold\n<!-- end -->\nprose\n"
    assert result_pages.with_tables(text, {"one": "new"}) == text.replace("old", "new")
    with pytest.raises(ValueError, match=r"places for the tables \['one'\], and there are \['one', 'two'\]"):
        result_pages.with_tables(text, {"one": "new", "two": "new"})


def test_any_run_of_steps_is_printed() -> None:
    printed = launch(1, BENCHMARKS / "step/tables.py", "*")
    assert printed.returncode == 0, printed.stderr
    names = [name for study, name, _ in RESULTS if study.parts[-3] == "step"]
    assert names
    assert not [name for name in names if f"\n{name}: " not in f"\n{printed.stdout}"]


@pytest.mark.parametrize("folder", sorted(PAGES.keys() - {"step"}))
def test_pages_or_the_folders_readme_name_every_result(folder: str) -> None:
    text = "".join(map(page, PAGES[folder])) + (BENCHMARKS / folder / "README.md").read_text()
    shown_whole = set(re.findall(r"(?<! in )`([\w.-]+\.json)` \(\d+ runs", text))
    own = [(study.name, name) for study, name, _ in RESULTS if study.parts[-3] == folder]
    assert own
    assert not [study for study, _ in own if f"`{study}`" not in text]
    assert not [name for study, name in own if study not in shown_whole and f"`{name}`" not in text]


@pytest.mark.parametrize("name", [name for names in PAGES.values() for name in names if not name.endswith("-tables")])
def test_conclusions_come_first_and_their_figures_are_in_tables(name: str) -> None:
    """Fractions are, with as many digits; whole numbers are often counts or sizes."""
    text = page(name)
    more = page(f"{name}-tables") if name == "step-time" else ""
    tables = list(result_pages.MARKED.finditer(text + more))
    for table in tables:
        (columns,) = {line.count("|") - 1 for line in table.group().splitlines() if line.startswith("|")}
        assert columns <= 8, table["name"]
    conclusions = text.partition("\n## ")[0].partition("![")[0]
    what, expect, bad = re.split(r"\n(?:What to expect.*|Bad news):\n", conclusions)
    assert len(what) > 200
    assert 3 <= len(re.findall("^- ", expect, re.MULTILINE)) <= 6
    assert re.findall("^- ", bad, re.MULTILINE)
    known = {abs(float(figure)) for table in tables for figure in re.findall(r"\d+(?:\.\d+)?", table.group())}
    for figure in re.findall(r"(?<![\d.])\d+\.\d+(?![\d.]| ?[BM]\b)", expect + bad):
        digits = len(figure.partition(".")[2])
        assert any(abs(one - float(figure)) <= 0.5001 * 10**-digits for one in known), figure


# ---- figures


def test_svg_is_the_same_each_time_and_takes_its_ink_from_the_page() -> None:
    charts = load("common", "charts")

    @charts.drawn
    def chart(height: float) -> Any:
        figure = charts.Figure()
        axes = figure.subplots()
        axes.bar_label(axes.bar(["one"], height), [f"{height:.0f}"])
        axes.grid()
        return figure

    first = chart(1.0)
    assert charts.same(first, chart(1.0))
    assert not charts.same(first, chart(1.1))  # the same texts, another bar
    other_version = first.replace("<dc:title>Matplotlib v", "<dc:title>Matplotlib v9")
    assert charts.same(other_version, chart(1.1))
    drawing = re.sub(r"<style>.*?</style>", "", first, flags=re.DOTALL)
    assert "prefers-color-scheme: dark" in first
    assert "var(--ink)" in drawing
    assert not charts.COLORS.keys() & set(re.findall(r"#[0-9a-f]{6}", drawing))


# ---- traces of steps

timeline = load("step", "timeline")
BETWEEN, COMPUTATION, INSIDE = timeline.BETWEEN, timeline.COMPUTATION, timeline.INSIDE
lanes, last_step, rows_of, summary = timeline.lanes, timeline.last_step, timeline.rows_of, timeline.summary
figures = load("step", "figures")
paired = load("step", "interleaved").paired


def kernel(name: str, start: float, duration: float, ranks: str | None = None) -> dict[str, Any]:
    """A kernel's event in a trace, times in ms."""
    arguments = {} if ranks is None else {"Process Group Ranks": ranks}
    return {"cat": "kernel", "name": name, "ts": 1e3 * start, "dur": 1e3 * duration, "args": arguments}


OPTIMIZER = {"cat": "gpu_user_annotation", "name": "Optimizer.step#SGD.step", "dur": 500}
TRACE = [
    OPTIMIZER | {"ts": 99_500},
    kernel("ncclDevKernel_AllGather_RING_LL", 90, 20, "[0, 2]"),  # half of it before the step
    kernel("ncclDevKernel_AllGather_RING_LL", 112, 4, "[2, 3]"),
    kernel("ncclDevKernel_SendRecv", 120, 10, "[0, 1, 2, 3]"),
    kernel("gemm", 115, 10),
    {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1e6, "args": {}},
    OPTIMIZER | {"ts": 149_500},
]


def test_a_step_lies_between_two_optimizer_steps_and_who_talks_decides_the_lane() -> None:
    step = last_step(TRACE)
    assert step == (100e3, 150e3)
    assert summary(lanes(TRACE, gpus_per_node=2), step) == [
        "a step of 50 ms",
        "inter-node: 20.0 ms, of which 5.0 ms beside others",
        "intra-node: 4.0 ms, of which 1.0 ms beside others",
        "computation: 10.0 ms, of which 6.0 ms beside others",
    ]
    assert not lanes(TRACE, gpus_per_node=4)[BETWEEN]
    with pytest.raises(ValueError, match="but the trace has 1 of them"):
        last_step(TRACE[:-1])


def test_a_picture_shows_what_each_lane_does_in_a_step() -> None:
    trace = [*TRACE, kernel("gemm", 125.05, 5)]  # so soon after the other that no gap could be seen
    rows = rows_of(lanes(trace, gpus_per_node=2), last_step(trace))
    assert [tuple(row.values()) for row in rows] == [
        (BETWEEN, "gather", 0, 10),
        (BETWEEN, "reduce", 20, 30),
        (INSIDE, "gather", 12, 16),
        (COMPUTATION, "", 15, 30.05),
    ]
    drawing = figures.trace({"rows": rows, "step_ms": 50})
    shown = re.findall(r">([A-Z][a-z-]+)<", drawing)
    assert shown == ["Inter-node", "Intra-node", "Computation", "Weights", "Gradients"]


def test_ratios_of_steps_are_of_a_round() -> None:
    drifting = [1.0, 2.0, 4.0, 8.0, 16.0]
    assert paired(drifting, drifting) == [1.0, 1.0, 1.0]
    assert paired([3.0 * time for time in drifting], drifting) == [3.0, 3.0, 3.0]
