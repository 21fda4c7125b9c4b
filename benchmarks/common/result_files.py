"""Results: a JSON file of a study and a kind of machine has the study's runs there, by their names.

    {"1.35B-2x2-eager": {"manifest": {...}, "arguments": {...}, "rows": [{...}, ...]}, ...}

Scripts leave a file for each run in ``runs/`` (``fsdp_zpp.bench.results`` writes it); this adds such files to a study,
or replaces the runs of the same names:

    python benchmarks/common/result_files.py add runs/step/step.json benchmarks/step/results/1.35B-h200.json \\
        --name 1.35B-2x2-eager
    python benchmarks/common/result_files.py add runs/muon/*.json benchmarks/loss/results/muon-2x2-h200.json

A run may have more beside its rows. A manifest (``manifest.py``) with ``"recovered": true`` was written after the run,
from what the run printed and from when its figures were committed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Result = dict[str, Any]


def read(folder: Path, studies: str = "*") -> dict[str, Result]:
    """Return the runs of studies by their names, each with its ``study`` beside what the file has of it.

    Args:
        folder: Folder of the studies' files.
        studies: Name of a study's file without ``.json``; a ``*`` stands for any text.

    Raises:
        ValueError: If two of the studies have a run of the same name.
    """
    results: dict[str, Result] = {}
    for file in sorted(folder.glob(f"{studies}.json")):
        runs = json.loads(file.read_text())
        if twice := results.keys() & runs.keys():
            raise ValueError(f"{file.name} has runs of names that another study has, too: {sorted(twice)}")
        results |= {name: run | {"study": file.stem} for name, run in runs.items()}
    return results


def finished(folder: Path) -> dict[str, Result]:
    """Return the runs that a script left in a folder, each in a file, by the files' names without ``.json``."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


def add(study: Path, runs: Mapping[str, Result]) -> None:
    """Write runs into a study's file, instead of those that have their names there."""
    old = json.loads(study.read_text()) if study.exists() else {}
    texts = (f"{json.dumps(name)}: {_as_text(run)}" for name, run in sorted((old | runs).items()))
    study.write_text("{\n" + ",\n".join(texts) + "\n}\n")


def _as_text(run: Result) -> str:
    """Return a run with a line for each row, so that a version shows which rows it changed."""
    rows = ",\n".join(json.dumps(row) for row in run["rows"])
    head = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in run.items() if name != "rows"]
    return "{\n" + ",\n".join([*head, f'"rows": [\n{rows}\n]']) + "\n}"


def main(given: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["add"])
    parser.add_argument("runs", nargs="+", type=Path, help="files of one run each")
    parser.add_argument("study", type=Path, help="file of the study, which is made if it is not there")
    parser.add_argument("--name", help="the run's name in the study; default: that of its file")
    arguments = parser.parse_args(given)
    if arguments.name and len(arguments.runs) > 1:
        parser.error("--name is for one run")
    add(arguments.study, {arguments.name or file.stem: json.loads(file.read_text()) for file in arguments.runs})


if __name__ == "__main__":
    main()
