"""Settings in the ``quantization_config`` of a checkpoint's ``config.json``, in which anything may stand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from .format import REMEDY

T = TypeVar("T")

_KINDS = {dict: "a mapping", list: "a list", str: "a string", bool: "true or false"}


def setting(settings: Mapping[str, Any], key: str, kind: type[T]) -> T | None:
    """Return a setting; None if it is missing or null.

    Raises:
        ValueError: If it is of another kind.
    """
    value = settings.get(key)
    if value is None or isinstance(value, kind):
        return value
    raise ValueError(
        f"config.json beside the checkpoint has {key} {value!r}, and {_KINDS[kind]} belongs there; {REMEDY}"
    )


def block_size(settings: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    """Return the rows and columns of blocks; None if the setting is missing or null.

    Raises:
        ValueError: If the setting is something else.
    """
    stated = setting(settings, key, list)
    if stated is None:
        return None
    if len(stated) != 2 or not all(type(size) is int and size > 0 for size in stated):
        raise ValueError(
            f"config.json beside the checkpoint has {key} {stated!r}, and two sizes belong there; {REMEDY}"
        )
    return stated[0], stated[1]
