"""The catalogue of mutants: one-line faults of the library, found by the text of the line that they change.

``reverts.toml`` undoes commits that mended a fault, ``faults.toml`` has faults by kind. No mutant is removed because it
survives; one whose line has gone is pointed to the line that does its work now.
"""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGES = {"fsdp_zpp": "fsdp_zpp", "fsdp_zpp_kernels": "kernels/fsdp_zpp_kernels"}
"""The folders of packages by their names."""
FILES = ("reverts.toml", "faults.toml")


@dataclass(frozen=True)
class Mutant:
    """A one-line fault.

    Attributes:
        name: A name that no other mutant has.
        kind: The kind of fault.
        before: The line, without indentation and a comment at its end.
        after: The line in its place; empty if the line is removed.
        why: Why it is a fault; of a revert, the subject of the commit that mended it.
        within: Folders, files, classes and functions around it, separated by spaces, if other lines read alike.
        needs: ``cuda`` if it shows only on a GPU.
    """

    name: str
    kind: str
    before: str
    after: str
    why: str
    within: str = ""
    needs: str = ""


@dataclass(frozen=True)
class Place:
    """A line of a file, with both paths from the root of the checkout."""

    path: str
    line: int


def load_mutants() -> list[Mutant]:
    """Return all mutants, reverts first."""
    return [Mutant(**each) for name in FILES for each in tomllib.loads((HERE / name).read_text())["mutant"]]


def code_of(line: str) -> str:
    """Return a line without its indentation and the comment at its end."""
    return line.strip().partition("  #")[0].rstrip()


class Sources:
    """The package's files as they are below ``root``, by the lines in them."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.lines = {
            str(path.relative_to(root)): path.read_text().split("\n")
            for folder in PACKAGES.values()
            for path in sorted((root / folder).rglob("*.py"))
        }

    @cached_property
    def _places(self) -> dict[str, list[Place]]:
        places: dict[str, list[Place]] = defaultdict(list)
        for path, lines in self.lines.items():
            for number, line in enumerate(lines, 1):
                places[code_of(line)].append(Place(path, number))
        return places

    def find(self, mutant: Mutant) -> Place:
        """Return the one line that ``mutant`` changes.

        Raises:
            LookupError: If there is none, or more than one.
        """
        found = self._places.get(mutant.before, [])
        if words := set(mutant.within.split()):
            found = [place for place in found if words <= self._around(place)]
        if len(found) == 1:
            return found[0]
        where = ", ".join(f"{place.path}:{place.line}" for place in found) or "nowhere"
        raise LookupError(
            f"the mutant {mutant.name!r} must be found on one line, and is found {where}: point it to the line that "
            f"does the work of {mutant.before!r} now, and say within= where lines read alike, got {mutant.within!r}"
        )

    def mutated(self, mutant: Mutant) -> tuple[Place, str]:
        """Return the line that ``mutant`` changes, and the whole text of its file with the fault in it."""
        place = self.find(mutant)
        lines = list(self.lines[place.path])
        line = lines[place.line - 1]
        lines[place.line - 1] = line[: len(line) - len(line.lstrip())] + mutant.after
        return place, "\n".join(lines)

    def _around(self, place: Place) -> set[str]:
        names = set(Path(place.path).with_suffix("").parts)
        for node in ast.walk(self.tree(place.path)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.lineno <= place.line <= (node.end_lineno or 0):
                names.add(node.name)
        return names

    def tree(self, path: str) -> ast.Module:
        """Return the syntax tree of a file."""
        return ast.parse("\n".join(self.lines[path]))
