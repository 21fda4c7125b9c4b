"""Settings in the ``quantization_config`` of a checkpoint's ``config.json``, in which anything may stand.

Each method has a table of the settings that are known: those that say nothing of the weights, those that a format
reads, and those of which it reads only some values. Any other setting is refused, since it may change what the codes
mean, as a rotation does.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from .format import REMEDY

T = TypeVar("T")

Known = Mapping[str, tuple[Any, ...] | None]
"""The values that each setting may have; None for any. Strings are compared in lower case."""

_KINDS = {dict: "a mapping", list: "a list", str: "a string", bool: "true or false", int: "a whole number"}


def refuse_unknown(format: str, settings: Mapping[str, Any], known: Known, within: str = "") -> None:
    """Raise if a configuration has settings, or values of settings, that are not known. Null says nothing.

    Args:
        format: The name of the format in errors.
        settings: The settings.
        known: The settings that are known.
        within: Where in ``quantization_config`` they stand, for errors: empty, or ending with a dot.

    Raises:
        ValueError: It names the setting.
    """
    for key, value in settings.items():
        if value is None or value in ({}, []):
            continue
        if key not in known:
            raise ValueError(
                f"config.json beside the checkpoint has {within}{key} {reprlib.repr(value)} in its "
                f"quantization_config, which is not known for {format} and may change what the codes mean; dequantize "
                f"the checkpoint with the library that wrote it, or remove {key} from config.json if it says nothing "
                "of the weights"
            )
        allowed = known[key]
        if allowed is not None and (value.lower() if isinstance(value, str) else value) not in allowed:
            refuse_setting(
                format, within + key, value, " and ".join(map(str, allowed)) or "only checkpoints without it"
            )


def refuse_setting(format: str, setting: str, value: object, allowed: str) -> NoReturn:
    """Raise the error about a setting of a format that is not supported."""
    raise ValueError(
        f"the checkpoint is in {format} with {setting} {reprlib.repr(value)}, and {allowed} can be read; dequantize it "
        "with the library that wrote it, or give another checkpoint"
    )


def of_layer(config: Mapping[str, Any], layer: str) -> dict[str, Any]:
    """Return the settings of GPTQ or AWQ for a layer: gptqmodel's ``dynamic`` may override the common ones.

    Args:
        config: The configuration.
        layer: The layer's name in the checkpoint.

    Raises:
        ValueError: If ``dynamic`` can't be understood.
    """
    dynamic = setting(config, "dynamic", dict) or {}
    common = {key: value for key, value in config.items() if key != "dynamic"}
    for pattern in dynamic:
        if matches(pattern.removeprefix("+:").removeprefix("-:"), layer):
            return common | (setting(dynamic, pattern, dict) or {})
    return common


def matches(pattern: str, name: str) -> bool:
    """Return whether a regular expression of a configuration matches the beginning of a name.

    Raises:
        ValueError: If the pattern is no regular expression.
    """
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise ValueError(
            f"config.json beside the checkpoint has the pattern {pattern!r}, which is no regular expression ({error}); "
            f"{REMEDY}"
        ) from error


def setting(settings: Mapping[str, Any], key: str, kind: type[T]) -> T | None:
    """Return a setting; None if it is missing or null.

    Raises:
        ValueError: If it is of another kind.
    """
    value = settings.get(key)
    if value is None or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
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
