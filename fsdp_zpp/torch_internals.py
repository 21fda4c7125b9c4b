"""Tables of the names that a file uses of torch's internals, checked when the file is imported.

A file that uses torch's internals lists them in a table, one row for each purpose. Otherwise a torch that lacks a name
would fail in the middle of training, or silently compute something else.
"""

from __future__ import annotations

import dis
import importlib
import inspect
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .torch_version import SUPPORTED, major_minor, supported_versions

_STORE_ATTR = dis.opmap["STORE_ATTR"]


class Needed(NamedTuple):
    """The names that one purpose needs.

    Attributes:
        owner: The full name of the module or class that has them.
        names: The names, separated by spaces: attributes of ``owner``, or attributes that it sets on its instances.
        purpose: What they are needed for, as the error says it.
        since: The first version of torch in which they are needed.
        until: The last version of torch in which they are needed.
    """

    owner: str
    names: str
    purpose: str
    since: tuple[int, int] = SUPPORTED[0]
    until: tuple[int, int] = SUPPORTED[1]


def check_needed(user: str, table: Sequence[Needed], version: str | None = None) -> None:
    """Raise unless torch has all names of a table.

    Args:
        user: What needs them, as the error names it.
        table: The names.
        version: The version of torch, which selects rows. Default: that of the running torch.

    Raises:
        RuntimeError: If any are missing; it names all of them, the purpose of each, and the supported versions.
    """
    version = torch.__version__ if version is None else version
    rows = [row for row in table if row.since <= major_minor(version) <= row.until]
    missing = [f"  {row.owner}.{name} ({row.purpose})" for row in rows for name in _missing(row)]
    if missing:
        raise RuntimeError(
            f"fsdp_zpp's {user} uses internals of torch that this torch {version} lacks:\n"
            + "\n".join(missing)
            + f"\n{supported_versions()}"
        )


def _missing(row: Needed) -> Iterator[str]:
    owner = _resolve(row.owner)
    for name in row.names.split():
        if owner is None or not (hasattr(owner, name) or _sets_on_instances(owner, name)):
            yield name


def _resolve(path: str) -> Any:
    """The module or class with this full name; None if there is none."""
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ImportError:
        return getattr(_resolve(module), name, None) if module else None


def _sets_on_instances(owner: Any, name: str) -> bool:
    """Whether a class declares an attribute or one of its methods sets it; of a module, whether a function sets it."""
    return any(
        name in inspect.get_annotations(each)
        or any(_sets(function.__code__, name) for function in _functions(vars(each).values()))
        for each in (inspect.getmro(owner) if inspect.isclass(owner) else (owner,))
    )


def _functions(values: Iterable[Any]) -> Iterator[types.FunctionType]:
    for value in values:
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if isinstance(function, types.FunctionType):
            inner: Any = inspect.unwrap(function)
            yield inner if isinstance(inner, types.FunctionType) else function


def _sets(code: types.CodeType, name: str) -> bool:
    """Whether ``code`` contains ``something.name = ...``. ``dis`` could tell, but takes seconds for all tables."""
    if name not in code.co_names:
        return False
    high = 0
    for operation, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = high | low
        if operation == _STORE_ATTR and code.co_names[argument] == name:
            return True
        high = argument << 8 if operation == dis.EXTENDED_ARG else 0
    return False
