"""The pages on troubleshooting have an entry for each error and warning, and none for one that is gone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from harness.launch import ROOT

PAGES = sorted((ROOT / "docs/guides/troubleshooting").glob("*.md"))
SOURCES = sorted((ROOT / "fsdp_zpp").rglob("*.py"))
LEAST = 12
"""Fewer characters than this tell no message from another. A message that has no more is another error's, passed on."""
HOLE = "…"
"""Stands for values, in messages here and in entries of the pages."""


@dataclass(frozen=True)
class Message:
    """A text that users see, with holes for values: what is raised or warned, or its entry in a page."""

    file: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"


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


def is_distinct(text: str) -> bool:
    return max(map(len, constants(text))) >= LEAST


def _arguments(tree: ast.Module) -> Iterator[ast.expr]:
    """The messages of errors that are raised, or made by a method ``error`` to be raised, and of warnings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from node.exc.args
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("warn", "warning"):
                yield from node.args[:1]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "refuse":
            yield from node.args[2:]


@cache
def messages() -> list[Message]:
    """All messages of errors and warnings that are told from others by their constant parts."""
    found = []
    for file in SOURCES:
        for node in _arguments(ast.parse(file.read_text())):
            text = normalized(text_of(node) or "")
            if is_distinct(text) and " " in text:  # others are names, such as that of a key
                found.append(Message(file, node.lineno, text))
    return found


@cache
def quotable() -> frozenset[str]:
    """All texts of the library, with holes."""
    trees = [ast.parse(path.read_text()) for path in SOURCES]
    texts = (text_of(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.expr))
    return frozenset(normalized(text) for text in texts if text)


@cache
def entries() -> list[Message]:
    """The messages that the pages quote, in headings and in the first column of tables."""
    quoted = []
    for page in PAGES:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            if re.match(r"#+ `|\| `", line):
                where = line if line.startswith("#") else re.split(r"(?<!\\)\|", line)[1]
                quoted += [Message(page, number, normalized(code)) for code in re.findall(r"`([^`]+)`", where)]
    return quoted


def quotes(entry: str, message: str) -> bool:
    """Tell if the parts of ``entry`` stand in ``message``, in order."""
    start = 0
    for part in constants(entry):
        start = message.find(part, start) + len(part)
        if start < len(part):
            return False
    return True


def test_each_error_and_warning_has_an_entry() -> None:
    distinct = [entry.text for entry in entries() if is_distinct(entry.text)]
    missing = [message for message in messages() if not any(quotes(entry, message.text) for entry in distinct)]
    assert len(messages()) > 300
    assert not missing, "\n".join(
        f"{message} raises or warns {message.text!r}; give it an entry in {PAGES[0].parent.relative_to(ROOT)}"
        for message in missing
    )


def test_each_entry_quotes_a_message() -> None:
    vague = [entry for entry in entries() if not is_distinct(entry.text)]
    assert not vague, f"{vague} quote too little to tell the message"
    foreign = [entry for entry in entries() if not any(quotes(entry.text, known) for known in quotable())]
    assert not foreign, f"{foreign} quote no message of ours"
