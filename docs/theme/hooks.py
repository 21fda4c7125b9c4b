"""Adds to the site what mkdocs.yml can't say: the version, the repository, and which tables and outputs are wide."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_TABLE = re.compile(r"<table>(?=\s*<thead>\s*<tr>(\s*<th>[^<]*</th>)*\s*<th>(Remedy|What to do)</th>\s*</tr>)")
_OUTPUT = re.compile(r'(?<=<div class="language-text )(?=highlight">(?P<output>.*?)</pre>)', re.DOTALL)
_COLUMNS = re.compile(r"\S {2,}\S")
_FIGURE = re.compile(r"<td>(?=[\d.,]+x?(?: to [\d.,]+x?| \([\d.,]+-[\d.,]+\))?</td>)")
_CODE = re.compile(r"(?<=<code)(?! id=)[^>]*>.*?(?=</code>)", re.DOTALL)
"""Code without an id: search.py gives ids to messages, and reads them from the page."""
_TEXT = re.compile(r"(?<=>)[^<>]+(?=<|$)")
_WORD = re.compile(r'(?<![\w-])(?=\S*\w)-*\w*(?:-\w+)+(?![\w-])|"?\.\[[\w,-]+\]"?')
"""Hyphenated words and extras of a package, such as ``".[nf4]"``."""
_LONGEST = 28
"""Characters of such a word that fit into a line of a phone, whatever stands beside them."""


def on_config(config: Any) -> Any:
    """Puts the package's version beside its name, and links to the repository and its pages if it has a known one."""
    project = tomllib.loads(Path(config.config_file_path).with_name("pyproject.toml").read_text())["project"]
    config.site_name = f"{config.site_name} {project['version']}"
    config.repo_url = project.get("urls", {}).get("Repository")
    if config.repo_url:
        config.repo_url = f"{config.repo_url.rstrip('/')}/"
        config.repo_name = urlsplit(config.repo_url).path.strip("/")
    else:
        config.edit_uri = None
    return config


def on_page_content(html: str, **_: Any) -> str:
    """Marks what assets/site.css lays out in another way on narrow screens.

    Tables that end in remedies are ``data-stacked``: each row becomes a block. Output in aligned columns is of the
    class ``columns``: it scrolls, where other code is wrapped. Hyphenated words and extras in code are ``unbroken``,
    and so are cells that hold a ``figure`` and its spread.
    """
    html = _TABLE.sub("<table data-stacked>", html)
    html = _FIGURE.sub('<td class="figure">', html)
    html = _CODE.sub(lambda code: _TEXT.sub(lambda text: _WORD.sub(_unbroken, text[0]), code[0]), html)
    return _OUTPUT.sub(lambda found: "columns " if _COLUMNS.search(found["output"]) else "", html)


def _unbroken(word: re.Match[str]) -> str:
    return word[0] if len(word[0]) > _LONGEST else f'<span class="unbroken">{word[0]}</span>'
