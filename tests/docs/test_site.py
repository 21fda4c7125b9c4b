"""The documentation builds without a warning, has every public name and no dead link; README is short."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness.launch import ROOT
from pages import PAGES

import fsdp_zpp

LINES, WORDS = 130, 1200
"""README has fewer: two minutes' reading."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; ``strict`` in mkdocs.yml makes a warning fail."""
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


@pytest.mark.parametrize("name", ["plan", "bench"])
def test_the_command_line_is_shown_as_it_prints_itself(name: str) -> None:
    command = [sys.executable, "-m", "fsdp_zpp", name, "--help"]
    help_text = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True).stdout
    options = help_text[help_text.index("model:\n") : help_text.index("Example:")]
    shown = (ROOT / "docs/reference/command-line.md").read_text()
    assert "".join(options.split()) in "".join(shown.split())  # lines are broken for a terminal's width


def test_links_of_pages_outside_the_site_lead_somewhere() -> None:
    dead = []
    for page in (page for page in PAGES if ROOT / "docs" not in page.parents):
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
