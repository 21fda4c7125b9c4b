"""Checks of what this package relies on in torch: supported versions, and the private names that a folder uses.

A folder that uses torch's internals lists them in a table, ``_needed.py``, which is checked before anything else of the
folder is imported. Otherwise, with a torch that lacks a name, training would fail halfway or silently compute something
else.
"""

from __future__ import annotations

import dis
import importlib
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

SUPPORTED = ((2, 11), (2, 15))


def check_torch_version(adapter: str, version: str | None = None) -> None:
    """Raise unless ``adapter`` supports this torch.

    Args:
        adapter: The adapter, as the error names it.
        version: The version of torch to check. Default: that of the running torch.

    Raises:
        RuntimeError: If the version is not supported.
    """
    version = torch.__version__ if version is None else version
    if not SUPPORTED[0] <= major_minor(version) <= SUPPORTED[1]:
        raise RuntimeError(
            f"fsdp_zpp's adapter for {adapter} uses internals of torch, and this is torch {version}. "
            f"{supported_versions()}"
        )


def major_minor(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version of torch."""
    # Local versions ("2.13.0+cpu") and pre-releases ("2.15.0a0") differ only after these.
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def supported_versions() -> str:
    """Return the supported versions and the command that installs one, for error messages."""
    (low, first), (high, last) = SUPPORTED
    return f'torch {low}.{first} to {high}.{last} work: pip install "torch>={low}.{first},<{high}.{last + 1}"'


_STORE_ATTR = dis.opmap["STORE_ATTR"]


class Patch(NamedTuple):
    """Something in torch that an adapter replaces, for good, when the adapter is imported.

    Attributes:
        replaced: Its full name without ``torch.distributed.fsdp.``.
        reason: What the adapter needs that torch has no hook for.
        apply: Replaces it with a function that calls the original and does more.
        since: The first version of torch in which it is replaced.
        until: The last version of torch in which it is replaced.
    """

    replaced: str
    reason: str
    apply: Callable[[], None]
    since: tuple[int, int] = SUPPORTED[0]
    until: tuple[int, int] = SUPPORTED[1]


def apply_patches(patches: Iterable[Patch]) -> None:
    """Apply the patches that are meant for the running torch."""
    version = major_minor(torch.__version__)
    for patch in patches:
        if patch.since <= version <= patch.until:
            patch.apply()


class Needed(NamedTuple):
    """Names of torch that one purpose needs.

    Attributes:
        owner: The full name of the module or class that has the names.
        names: The names, separated by spaces: attributes of ``owner``, or attributes that it sets on its instances.
        purpose: What the names are needed for, as the error says it to users.
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
        user: What needs the names, as the error says it.
        table: The names.
        version: The version of torch, which selects rows. Default: that of the running torch.

    Raises:
        RuntimeError: If any name is missing. The error lists all missing names, the purpose of each, and the supported
            versions.
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


def _resolve(path: str) -> types.ModuleType | type | None:
    """Return the module or class with this full name, or None if there is none."""
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ImportError:  # a class, then, or a module that this torch lacks
        return getattr(_resolve(module), name, None) if module else None


def _sets_on_instances(owner: types.ModuleType | type, name: str) -> bool:
    """Return whether a class declares or sets an attribute on its instances, or a function of a module sets it."""
    # Attributes that __init__ sets exist on instances alone, and there is no instance to look at when this is imported.
    return any(
        name in inspect.get_annotations(each)
        or any(_sets(function.__code__, name) for function in _functions(vars(each).values()))
        for each in (inspect.getmro(owner) if inspect.isclass(owner) else (owner,))
    )


def _functions(values: Iterable[object]) -> Iterator[types.FunctionType]:
    for value in values:
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if isinstance(function, types.FunctionType):
            # Decorators (torch.no_grad, say) hide the code that sets attributes.
            inner: object = inspect.unwrap(function)
            yield inner if isinstance(inner, types.FunctionType) else function


def _sets(code: types.CodeType, name: str) -> bool:
    """Return whether ``code`` contains ``something.name = ...``."""
    # dis could tell, too, but takes seconds for all tables.
    if name not in code.co_names:
        return False
    # Bytecode is pairs of operation and argument; EXTENDED_ARG holds the higher bytes of the next pair's argument.
    high = 0
    for operation, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = high | low
        if operation == _STORE_ATTR and code.co_names[argument] == name:
            return True
        high = argument << 8 if operation == dis.EXTENDED_ARG else 0
    return False
