"""Tables that a README shows between markers, generated from results.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. ``report.py`` of a folder says what each shows;
without options it writes them all, and with ``--check`` it tells whether README differs.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

MARKED = re.compile(r"<!-- table: (?P<name>.+?) -->\n.*?<!-- end -->\n", re.DOTALL)


def markdown(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table as Markdown."""
    headings = list(headings)
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows)])


def provenance(results: Mapping[str, Mapping[str, Any]], names: Iterable[str]) -> str:
    """A line that names the files of some results, with when and from which commit each was made."""
    links = []
    for name in dict.fromkeys(names):
        made = results[name]["manifest"]
        commit = made["commit"][:7] if made["commit"] else "no commit"
        links.append(f"[{name}](results/{name}.json) ({made['date'][:10]}, {commit})")
    return f"From {', '.join(links)}."


def with_tables(text: str, tables: Mapping[str, str]) -> str:
    """A README's text with the present tables.

    Raises:
        ValueError: If a table has no place in the text, or a place has no table.
    """
    places = [match["name"] for match in MARKED.finditer(text)]
    if sorted(places) != sorted(tables):
        raise ValueError(f"README has places for the tables {sorted(places)}, and there are {sorted(tables)}")
    return MARKED.sub(lambda match: f"<!-- table: {match['name']} -->\n{tables[match['name']]}\n<!-- end -->\n", text)


def main(description: str | None, readme: Path, tables: Mapping[str, str]) -> None:
    """The command line of a folder's report.py."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if README differs from the results")
    check = parser.parse_args().check
    text = readme.read_text()
    new = with_tables(text, tables)
    if not check:
        readme.write_text(new)
        return
    old = {match["name"]: match.group() for match in MARKED.finditer(text)}
    different = [match["name"] for match in MARKED.finditer(new) if match.group() != old[match["name"]]]
    if different:
        raise SystemExit(f"{readme} differs from its results in {', '.join(different)}; run report.py without --check")
