"""The page on stability names the versions that results were measured with, and those that are required."""

from __future__ import annotations

import json
import re
import tomllib
from collections import defaultdict

from harness.launch import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/stability.md").read_text().partition("## Tested versions")[2].splitlines()
    if line.startswith("| ") and not line.startswith("| Package")
]


def measured() -> dict[tuple[str, bool], set[str]]:
    """Versions in the manifests of all results, by package and whether there was a GPU."""
    found = defaultdict(set)
    for path in (ROOT / "benchmarks").glob("*/results/**/*.json"):
        manifest = json.loads(path.read_text())["manifest"]
        for package, version in manifest["versions"].items():
            if version.count(".") > 1:  # some are rounded to what a run printed
                found[package, "gpu" in manifest["machine"]].add(version.partition("+")[0])
    return found


def test_versions_are_those_of_results() -> None:
    versions = measured()
    shown = {}
    for package, _, on_gpus, on_cpus in ROWS:
        shown |= {(package, True): on_gpus, (package, False): on_cpus}
    assert len(shown) == 2 * len(ROWS) > 10
    assert shown == {place: ", ".join(sorted(versions[place])) or "-" for place in shown}


def test_required_versions_are_those_of_the_project() -> None:
    extras = [each for extra in PROJECT["optional-dependencies"].values() for each in extra]
    required = dict(
        re.match(r"([\w-]+)(.*)", each).groups()  # type: ignore[union-attr]
        for each in (*extras, *PROJECT["optional-dependencies"]["transformers"], *PROJECT["dependencies"])
    )
    required["python"] = PROJECT["requires-python"]
    assert {package: needed for package, needed, *_ in ROWS} == {package: required[package] for package, *_ in ROWS}
