"""Notebook of the examples, without Jupyter: its cells run in order, with the two magics that it uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.launch import ROOT

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def run_cell(source: str, names: dict[str, Any], environment: dict[str, str]) -> None:
    """Run a cell in the current folder."""
    first, _, rest = source.partition("\n")
    if first.startswith("%%writefile "):
        Path(first.split()[1]).write_text(rest)
    elif first.startswith("!"):
        for line in source.splitlines():
            subprocess.run(["bash", "-c", line.removeprefix("!")], env=environment, check=True, timeout=200)
    else:
        exec(compile(source, str(NOTEBOOK), "exec"), names)


def test_its_cells_run_and_say_what_the_text_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "CUDA_VISIBLE_DEVICES": ""}
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            run_cell("".join(cell["source"]), names, environment)
    results = names["results"]
    inter = {name: sum(hops["inter"] for hops in each["sent"].values()) for name, each in results.items()}
    assert 0 < inter["zeropp"] < inter["full_shard"] / 5
    assert results["zeropp"]["losses"][-1] == pytest.approx(results["full_shard"]["losses"][-1], rel=0.05)
    assert results["zeropp"]["losses"][-1] < 0.5 * results["zeropp"]["losses"][0]
    assert (tmp_path / "own.json").exists()
