"""A strategy as a mapping, the form it has in YAML and JSON.

strategy: zeropp                    the name of a preset

strategy:                           or a preset and what is different, or no preset at all
  preset: zeropp
  levels: IIG
  weights: int8:256                 see codecs/names.py
  error_feedback: {hops: both, dtype: int8}
  frozen: nf4
  gpus_per_node: 8
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from fsdp_zpp.codecs.names import codec_from_name, name_of_codec

from .error_feedback import LoCo

PRESETS = ("zeropp", "mixzpp", "loco", "zero1", "zero2", "zero3", "mics")
"""The names of the class methods of Strategy that make one."""

_CODECS = ("weights", "gradients", "intra_gradients", "frozen")
_KEYS = ("preset", "levels", *_CODECS, "error_feedback", "gpus_per_node")

T = TypeVar("T")


def arguments_from_mapping(values: object) -> tuple[str | None, dict[str, Any]]:
    """The preset and the keyword arguments of the Strategy that a mapping stands for.

    Args:
        values: A mapping, or the name of a preset.

    Raises:
        ValueError: If a key or a name is unknown; the error names the key.
        TypeError: If a value has the wrong type; likewise.
    """
    if isinstance(values, str):
        values = {"preset": values}
    if not isinstance(values, Mapping):
        raise TypeError(f"a strategy is the name of a preset ({', '.join(PRESETS)}) or a mapping, got {values!r}")
    _check_known("", values, _KEYS)
    preset = values.get("preset")
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"preset: {preset!r} is not known; allowed are {', '.join(PRESETS)}")
    arguments = {key: value for key, value in values.items() if key != "preset"}
    for key in _CODECS:
        if key in arguments and not (key == "intra_gradients" and arguments[key] == "auto"):
            arguments[key] = _at(key, codec_from_name, arguments[key])
    if "error_feedback" in arguments:
        arguments["error_feedback"] = _error_feedback(arguments["error_feedback"])
    return preset, arguments


def mapping_from_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping that :func:`arguments_from_mapping` reads as ``arguments``, of plain strings, numbers and dicts.

    Raises:
        TypeError: If a codec has no name; the error names the key.
    """
    mapping = dict(arguments)
    for key in _CODECS:
        if mapping.get(key) not in (None, "auto"):
            mapping[key] = _at(key, name_of_codec, mapping[key])
    if (feedback := mapping.get("error_feedback")) is not None:
        mapping["error_feedback"] = {field.name: getattr(feedback, field.name) for field in dataclasses.fields(LoCo)}
        if feedback.dtype is not None:
            mapping["error_feedback"]["dtype"] = name_of_codec(feedback.dtype)
    return mapping


def _error_feedback(value: object) -> LoCo | None:
    """None, ``true`` for the defaults, or a mapping of LoCo's arguments."""
    if value is None or value is False or isinstance(value, LoCo):
        return value or None
    if value is True:
        return LoCo()
    if not isinstance(value, Mapping):
        raise TypeError(f"error_feedback: must be true, false or a mapping of LoCo's arguments, got {value!r}")
    _check_known("error_feedback.", value, [field.name for field in dataclasses.fields(LoCo)])
    arguments = dict(value)
    if "dtype" in arguments:
        arguments["dtype"] = _at("error_feedback.dtype", codec_from_name, arguments["dtype"])
    return _at("error_feedback", lambda given: LoCo(**given), arguments)


def _check_known(prefix: str, values: Mapping[Any, Any], known: Iterable[str]) -> None:
    allowed = list(known)
    for key in values:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"allowed are {', '.join(allowed)}"
            raise ValueError(f"{prefix}{key}: unknown key; {hint}")


def _at(key: str, read: Callable[[Any], T], value: object) -> T:
    """``read(value)``, whose errors begin with ``key``."""
    try:
        return read(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{key}: {error}") from None
