"""Tables of benchmarks' READMEs are what their results say, and each result says how it was made."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness.benchmarks import BENCHMARKS, load

FOLDERS = ("step", "kernels", "scale")
RESULTS = [path for folder in FOLDERS for path in sorted((BENCHMARKS / folder / "results").glob("*.json"))]
REQUIRED = {"date", "machine", "versions", "commit", "command"}
manifest = load("common", "manifest")
readme_tables = load("common", "readme_tables")
result_files = load("common", "result_files")


def report(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """What a folder's report.py does."""
    command = [sys.executable, folder / "report.py", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in BENCHMARKS.glob("*/report.py")))
def test_readme_shows_what_the_results_say(folder: str) -> None:
    checked = report(BENCHMARKS / folder, "--check")
    assert checked.returncode == 0, checked.stderr


def test_a_figure_that_differs_is_found_and_mended(tmp_path: Path) -> None:
    for folder in ("common", "scale"):
        shutil.copytree(BENCHMARKS / folder, tmp_path / folder)
    readme, result = tmp_path / "scale/README.md", tmp_path / "scale/results/cpu.json"
    found = json.loads(result.read_text())
    found["rows"][0]["wrapping_ms"] += 1000
    result.write_text(json.dumps(found))
    before = readme.read_text()
    checked = report(tmp_path / "scale", "--check")
    assert checked.returncode != 0
    assert "growth" in checked.stderr
    assert readme.read_text() == before
    assert report(tmp_path / "scale").returncode == 0
    assert readme.read_text() != before
    assert report(tmp_path / "scale", "--check").returncode == 0


def test_a_table_without_a_place_is_an_error() -> None:
    text = "<!-- table: one -->\nold\n<!-- end -->\nprose\n"
    assert readme_tables.with_tables(text, {"one": "new"}) == text.replace("old", "new")
    with pytest.raises(ValueError, match=r"places for the tables \['one'\], and there are \['one', 'two'\]"):
        readme_tables.with_tables(text, {"one": "new", "two": "new"})


@pytest.mark.parametrize("folder", FOLDERS)
def test_readme_names_every_result(folder: str) -> None:
    linked = set(re.findall(r"\(results/([^)]+)\)", (BENCHMARKS / folder / "README.md").read_text()))
    assert linked == {path.name for path in (BENCHMARKS / folder / "results").iterdir()}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: f"{path.parts[-3]}/{path.stem}")
def test_a_result_says_how_it_was_made(path: Path) -> None:
    result = json.loads(path.read_text())
    made = result["manifest"]
    assert made.keys() >= REQUIRED
    assert datetime.fromisoformat(made["date"]).tzinfo
    assert made["machine"].get("gpu") or made["machine"].get("cpu")
    assert made["versions"]["torch"]
    assert made.get("recovered") or re.fullmatch(r"[0-9a-f]{40}(\+dirty)?", made["commit"])
    assert made["command"] or (made["recovered"] and "script of its own" in made["note"])
    assert result["arguments"]
    assert result["rows"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_scripts_put_nothing_on_the_path_but_common(folder: str) -> None:
    """Neither benchmarks/ nor the root: a folder ``kernels`` there hides Hugging Face's package of that name."""
    lines = [line for path in (BENCHMARKS / folder).glob("*.py") for line in path.read_text().splitlines()]
    assert {line for line in lines if "sys.path" in line} == {
        'sys.path.append(str(Path(__file__).parents[1] / "common"))'
    }


def test_a_new_result_has_the_same_form(tmp_path: Path) -> None:
    arguments = SimpleNamespace(steps=3, out=tmp_path, worker=False)
    result_files.write(tmp_path / "new.json", manifest.manifest(["python", "a b.py"]), arguments, [{"step_ms": 1.0}])
    [(name, result)] = result_files.read(tmp_path).items()
    assert name == "new"
    assert result["manifest"].keys() == REQUIRED
    assert result["manifest"]["command"] == "python 'a b.py'"
    assert result["arguments"] == {"steps": 3}
    assert result["rows"] == [{"step_ms": 1.0}]
