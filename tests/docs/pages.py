"""Code blocks and links of README and of the pages in docs/."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from harness.launch import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
"""All pages that users and newcomers read."""

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)[^\n`]*\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
_COMMENT = re.compile(r"<!-- (given|not run|printed by): (.+?) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block of code.

    Args:
        page: Where it is, from the repository's root.
        line: The line of its first line of code.
        language: What its fence names.
        code: Its text, not indented.
        given: What the comment above it says that it starts from; empty: what the block before it left.
        not_run: Why it is not run, as the comment above it says; empty: it is.
        printed_by: "the command above" for a text whose lines the last command of the bash block before it prints.
    """

    page: str
    line: int
    language: str
    code: str
    given: str = ""
    not_run: str = ""
    printed_by: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text()
    blocks, end = [], 0
    for fence in _FENCE.finditer(text):
        above = dict(_COMMENT.findall(text[end : fence.start()]))
        end = fence.end()
        blocks.append(
            Block(
                page=str(page.relative_to(ROOT)),
                line=text.count("\n", 0, fence.start("code")) + 1,
                language=fence["language"],
                code=textwrap.dedent(fence["code"]),
                given=above.get("given", ""),
                not_run=above.get("not run", ""),
                printed_by=above.get("printed by", ""),
            )
        )
    return blocks


def added_lines(diff: str) -> str:
    """What a block of a diff leaves behind."""
    kept = [line[1:] for line in diff.splitlines() if not line.startswith("-")]
    return textwrap.dedent("\n".join(kept)) + "\n"
