"""Needs of the package in torch: a version, and internals in a table; a torch that lacks any is an error at import."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import _init_utils

import fsdp_zpp
from fsdp_zpp._torch_compat import NEEDED, Needed, check_torch, major_minor, missing_names
from fsdp_zpp.fsdp1.wrapping import PATCHES as FSDP1_PATCHES
from fsdp_zpp.fsdp2.fully_shard import PATCHES as FSDP2_PATCHES

PACKAGE = Path(fsdp_zpp.__file__).parent
HERE = "test_torch_internals"


class Group:
    """Has a method, declares an attribute, sets one, and passes on one that it does not have."""

    declared: int

    def __init__(self, mp_policy: object) -> None:
        self.fsdp_params = [mp_policy]

    def unshard(self) -> object:
        return self.fsdp_params[0].mp_policy  # type: ignore[attr-defined]


def test_an_error_names_all_missing_internals_and_the_versions_that_work() -> None:
    table = (
        Needed(f"{HERE}.Group", "unshard declared fsdp_params mp_policy"),
        Needed("torch.no_such_module.Thing", "name"),
        Needed("torch._C", "_current_graph_task_id"),
    )
    with pytest.raises(RuntimeError) as caught:
        check_torch(table, "2.14.1+cpu")
    assert str(caught.value).splitlines() == [
        "fsdp_zpp uses internals of torch that this torch 2.14.1+cpu lacks:",
        f"  {HERE}.Group.mp_policy",
        "  torch.no_such_module.Thing.name",
        'torch 2.11 to 2.15 work: pip install "torch>=2.11,<2.16"',
    ]


def test_a_row_may_apply_to_some_versions_only() -> None:
    table = (Needed("torch", "no_such_name", since=(2, 12), until=(2, 13)),)
    for version in ("2.11.0", "2.14.0"):
        check_torch(table, version)
    with pytest.raises(RuntimeError, match="no_such_name"):
        check_torch(table, "2.12.0a0+git")


@pytest.mark.parametrize("module", ["fsdp_zpp", "fsdp_zpp.fsdp2.fully_shard"])
def test_a_missing_internal_is_an_error_before_the_rest_is_imported(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(_init_utils, "SHARDING_STRATEGY_MAP")
    for name in _imported():
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(RuntimeError, match=r"(?s)\._init_utils\.SHARDING_STRATEGY_MAP\n.*torch 2\.11 to 2\.15 work"):
        importlib.import_module(module)
    assert _imported() == ["fsdp_zpp._torch_compat"]


def test_the_table_lists_the_internals_that_files_use_once_each() -> None:
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py") if path.stem != "_torch_compat"}
    listed = {name for row in NEEDED for name in row.names.split()}
    # comm/ has private names in files that also do other things; see the page.
    checked = [tree for path, tree in trees.items() if path.name.startswith("_torch") or path.parent.name == "comm"]
    private = {name for tree in checked for name in _private_names(tree)}
    replaced = {name for patch in (*FSDP1_PATCHES, *FSDP2_PATCHES) for name in patch.replaced.split(".")}
    private |= set(filter(_is_private, replaced))
    missing = private - listed - {name for row in NEEDED for name in row.owner.split(".")} - _own_names()
    assert not {name: _owners_of(name) for name in missing}, "add them to a row of their owner in _torch_compat.py"
    used = {name for tree in trees.values() for name in _used_names(tree)}
    assert not listed - used, "remove them from _torch_compat.py"
    counts = Counter((_owner(row.owner), name) for row in _table() for name in row.names.split())
    assert not [each for each, count in counts.items() if count > 1]


def _owners_of(name: str) -> list[str]:
    """Return the owners in the table that have ``name`` in the running torch."""
    return [owner for owner in {row.owner: None for row in NEEDED} if not list(missing_names(Needed(owner, name)))]


def _imported() -> list[str]:
    return [module for module in sys.modules if module.partition(".")[0] == "fsdp_zpp"]


def _table() -> list[Needed]:
    """Return the rows that this torch is checked for."""
    return [row for row in NEEDED if row.since <= major_minor(torch.__version__) <= row.until]


def _owner(path: str) -> object:
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ImportError:
        return getattr(_owner(module), name)


def _used_names(tree: ast.AST) -> Iterator[str]:
    """Yield attributes, imports, what classes override, and keywords and strings that may name an attribute."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) | ast.alias(name=name) | ast.FunctionDef(name=name):
                yield name
            case ast.keyword(arg=str(name)):
                yield name
            case ast.ClassDef(body=body):
                targets = (each for part in body if isinstance(part, ast.Assign) for each in part.targets)
                yield from (each.id for each in targets if isinstance(each, ast.Name))
            case ast.Constant(value=str(name)):
                yield name.rpartition(".")[2] if _is_of_torch(name) else name


def _private_names(tree: ast.AST) -> list[str]:
    """Return attributes and imports that begin with an underscore."""
    names = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names += [*(alias.name for alias in node.names), *(node.module or "").split(".")]
    return list(filter(_is_private, names))


def _is_of_torch(name: str) -> bool:
    """Return whether a string is the full name of a function of torch, as in PATCHES."""
    return re.fullmatch(r"torch(\.\w+)+", name) is not None


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def _own_names() -> frozenset[str]:
    """Return what the package defines: functions, classes, declared attributes, and those it sets on ``self``."""
    names = {"_version", "_cdata"}  # of any tensor or storage
    names.add("_convert_weight_packed_for_cpu_inverse")  # of bitsandbytes
    names.add("_get_backend")  # without which groups have torch's default timeout
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


def test_torch_from_2_11_to_2_15_is_accepted_and_no_other() -> None:
    for version in ("2.10.1", "2.16.0", "3.0.0a0+git1", "1.13.1"):
        with pytest.raises(RuntimeError, match=rf"this is torch {re.escape(version)}\. torch 2\.11 to 2\.15 work"):
            check_torch((), version)
    for version in ("2.11.0+cu130", "2.12.1", "2.15.0a0+git"):
        check_torch((), version)


def test_the_page_lists_every_file_that_uses_private_names_and_no_other() -> None:
    page = (PACKAGE.parent / "docs/design/torch-internals.md").read_text()
    table = page[page.index("| File |") : page.index("Three files of `comm/`")]
    listed = set(re.findall(r"^\| `([\w/]*\.py)` \|", table, re.MULTILINE))
    assert listed == {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("_torch*.py")}
