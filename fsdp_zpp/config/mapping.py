"""A strategy as a mapping, the form it has in YAML and JSON.

strategy: zeropp                    the name of a preset

strategy:                           or a preset and what is different, or no preset at all
  preset: zeropp
  levels: IIG
  weights: int8:256                 see codecs/names.py
  error_feedback: {hops: both, dtype: int8}
  frozen: nf4
  local_steps: {every: 64, codec: int4:128}     or every: [[0, 8], [1000, 32]]
  gpus_per_node: 8
  overrides: {"*Experts": {preset: zeropp, weights: int4delta}}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from fsdp_zpp.codecs.names import codec_from_name, name_of_codec
from fsdp_zpp.suggestions import did_you_mean

from .elastic import Elastic
from .error_feedback import LoCo
from .local_steps import LocalSteps

PRESETS = ("zeropp", "mixzpp", "loco", "zero1", "zero2", "zero3", "mics", "diloco")
"""The names of the class methods of Strategy that make one."""

_CODECS = ("weights", "gradients", "intra_gradients", "frozen")
_KEYS = ("preset", "levels", *_CODECS, "error_feedback", "local_steps", "gpus_per_node", "overrides")

S = TypeVar("S")
T = TypeVar("T")
C = TypeVar("C", LoCo, LocalSteps, Elastic)


def arguments_from_mapping(values: object, read_strategy: Callable[[Any], object]) -> tuple[str | None, dict[str, Any]]:
    """Return the preset and the keyword arguments of the Strategy that a mapping stands for.

    Args:
        values: A mapping, or the name of a preset.
        read_strategy: Makes a strategy of such a mapping, for the overrides.

    Raises:
        ValueError: If a key or a name is unknown; the error names the key.
        TypeError: If a value has the wrong type; the error names the key.
    """
    if isinstance(values, str):
        values = {"preset": values}
    if not isinstance(values, Mapping):
        raise TypeError(f"a strategy is the name of a preset ({', '.join(PRESETS)}) or a mapping, got {values!r}")
    _check_known("", values, _KEYS)
    preset = values.get("preset")
    if preset is not None and preset not in PRESETS:
        hint = did_you_mean(preset, PRESETS, before="; ")
        raise ValueError(f"preset: {preset!r} is not known; allowed are {', '.join(PRESETS)}{hint}")
    arguments = {key: value for key, value in values.items() if key != "preset"}
    for key in _CODECS:
        if key in arguments and not (key == "intra_gradients" and arguments[key] == "auto"):
            arguments[key] = _at(key, codec_from_name, arguments[key])
    if "error_feedback" in arguments:
        arguments["error_feedback"] = _error_feedback("error_feedback", arguments["error_feedback"])
    if "local_steps" in arguments:
        arguments["local_steps"] = _local_steps(arguments["local_steps"])
    overrides = arguments.pop("overrides", None)
    if isinstance(overrides, Mapping):
        overrides = {pattern: _at(f"overrides.{pattern}", read_strategy, each) for pattern, each in overrides.items()}
    if overrides is not None:
        arguments["overrides"] = overrides
    return preset, arguments


def mapping_from_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping, of strings, numbers and dicts, that :func:`arguments_from_mapping` reads as ``arguments``.

    Raises:
        TypeError: If a codec has no name; the error names the key.
    """
    mapping = dict(arguments)
    for key in _CODECS:
        if mapping.get(key) is not None and not isinstance(mapping[key], str):
            mapping[key] = _at(key, name_of_codec, mapping[key])
    mapping["error_feedback"] = _fields_of(mapping.get("error_feedback"), "error_feedback", codec="dtype")
    if (local_steps := mapping.get("local_steps")) is not None:
        mapping["local_steps"] = _fields_of(local_steps, "local_steps", codec="codec")
        feedback = _fields_of(local_steps.error_feedback, "local_steps.error_feedback", codec="dtype")
        mapping["local_steps"]["error_feedback"] = feedback
        if isinstance(local_steps.every, tuple):
            mapping["local_steps"]["every"] = [list(pair) for pair in local_steps.every]
        mapping["local_steps"]["elastic"] = _fields_of(local_steps.elastic, "local_steps.elastic")
    mapping["overrides"] = {pattern: strategy.to_dict() for pattern, strategy in mapping["overrides"]}
    return mapping


def _fields_of(value: LoCo | LocalSteps | Elastic | None, key: str, codec: str | None = None) -> dict[str, Any] | None:
    """Return the arguments of ``value`` by name, with that named ``codec`` as text."""
    if value is None:
        return None
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if codec is not None and fields[codec] is not None:
        fields[codec] = _at(f"{key}.{codec}", name_of_codec, fields[codec])
    return fields


def source_of(arguments: Mapping[str, object]) -> str:
    """Return the source code of the Strategy that has these keyword arguments."""
    return f"Strategy({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


def _local_steps(value: object) -> LocalSteps | None:
    """Read None, ``true`` for the defaults, or a mapping of LocalSteps' arguments."""
    arguments = _arguments_of(LocalSteps, "local_steps", value, codec="codec")
    if not isinstance(arguments, dict):
        return arguments
    if "error_feedback" in arguments:
        arguments["error_feedback"] = _error_feedback("local_steps.error_feedback", arguments["error_feedback"])
    if isinstance(every := arguments.get("every"), list):
        arguments["every"] = tuple(tuple(pair) if isinstance(pair, list) else pair for pair in every)
    if "elastic" in arguments:
        arguments["elastic"] = _elastic(arguments["elastic"])
    return _at("local_steps", lambda given: LocalSteps(**given), arguments)


def _elastic(value: object) -> Elastic | None:
    """Read None or a mapping of Elastic's arguments."""
    if value is True:
        raise TypeError("local_steps.elastic: must be false or a mapping with max_nodes, got True")
    arguments = _arguments_of(Elastic, "local_steps.elastic", value)
    if not isinstance(arguments, dict):
        return arguments
    return _at("local_steps.elastic", lambda given: Elastic(**given), arguments)


def _error_feedback(key: str, value: object) -> LoCo | None:
    """Read None, ``true`` for the defaults, or a mapping of LoCo's arguments."""
    arguments = _arguments_of(LoCo, key, value, codec="dtype")
    return _at(key, lambda given: LoCo(**given), arguments) if isinstance(arguments, dict) else arguments


def _arguments_of(kind: type[C], key: str, value: object, codec: str | None = None) -> dict[str, Any] | C | None:
    """Return the arguments of ``kind`` in a mapping, the one named ``codec`` read; anything else as it is, or None."""
    if value is None or value is False or isinstance(value, kind):
        return value or None
    if value is True:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{key}: must be true, false or a mapping of {kind.__name__}'s arguments, got {value!r}")
    _check_known(f"{key}.", value, [field.name for field in dataclasses.fields(kind)])
    arguments = dict(value)
    if codec is not None and codec in arguments:
        arguments[codec] = _at(f"{key}.{codec}", codec_from_name, arguments[codec])
    return arguments


def _check_known(prefix: str, values: Iterable[object], known: Iterable[str]) -> None:
    allowed = list(known)
    for key in values:
        if key not in allowed:
            hint = did_you_mean(key, allowed, f"{prefix}{{}}") or f"allowed are {', '.join(allowed)}"
            raise ValueError(f"{prefix}{key}: unknown key; {hint}")


def _at(key: str, read: Callable[[S], T], value: S) -> T:
    """Return ``read(value)``; its errors begin with ``key``."""
    try:
        return read(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{key}: {error}") from None
