"""The documentation builds without a warning, has every public name, no dead link, and what search and readers need."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from functools import cache
from html import unescape
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest
from harness.benchmarks import BENCHMARKS, RAW_NAME, load, results
from harness.launch import ROOT

import fsdp_zpp
from fsdp_zpp.__main__ import main

PAGES_OUTSIDE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md")]
PAGES_OF_THE_SITE = sorted((ROOT / "docs").rglob("*.md"))
FIGURES = sorted((ROOT / "docs" / "figures").iterdir())
CODE = {".py", ".ipynb", ".yaml", ".sbatch"}
"""Endings of files in examples/ that name pages."""
REPORTS = {path.parent.name: load(path.parent.name, "report") for path in sorted(BENCHMARKS.glob("*/report.py"))}

# ---- entries of troubleshooting, each of which quotes an error or a warning

TROUBLESHOOTING = sorted((ROOT / "docs/guides/troubleshooting").glob("*.md"))
SOURCES = [path for folder in ("fsdp_zpp", "kernels") for path in sorted((ROOT / folder).rglob("*.py"))]
LEAST = 12
"""Fewer characters than this tell no message from another."""
HOLE = "…"
"""Stands for values, in messages here and in entries of the pages."""


class Entry(NamedTuple):
    """A message as a page quotes it, with holes for values."""

    file: Path
    line: int
    text: str


def text_of(node: ast.expr) -> str | None:
    """The text of a literal, an f-string or a sum of them; None for anything else."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(HOLE if isinstance(part, ast.FormattedValue) else text_of(part) or "" for part in values)
        case ast.BinOp(left=left, right=right, op=ast.Add()):
            return (text_of(left) or HOLE) + (text_of(right) or HOLE)
    return None


def normalized(text: str) -> str:
    """``text`` without the marks of Markdown and with single spaces."""
    return re.sub(r"\s+", " ", re.sub(r"%[sdrg]", HOLE, text.replace("`", "").replace("\\|", "|"))).strip()


def constants(text: str) -> list[str]:
    """The parts of a text between its holes."""
    return [part.strip() for part in text.split(HOLE)]


@cache
def quotable() -> frozenset[str]:
    """All texts of the library, with holes."""
    trees = [ast.parse(path.read_text()) for path in SOURCES]
    texts = (text_of(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.expr))
    return frozenset(normalized(text) for text in texts if text)


@cache
def entries() -> list[Entry]:
    """The messages that the pages quote, in headings and in the first column of tables."""
    quoted = []
    for page in TROUBLESHOOTING:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            if re.match(r"#+ `|\| `", line):
                where = line if line.startswith("#") else re.split(r"(?<!\\)\|", line)[1]
                quoted += [Entry(page, number, normalized(code)) for code in re.findall(r"`([^`]+)`", where)]
    return quoted


def quotes(parts: list[str], message: str) -> bool:
    """Tell if the parts of an entry stand in ``message``, in order."""
    start = 0
    for part in parts:
        start = message.find(part, start) + len(part)
        if start < len(part):
            return False
    return True


def test_each_entry_quotes_a_message() -> None:
    assert len(entries()) > 50
    vague = [entry for entry in entries() if max(map(len, constants(entry.text))) < LEAST]
    assert not vague, f"{vague} quote too little to tell the message"
    parts = {entry: constants(entry.text) for entry in entries()}
    foreign = [entry for entry in entries() if not any(quotes(parts[entry], known) for known in quotable())]
    assert not foreign, f"{foreign} quote no message of ours"


# ---- the built site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; ``strict`` in mkdocs.yml makes a warning fail, such as that of a page which nav leaves out."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stdout + done.stderr
    return folder


def test_the_site_has_public_names_and_the_version_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = {page.relative_to(site): page.read_text() for page in site.rglob("*.html")}
    reference = "".join(text for page, text in pages.items() if page.parts[0] == "reference")
    assert not [name for name in fsdp_zpp.__all__ if f'id="fsdp_zpp.{name}"' not in reference]
    title = f"fsdp_zpp {version('fsdp_zpp')}</title>"
    assert not [page for page, text in pages.items() if title not in text]
    loads = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"')
    assert not {found for text in pages.values() for found in loads.findall(text)}


def test_a_search_for_a_message_leads_to_its_remedy(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = defaultdict(list)
    for section in index["docs"]:
        found[normalized(unescape(re.sub("<.*?>", "", section["title"])))].append(section)
    for entry in entries():
        remedies = [each for each in found[entry.text] if each["location"].startswith("guides/troubleshooting/")]
        assert remedies, f"the index has no section of {entry}"
        for section in remedies:
            page, _, anchor = section["location"].partition("#")
            assert f'id="{anchor}"' in (site / page / "index.html").read_text(), section
            assert len(re.sub("<.*?>", " ", section["text"]).split()) > 2, f"{entry} has no remedy"


def test_a_search_finds_parts_of_names(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    assert index["config"]["fields"].keys() == {"title", "text", "tags", "parts"}
    assert "_" not in index["config"]["separator"]  # which would split names
    sections = [section for section in index["docs"] if "LOCAL_WORLD_SIZE" in section["text"]]
    assert sections
    assert all({"WORLD_SIZE", "SIZE"} <= set(section["parts"].split()) for section in sections)


@pytest.mark.parametrize("query", ["two nodes", "multi node", "launch"])
def test_a_search_for_several_nodes_leads_to_how_to_launch_them(site: Path, query: str) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    pages = [section for section in index["docs"] if "#" not in section["location"]]  # whose titles count most
    begins = [re.compile(rf"\b{word}", re.IGNORECASE) for word in query.split()]  # as Material takes words
    found = [page["location"] for page in pages if all(word.search(page["title"]) for word in begins)]
    assert found == ["guides/launching/"]


def test_pages_that_errors_and_comments_name_are_there(site: Path) -> None:
    dead = []
    for file in (*SOURCES, *(path for path in (ROOT / "examples").rglob("*") if path.suffix in CODE)):
        for page, anchor in re.findall(r"\b(docs/[\w./-]+?)\.md(?:#([\w-]+))?", file.read_text()):
            built = site / page.removeprefix("docs/").removesuffix("/index").removesuffix("index") / "index.html"
            if not built.exists() or (anchor and f'id="{anchor}"' not in built.read_text()):
                dead.append(f"{file.relative_to(ROOT)}: {page}.md#{anchor}")
    assert not dead


# ---- pages


def test_each_page_says_what_it_is_for_in_a_paragraph_under_its_title() -> None:
    assert not [page for page in PAGES_OF_THE_SITE if not re.match(r"# .+\n\n[A-Za-z`\[]", page.read_text())]


@pytest.mark.parametrize("name", ["plan", "bench"])
def test_the_command_line_is_shown_as_it_prints_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([name, "--help"])
    help_text = capsys.readouterr().out
    options = help_text[help_text.index("model:\n") : help_text.index("Example:")]
    shown = (ROOT / "docs/reference/command-line.md").read_text()
    assert "".join(options.split()) in "".join(shown.split())  # lines are broken for a terminal's width


def test_links_of_pages_outside_the_site_lead_somewhere() -> None:
    dead = []
    for page in PAGES_OUTSIDE:
        for target in re.findall(r"(?:\]\(|src=\"|srcset=\"|href=\")([^)\"#\s]+)", page.read_text()):
            if not re.match(r"https?:|mailto:", target) and not (page.parent / target).exists():
                dead.append(f"{page.name}: {target}")
    assert not dead


OF_OTHERS = ("axolotl/", "llamafactory/", "swift/", "packing_utils.py", "zero_to_fp32.py", "/torchaudio.py")
"""Files of other projects, as pages and comments name them."""
OF_EARLIER = ("benchmarks/convergence.py", "benchmarks/step.py")
"""Scripts that results were measured with, which have gone."""


def test_files_that_pages_and_comments_name_are_there() -> None:
    folders = ("fsdp_zpp", "kernels", "tests", "benchmarks", "examples", "docs")
    files = [f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.py")]
    pages = (*PAGES_OUTSIDE[:3], *PAGES_OF_THE_SITE, *BENCHMARKS.rglob("*.md"))
    files += [f"/{name}" for page in pages for name in re.findall(r"(?m)^# (\w+\.py)$", page.read_text())]  # to copy
    lost = {
        f"{each.relative_to(ROOT)}: {name}"
        for each in (*pages, *SOURCES)
        for name in re.findall(r"(?<![\w/.{*-])[\w/]*\w\.py\b", each.read_text())
        if not name.startswith((*OF_OTHERS, *OF_EARLIER)) and not any(file.endswith(f"/{name}") for file in files)
    }
    assert not lost


def test_figures_have_a_place_and_pages_have_their_figures() -> None:
    text = "".join(page.read_text() for page in (*PAGES_OUTSIDE, *PAGES_OF_THE_SITE))
    assert set(re.findall(r"figures/([\w.-]+)", text)) == {figure.name for figure in FIGURES}


def test_readme_is_read_in_two_minutes() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 110
    assert len(text.split()) <= 1000


# ---- the page on stability

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/stability.md").read_text().partition("## Tested versions")[2].splitlines()
    if line.startswith("| ") and not line.startswith("| Package")
]


def test_versions_are_those_of_results() -> None:
    versions = defaultdict(set)  # by package and whether there was a GPU
    for _, _, result in results():
        manifest = result["manifest"]
        for package, measured in manifest["versions"].items():
            if measured.count(".") > 1:  # some are rounded to what a run printed
                versions[package, "gpu" in manifest["machine"]].add(measured.partition("+")[0])
    shown = {}
    for package, _, on_gpus, on_cpus in ROWS:
        shown |= {(package, True): on_gpus, (package, False): on_cpus}
    assert len(shown) == 2 * len(ROWS) > 10
    assert shown == {place: ", ".join(sorted(versions[place])) or "-" for place in shown}


def test_required_versions_are_those_of_the_project() -> None:
    extras = PROJECT["optional-dependencies"]
    lines = itertools.chain(*extras.values(), extras["transformers"], PROJECT["dependencies"])
    required = dict(re.match(r"([\w-]+)(.*)", line).groups() for line in lines)
    required["python"] = PROJECT["requires-python"]
    assert {package: needed for package, needed, *_ in ROWS} == {package: required[package] for package, *_ in ROWS}


# ---- figures


@pytest.mark.parametrize("figure", FIGURES, ids=lambda path: path.name)
def test_a_figure_fills_its_column_and_is_legible_and_speaks_in_words(figure: Path) -> None:
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
    texts = re.findall(r"<(?:text|title|tspan)[^>]*>([^<]*)<", svg)
    assert texts
    assert not [text for text in texts if RAW_NAME.search(text.replace("fsdp_zpp", ""))]


def test_a_chart_says_where_it_is_from_and_what_draws_it() -> None:
    drawn = {name: folder for folder, report in REPORTS.items() for name in getattr(report, "FIGURES", {})}
    assert drawn.keys() <= {figure.name for figure in FIGURES}
    assert len(drawn) > 3
    for figure in FIGURES:
        svg, folder = figure.read_text(), drawn.get(figure.name)
        assert (folder is not None) == ("Matplotlib" in svg), figure
        if folder is not None:
            [(place, names, command)] = re.findall(r"<!-- From `(\S+)`: (.*) Drawn by: python (\S+) -->", svg)
            assert (place, command) == (f"benchmarks/{folder}/results", f"benchmarks/{folder}/report.py")
            named = set(re.findall(r"`(\S+)`", names))
            studies = {study for study, *_ in results() if study.name in named and study.parts[-3] == folder}
            runs = {name for study, name, _ in results() if study in studies}
            assert studies, figure
            assert named <= {study.name for study in studies} | runs, figure
