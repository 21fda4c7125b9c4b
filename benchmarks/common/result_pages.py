"""Pages of results: Markdown that shows tables between markers, and figures, both generated from results.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. ``report.py`` of a folder says what each table
shows, and how each figure is drawn; without options it writes them all, and with ``--check`` it tells whether a page or
a figure differs from the results.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

from result_files import Result

ROOT = Path(__file__).parents[2]
RESULTS_PAGES, GUIDES, FIGURES = (ROOT / "docs" / name for name in ("results", "guides", "figures"))
MARKED = re.compile(r"<!-- table: (?P<name>.+?) -->\n.*?<!-- end -->\n", re.DOTALL)
Tables = Mapping[str, str]
"""Tables of a page, each with its origin under it, by their names."""
Figures = Mapping[str, Callable[[], str]]
"""Functions that return a figure's SVG, by the name of its file in docs/figures."""


def with_origin(
    table: str, folder: str, results: Mapping[str, Result], names: Iterable[str] = (), brief: bool = False
) -> str:
    """Return a table with a line under it that says where it is from; :func:`origins` has the arguments."""
    return f"{table}\n\n{origins(folder, results, names, brief)}"


def svg_with_origin(svg: str, folder: str, results: Mapping[str, Result], names: Iterable[str] = ()) -> str:
    """Return a figure with a comment that says where it is from, and what draws it."""
    said = f"{origins(folder, results, names)} Drawn by: python benchmarks/{folder}/report.py"
    return svg.replace("<svg ", f"<!-- {said} -->\n<svg ", 1)


def origins(folder: str, results: Mapping[str, Result], names: Iterable[str] = (), brief: bool = False) -> str:
    """Return the sentence that says where a table or a figure is from; runs that were made alike are named together.

    Args:
        folder: Folder in benchmarks/, whose ``results/`` has the studies' files.
        results: Runs by their names.
        names: Names of the runs that are shown; default: all ``results``, whose studies alone are named.
        brief: Leave out the folder, the machine and versions, for pages that say these once.
    """
    groups = _runs(results, dict.fromkeys(names), brief) if names else _studies(results.values(), brief)
    place = "" if brief else f"`benchmarks/{folder}/results`: "
    return f"From {place}{'; '.join(groups)}."


def _runs(results: Mapping[str, Result], names: Iterable[str], brief: bool) -> list[str]:
    """Return each study with the names of its runs, and where they are from."""
    alike: dict[str, dict[str, list[str]]] = {}
    for name in names:
        alike.setdefault(results[name]["study"], {}).setdefault(origin(results[name], brief), []).append(name)
    return [
        f"`{study}.json`: "
        + ", ".join(f"{', '.join(f'`{run}`' for run in runs)} ({made})" for made, runs in own.items())
        for study, own in alike.items()
    ]


def _studies(results: Iterable[Result], brief: bool) -> list[str]:
    """Return each study with the number of its runs, and all that they are from."""
    studies: dict[str, list[list[str]]] = {}
    for result in results:
        studies.setdefault(result["study"], []).append(origin(result, brief).split(", "))
    said = []
    for study, made in studies.items():
        parts = ", ".join(part for each in zip(*made, strict=True) for part in dict.fromkeys(each))
        said.append(f"`{study}.json` ({len(made)} runs, {parts})")
    return said


def origin(result: Result, brief: bool = False) -> str:
    """Return date and commit, and unless ``brief`` the machine and the versions that figures depend on most."""
    manifest = result["manifest"]
    machine, versions = manifest["machine"], manifest["versions"]
    commit, _, dirty = (manifest["commit"] or "").partition("+")
    parts = [manifest["date"][:10], f"{commit[:7]}{' with changes' if dirty else ''}" if commit else "no commit"]
    if brief:
        return ", ".join(parts)
    parts += [f"{gpus(result)} x {machine['gpu']}"] if "gpu" in machine else []
    parts += [f"{machine['cores']} CPU cores"] if "cores" in machine else []
    return ", ".join([*parts, *(f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions)])


def gpus(result: Result) -> int:
    """Return the number of GPUs of a run; a manifest of emulated nodes may count those that one node sees."""
    arguments = result["arguments"]
    if "gpus" not in arguments:
        return result["manifest"]["machine"]["gpus"]
    return arguments["gpus"] or arguments["nodes"] * arguments["gpus_per_node"]


def with_tables(text: str, tables: Tables, page: str = "the page") -> str:
    """Return a page's text with the present tables; ``page`` is its name in an error.

    Raises:
        ValueError: If a table has no place in the text, or a place has no table.
    """
    places = [match["name"] for match in MARKED.finditer(text)]
    if sorted(places) != sorted(tables):
        raise ValueError(f"{page} has places for the tables {sorted(places)}, and there are {sorted(tables)}")
    return MARKED.sub(lambda match: f"<!-- table: {match['name']} -->\n{tables[match['name']]}\n<!-- end -->\n", text)


def different_tables(page: Path, tables: Tables) -> list[str]:
    """Return the names of the tables that a page shows otherwise than the results say."""
    old = page.read_text()
    new = with_tables(old, tables, str(page))
    both = zip(MARKED.finditer(old), MARKED.finditer(new), strict=True)
    return [shown["name"] for shown, present in both if shown.group() != present.group()]


def different_figures(figures: Figures) -> list[str]:
    """Return the names of the figures that differ from a drawing of the present results."""
    from charts import same

    files = {name: FIGURES / name for name in figures}
    return [name for name, file in files.items() if not file.exists() or not same(file.read_text(), figures[name]())]


def main(description: str | None, pages: Mapping[Path, Tables], figures: Figures | None = None) -> None:
    """Run the command line of a folder's report.py; without matplotlib it leaves figures alone."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page differs from the results")
    check = parser.parse_args().check
    figures = figures or {}
    if figures and not find_spec("matplotlib"):
        print("no figures without matplotlib")
        figures = {}
    if check:
        different = [f"{page}: {table}" for page, tables in pages.items() for table in different_tables(page, tables)]
        different += [f"{FIGURES / name}" for name in different_figures(figures)]
        if different:
            raise SystemExit("\n".join(["differences from the results; run report.py without --check:", *different]))
        return
    texts = {page: with_tables(page.read_text(), tables, str(page)) for page, tables in pages.items()}
    for page, text in texts.items():
        page.write_text(text)
    FIGURES.mkdir(parents=True, exist_ok=True)
    for name, draw in figures.items():
        (FIGURES / name).write_text(draw())
