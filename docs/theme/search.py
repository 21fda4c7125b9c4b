"""Adds to the search index each message in the tables of troubleshooting, and the parts of names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PAGES = "guides/troubleshooting/"
_GUIDES = 1.25
_BOOSTS = {"guides/": _GUIDES, _PAGES: 0.6, f"{_PAGES}#": _GUIDES, "results/": 0.3, "design/": 0.5, "reference/": 0.8}
"""By the start of a location; the last one counts. Tables of results have words of any query."""
_FIRST_CELL = re.compile(r"(?<=<tr>\n<td>)<code>.*?(?=</td>)")
_ROW = re.compile(r"<td>(?P<messages><code id=.*?)</td>(?P<rest>.*?)</tr>", re.DOTALL)
_MESSAGE = re.compile(r'<code id="(?P<anchor>.*?)">(?P<text>.*?)</code>')
_NAME = re.compile(r"[A-Za-z0-9]+(?:_[A-Za-z0-9]+)+")


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Gives messages anchors, which results of a search link to."""
    if not page.file.src_uri.startswith(_PAGES):
        return html
    return _FIRST_CELL.sub(lambda cell: re.sub("<code>(.*?)</code>", _anchored, cell[0]), html)


def _anchored(code: re.Match[str]) -> str:
    words = re.sub(r"&\w+;|[^a-z0-9]+", "-", code[1].lower()).strip("-")
    return f'<code id="message-{words}">{code[1]}</code>'


def on_post_build(config: Any) -> None:
    """Writes the index again.

    A long table finds none of its rows, as each has a small part of its words, so each message is a section. With the
    parts of names, ``WORLD_SIZE`` finds ``LOCAL_WORLD_SIZE``; a separator would turn a name into words of any page.
    """
    site = Path(config.site_dir)
    path = site / "search" / "search_index.json"
    index = json.loads(path.read_text())
    index["docs"] += _messages(site)
    for section in index["docs"]:
        for folder, boost in _BOOSTS.items():
            if section["location"].startswith(folder):
                section["boost"] = boost
        if "#message-" in section["location"] or (
            section["location"].startswith(_PAGES) and "<code>" in section["title"]
        ):
            section["boost"] = _GUIDES  # a message, which is searched by its own words
        names = set(_NAME.findall(f"{section['title']} {section['text']}"))
        section["parts"] = " ".join(sorted({name[at.end() :] for name in names for at in re.finditer("_", name)}))
    path.write_text(json.dumps(index, separators=(",", ":")))


def _messages(site: Path) -> Iterator[dict[str, str]]:
    for page in sorted((site / _PAGES).rglob("index.html")):
        for row in _ROW.finditer(page.read_text()):
            text = re.sub("<.*?>", " ", re.sub("</?span.*?>", "", row["rest"]))
            for message in _MESSAGE.finditer(row["messages"]):
                location = f"{page.parent.relative_to(site).as_posix()}/#{message['anchor']}"
                yield {"location": location, "title": message["text"], "text": f"<p>{text}</p>"}
