"""Tables of what a file needs of torch's internals, checked when it is imported.

A file that reaches into torch says so in a table, a row for each purpose. A torch that lacks a name would otherwise
fail in the middle of a training, or not fail and compute something else.
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
    """Names that one purpose needs.

    Attributes:
        owner: The module, or class in a module, that has them, by its full name.
        names: The names, separated by spaces: of anything that ``owner`` has, or sets on its instances.
        purpose: What for.
        since: The first version of torch in which they are needed.
        until: The last one.
    """

    owner: str
    names: str
    purpose: str
    since: tuple[int, int] = SUPPORTED[0]
    until: tuple[int, int] = SUPPORTED[1]


def check_needed(user: str, table: Sequence[Needed], version: str | None = None) -> None:
    """Raise unless torch has all names of a table.

    Args:
        user: What needs them, for the error.
        table: The names.
        version: torch's version, for the rows of some versions only; by default that of the torch that runs.

    Raises:
        RuntimeError: If any are missing; it names all of them, what each is for, and the versions that have them.
    """
    version = torch.__version__ if version is None else version
    rows = [row for row in table if row.since <= major_minor(version) <= row.until]
    missing = [f"  {row.owner}.{name} ({row.purpose})" for row in rows for name in _missing(row)]
    if missing:
        raise RuntimeError(
            f"fsdp_zpp's {user} reaches into torch, and this torch {version} lacks what it needs:\n"
            + "\n".join(missing)
            + f"\n{supported_versions()}"
        )


def _missing(row: Needed) -> Iterator[str]:
    owner = _resolve(row.owner)
    for name in row.names.split():
        if owner is None or not (hasattr(owner, name) or _sets_on_instances(owner, name)):
            yield name


def _resolve(path: str) -> Any:
    """The module or class of that full name; None if there is none."""
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ImportError:
        return getattr(_resolve(module), name, None) if module else None


def _sets_on_instances(owner: Any, name: str) -> bool:
    """Whether a class declares an attribute or a method of it sets one, or a function of a module does."""
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
    """Whether code has ``something.name = ...``; dis says so too, but takes seconds for all tables."""
    if name not in code.co_names:
        return False
    high = 0
    for operation, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = high | low
        if operation == _STORE_ATTR and code.co_names[argument] == name:
            return True
        high = argument << 8 if operation == dis.EXTENDED_ARG else 0
    return False
