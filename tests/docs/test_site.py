"""The documentation builds without a warning, has every public name, no dead link, and what search and readers need."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html import unescape
from importlib.metadata import version
from pathlib import Path

import pytest
from harness.launch import ROOT, launch
from pages import PAGES
from test_troubleshooting import entries, normalized

import fsdp_zpp

LINES, WORDS = 130, 1200
"""README has fewer: two minutes' reading."""


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


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    shown = "".join(page.read_text() for page in (site / "reference").rglob("*.html"))
    missing = [name for name in fsdp_zpp.__all__ if f'id="fsdp_zpp.{name}"' not in shown]
    assert not missing


def test_pages_show_the_version_of_the_package(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert f"fsdp_zpp {version('fsdp_zpp')}</title>" in page.read_text(), page.relative_to(site)


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loads = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"')
    loaded = {found for page in site.rglob("*.html") for found in loads.findall(page.read_text())}
    assert not loaded


def test_a_search_finds_each_message_by_itself(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    titles = {normalized(unescape(re.sub("<.*?>", "", section["title"]))) for section in index["docs"]}
    missing = [f"{entry}: {entry.text}" for entry in entries() if entry.text not in titles]
    assert not missing


def test_a_search_finds_parts_of_names_but_does_not_split_them(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    assert index["config"]["fields"].keys() == {"title", "text", "tags", "parts"}
    assert "_" not in index["config"]["separator"]
    sections = [section for section in index["docs"] if "LOCAL_WORLD_SIZE" in section["text"]]
    assert sections
    assert all({"WORLD_SIZE", "SIZE"} <= set(section["parts"].split()) for section in sections)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: str(page.relative_to(ROOT)))
def test_each_page_says_first_what_it_is_for(page: Path) -> None:
    """In a paragraph right under its title."""
    assert re.match(r"# .+\n\n[A-Za-z`\[]", page.read_text())


@pytest.mark.parametrize("name", ["plan", "bench"])
def test_the_command_line_is_shown_as_it_prints_itself(name: str) -> None:
    help_text = launch(1, "-m", "fsdp_zpp", name, "--help").stdout
    options = help_text[help_text.index("model:\n") : help_text.index("Example:")]
    shown = (ROOT / "docs/reference/command-line.md").read_text()
    assert "".join(options.split()) in "".join(shown.split())  # lines are broken for a terminal's width


def test_links_of_pages_outside_the_site_lead_somewhere() -> None:
    dead = []
    for page in (*(page for page in PAGES if ROOT / "docs" not in page.parents), ROOT / "CHANGELOG.md"):
        for target in re.findall(r"(?:\]\(|src=\"|srcset=\"|href=\")([^)\"#\s]+)", page.read_text()):
            if not re.match(r"https?:|mailto:", target) and not (page.parent / target).exists():
                dead.append(f"{page.name}: {target}")
    assert not dead


def test_figures_have_a_place_and_pages_have_their_figures() -> None:
    text = "".join(page.read_text() for page in PAGES)
    shown = set(re.findall(r"figures/([\w.-]+)", text))
    assert shown == {figure.name for figure in (ROOT / "docs" / "figures").iterdir()}


def test_readme_is_read_in_two_minutes() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < LINES
    assert len(text.split()) < WORDS
