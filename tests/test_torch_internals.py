"""What the package needs of torch: a version, and internals in tables; a torch that lacks any is an error at import."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

import fsdp_zpp
from fsdp_zpp.torch_internals import Needed, check_needed, check_torch_version

PACKAGE = Path(fsdp_zpp.__file__).parent
HERE = "test_torch_internals"
FILES = sorted(
    str(path.relative_to(PACKAGE))
    for path in (*PACKAGE.glob("adapters/**/_torch*.py"), PACKAGE / "frozen" / "_tensor.py")
)
over_files = pytest.mark.parametrize("file", FILES)


class Group:
    """Has a method, declares an attribute, sets one, and passes on one that it does not have."""

    declared: int

    def __init__(self, mp_policy: object) -> None:
        self.fsdp_params = [mp_policy]

    def unshard(self) -> object:
        return self.fsdp_params[0].mp_policy  # type: ignore[attr-defined]


def test_an_error_names_all_missing_internals_and_the_versions_that_work() -> None:
    table = (
        Needed(f"{HERE}.Group", "unshard declared fsdp_params mp_policy", "gathering"),
        Needed("torch.no_such_module.Thing", "name", "something else"),
        Needed("torch._C", "_current_graph_task_id", "telling whether a backward runs"),
    )
    with pytest.raises(RuntimeError) as caught:
        check_needed("adapter for it", table, "2.14.1+cpu")
    assert str(caught.value).splitlines() == [
        "fsdp_zpp's adapter for it uses internals of torch that this torch 2.14.1+cpu lacks:",
        f"  {HERE}.Group.mp_policy (gathering)",
        "  torch.no_such_module.Thing.name (something else)",
        'torch 2.11 to 2.15 work: pip install "torch>=2.11,<2.16"',
    ]


@pytest.mark.parametrize(("version", "asked"), [("2.11.0", False), ("2.12.0a0+git", True), ("2.14.0", False)])
def test_a_row_may_apply_to_some_versions_only(version: str, asked: bool) -> None:
    table = (Needed("torch", "no_such_name", "nothing", since=(2, 12), until=(2, 13)),)
    if asked:
        with pytest.raises(RuntimeError, match="no_such_name"):
            check_needed("adapter", table, version)
    else:
        check_needed("adapter", table, version)


@over_files
def test_a_missing_internal_is_an_error_at_import(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _module(file)
    row, name = next(
        (row, name) for row in module._NEEDED for name in row.names.split() if name in vars(_owner(row.owner))
    )
    monkeypatch.delattr(_owner(row.owner), name)
    with pytest.raises(RuntimeError, match=rf"(?s){row.owner}\.{name} \(.*torch 2\.11 to 2\.15 work"):
        importlib.reload(module)  # which ends at the check, so it changes nothing


@over_files
def test_a_file_lists_every_internal_that_it_uses(file: str) -> None:
    needed = {name for row in _module(file)._NEEDED for name in (*row.names.split(), *row.owner.split("."))}
    used = set(_private_names(ast.parse((PACKAGE / file).read_text())))
    assert not used - needed - _own_names(), f"add a row for them to _NEEDED of {file}"


def _module(file: str) -> ModuleType:
    return importlib.import_module("fsdp_zpp." + file.removesuffix(".py").replace("/", "."))


def _owner(path: str) -> object:
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ImportError:
        return getattr(_owner(module), name)


def _private_names(tree: ast.AST) -> list[str]:
    """Attributes and imports that begin with an underscore."""
    names = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names += [*(alias.name for alias in node.names), *(node.module or "").split(".")]
    return [name for name in names if name.startswith("_") and not name.startswith("__")]


@functools.cache
def _own_names() -> frozenset[str]:
    """What the package itself defines: functions, classes, declared attributes, and those it sets on ``self``."""
    names = {"_version"}  # of any tensor
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    names.add(node.attr)
            elif isinstance(node, ast.ImportFrom):
                names |= {alias.asname or alias.name for alias in node.names if node.level}
    return frozenset(names)


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0", "3.0.0a0+git1", "1.13.1"])
def test_other_versions_of_torch_are_refused(version: str) -> None:
    with pytest.raises(RuntimeError, match=rf"this is torch {re.escape(version)}\. torch 2\.11 to 2\.15 work"):
        check_torch_version("FullyShardedDataParallel", version)


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1", "2.15.0a0+git"])
def test_supported_versions_of_torch_are_accepted(version: str) -> None:
    check_torch_version("FullyShardedDataParallel", version)
