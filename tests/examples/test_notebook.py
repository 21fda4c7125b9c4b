"""Notebook of the examples, without Jupyter: its cells run in order, with the two magics that it uses.

Processes that it starts are forked from one that has imported torch, which each would do for seconds.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from harness.launch import ROOT, launch

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def run_cell(source: str, names: dict[str, Any]) -> None:
    """Run a cell in the current folder."""
    first, _, rest = source.partition("\n")
    if first.startswith("%%writefile "):
        Path(first.split()[1]).write_text(rest)
    elif first.startswith("!"):
        for line in source.splitlines():
            run_command(line)
    else:
        exec(compile(source, str(NOTEBOOK), "exec"), names)


def run_command(line: str) -> None:
    """Run a line of a shell in the current folder."""
    match shlex.split(line.removeprefix("!")):
        case ["OMP_NUM_THREADS=1", "torchrun", "--nproc-per-node", processes, *command]:
            done = launch(int(processes), *command, timeout=200, on_cpu=True, working=Path.cwd())
        case ["python", *command]:
            done = launch(1, *command, timeout=200, on_cpu=True, working=Path.cwd())
        case _:
            pytest.fail(f"no test knows how to run {line}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_cells_run_and_say_what_the_text_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            run_cell("".join(cell["source"]), names)
    results = names["results"]
    inter = {name: sum(hops["inter"] for hops in each["sent"].values()) for name, each in results.items()}
    assert 0 < inter["zeropp"] < inter["full_shard"] / 5
    assert results["zeropp"]["losses"][-1] == pytest.approx(results["full_shard"]["losses"][-1], rel=0.05)
    assert results["zeropp"]["losses"][-1] < 0.5 * results["zeropp"]["losses"][0]
    assert (tmp_path / "own.json").exists()
