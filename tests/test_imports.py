"""Imports that import-linter can't see: by names in strings, and of benchmarks' scripts; and how much is imported."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from harness.benchmarks import BENCHMARKS

import fsdp_zpp
from fsdp_zpp.names import REMOVED

ROOT = BENCHMARKS.parent
FILES = [path for folder in ("fsdp_zpp", "kernels") for path in sorted((ROOT / folder).rglob("*.py"))]
BY_NAME = {"import_module", "__import__"}


def hidden_imports(source: str) -> Iterator[str]:
    """Yield strings that name a module of the package, and calls that import relatively to where they are."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(text)) if re.fullmatch(r"fsdp_zpp(_kernels)?(\.\w+)+", text):
                yield text
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in BY_NAME:
                if len(node.args) + len(node.keywords) > 1:
                    yield ast.unparse(node)


def imported_by(path: Path) -> set[str]:
    """Return the names of all modules that a script imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return modules | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


def test_no_module_imports_another_by_a_name_in_a_string() -> None:
    hidden = {str(path.relative_to(ROOT)): list(hidden_imports(path.read_text())) for path in FILES}
    assert not {path: names for path, names in hidden.items() if names}
    # They would be found.
    assert list(hidden_imports('NAME = "fsdp_zpp.planner"'))
    assert list(hidden_imports('importlib.import_module("..planner", __package__)'))


@pytest.mark.parametrize("folder", sorted(path.name for path in BENCHMARKS.iterdir() if path.is_dir()))
def test_scripts_of_benchmarks_import_each_other_in_no_circle(folder: str) -> None:
    scripts = {path.stem: path for path in (BENCHMARKS / folder).glob("*.py")}
    TopologicalSorter({name: imported_by(path) & scripts.keys() for name, path in scripts.items()}).prepare()


@pytest.mark.parametrize("name", REMOVED)
def test_a_name_that_went_says_what_to_do_instead(name: str) -> None:
    with pytest.raises(ImportError, match=f"{name} is not in fsdp_zpp any more: {re.escape(REMOVED[name])}"):
        getattr(fsdp_zpp, name)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        fsdp_zpp.no_such_name  # noqa: B018


def test_the_package_can_be_held_in_mind() -> None:
    """A module is one noun of the architecture; beyond these bounds there are two in it, or one too many."""
    lines = {path: len(path.read_text().splitlines()) for path in FILES}
    assert sum(lines.values()) <= 31_000
    assert len(lines) <= 85
    assert max(lines.values()) <= 900
    assert max(Counter(path.parent for path in FILES).values()) <= 14
