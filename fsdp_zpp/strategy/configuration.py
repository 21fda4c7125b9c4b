"""Strategies from mappings, and as mappings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict, TypeVar

from fsdp_zpp.codecs import NAMED, NF4, AsStored, Codec, FrozenName, Int2Delta, Int3, Int4, Int4Delta, Int8
from fsdp_zpp.names import REMOVED, check_keywords, did_you_mean

from .error_feedback import LoCo
from .local_steps import Elastic, LocalSteps

# ---- strategy arguments
#
# The arguments of a strategy as a dict. Presets and configuration files give such dicts.


class StrategyArguments(TypedDict, total=False):
    """Keyword arguments of ``Strategy``, each of which may be missing; ``Strategy`` describes them."""

    levels: str
    weights: Codec | None
    gradients: Codec | None
    intra_gradients: Codec | Literal["auto"] | None
    error_feedback: LoCo | None
    frozen: Codec | FrozenName | None
    local_steps: LocalSteps | None
    gpus_per_node: int | None
    overrides: Mapping[str, Any] | tuple[tuple[str, Any], ...]


# ---- names
#
# Codecs by name, for configuration files and command lines: ``int8``, ``int8:256``, ``int4``, ``int3``,
# ``int4delta``, ``int2delta``, ``nf4``.
#
# A name may be followed by the codec's block, as in ``int8:256``. ``as stored`` and ``auto``, for frozen weights, keep
# the codes of weights that are stored quantized; ``auto`` also encodes the other weights in ``int8``.
#
# A mapping names each argument of a codec: ``{codec: int4delta, block: 256, whole: int8:128}``.

_Named = Int8 | Int4 | Int3 | Int4Delta | Int2Delta | NF4
CODECS: dict[str, type[_Named]] = {
    "int8": Int8,
    "int4": Int4,
    "int3": Int3,
    "int4delta": Int4Delta,
    "int2delta": Int2Delta,
    "nf4": NF4,
}


def codec_from_name(value: object) -> Codec | None:
    """Return the codec for ``value``: a name, with a block (``int8:256``) or without, a mapping, a codec, or None."""
    if value is None or isinstance(value, Codec):
        return value
    if isinstance(value, Mapping):
        return _from_mapping(dict(value))
    if not isinstance(value, str):
        raise TypeError(f"a codec is a name such as 'int8:256', a mapping such as {{codec: int8}}, or none: {value!r}")
    if value == "none":
        return None
    if value in NAMED:
        return NAMED[value]
    name, has_block, block = value.partition(":")
    cls = _class_of(name)
    if not has_block:
        return cls()
    if ":" in block:
        raise ValueError(f"{value!r} is not a codec: {name} takes block alone, as in 'int8:256'")
    try:
        numel = int(block)
    except ValueError:
        raise ValueError(f"{value!r} is not a codec: a block is a number, as in 'int8:256'") from None
    return cls(block=numel)


def name_of_codec(codec: Codec) -> str | dict[str, object]:
    """Return the name or mapping that :func:`codec_from_name` reads as ``codec``; codecs of users have none."""
    if isinstance(codec, AsStored):
        return codec.name
    name = next((name for name, cls in CODECS.items() if cls is type(codec)), None)
    if name is None:
        raise TypeError(f"{codec!r} has no name; those with names are {', '.join(CODECS)}")
    arguments = {field.name: getattr(codec, field.name) for field in dataclasses.fields(CODECS[name])}
    brief = f"{name}:{arguments['block']}"
    if codec_from_name(brief) == codec:
        return brief
    named = {key: name_of_codec(value) if isinstance(value, Codec) else value for key, value in arguments.items()}
    return {"codec": name, **named}


def _class_of(name: object) -> type[_Named]:
    if name == "topk":
        raise ValueError(f"'topk' is not a codec any more: {REMOVED['TopK']}")
    if not isinstance(name, str) or name not in CODECS:
        hint = did_you_mean(name, ["none", *CODECS], before="; ")
        raise ValueError(f"{name!r} is not a codec; allowed are none, {', '.join(CODECS)}{hint}")
    return CODECS[name]


def _from_mapping(values: dict[str, Any]) -> Codec:
    if "codec" not in values:
        raise ValueError(f"{values!r} does not say which codec it is: add 'codec', one of {', '.join(CODECS)}")
    cls = _class_of(values.pop("codec"))
    if "whole" in values:
        values["whole"] = codec_from_name(values["whole"])
    return cls(**values)


# ---- mapping
#
# A strategy as a mapping, the form it has in YAML and JSON.
#
# strategy: zeropp                    the name of a preset
#
# strategy:                           or a preset and changes to it, or arguments alone
#   preset: zeropp
#   levels: IIG
#   weights: int8:256                 see ``codec_from_name``
#   error_feedback: {hops: both, dtype: int8}
#   frozen: nf4
#   local_steps: {every: 64, codec: int4:128}
#   gpus_per_node: 8
#   overrides: {"*Experts": {preset: zeropp, weights: int4delta}}

# Each preset is a class method of Strategy that returns a strategy.
PRESETS = ("zeropp", "mixzpp", "loco", "zero1", "zero2", "zero3", "mics", "diloco")

_CODECS = ("weights", "gradients", "intra_gradients", "frozen")
_KEYS = ("preset", "levels", *_CODECS, "error_feedback", "local_steps", "gpus_per_node", "overrides")

S = TypeVar("S")
T = TypeVar("T")
C = TypeVar("C", LoCo, LocalSteps, Elastic)
Readers = Mapping[str, Callable[[str, Any], object]]


def arguments_from_mapping(values: object, read_strategy: Callable[[Any], object]) -> tuple[str | None, dict[str, Any]]:
    """Return the preset and the keyword arguments of a strategy that is given as a mapping or as a preset's name.

    ``read_strategy`` makes the strategies of the overrides from values of the same form. Errors name the key.
    """
    if isinstance(values, str):
        values = {"preset": values}
    if not isinstance(values, Mapping):
        raise TypeError(f"a strategy is the name of a preset ({', '.join(PRESETS)}) or a mapping, got {values!r}")
    check_keywords("a strategy", values, _KEYS)
    preset = values.get("preset")
    if preset is not None and preset not in PRESETS:
        hint = did_you_mean(preset, PRESETS, before="; ")
        raise ValueError(f"preset: {preset!r} is not known; allowed are {', '.join(PRESETS)}{hint}")
    arguments = {key: value for key, value in values.items() if key != "preset"}
    readers: Readers = {key: _codec for key in _CODECS if arguments.get(key) != "auto" or key != "intra_gradients"}
    _read_all({**readers, "error_feedback": _error_feedback, "local_steps": _local_steps}, arguments)
    overrides = arguments.pop("overrides", None)
    if isinstance(overrides, Mapping):
        overrides = {pattern: _at(f"overrides.{pattern}", read_strategy, each) for pattern, each in overrides.items()}
    if overrides is not None:
        arguments["overrides"] = overrides
    return preset, arguments


def mapping_from_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping, of strings, numbers and dicts, that :func:`arguments_from_mapping` reads as ``arguments``."""
    mapping = {key: _written(key, value) for key, value in arguments.items()}
    mapping["overrides"] = {pattern: strategy.to_dict() for pattern, strategy in arguments["overrides"]}
    return mapping


def _written(key: str, value: object) -> object:
    if isinstance(value, Codec):
        return _at(key, name_of_codec, value)
    if isinstance(value, LoCo | LocalSteps | Elastic):
        return {name: _written(f"{key}.{name}", each) for name, each in vars(value).items()}
    return value


def source_of(arguments: Mapping[str, object]) -> str:
    return f"Strategy({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


# A reader takes the key of a value, and the value; its errors begin with the key.


def _codec(key: str, value: object) -> Codec | None:
    return _at(key, codec_from_name, value)


def _error_feedback(key: str, value: object) -> LoCo | None:
    return _made_of(LoCo, key, value, {"dtype": _codec})


def _elastic(key: str, value: object) -> Elastic | None:
    if value is True:
        raise TypeError("local_steps.elastic: must be false or a mapping with max_nodes, got True")
    return _made_of(Elastic, key, value, {})


def _local_steps(key: str, value: object) -> LocalSteps | None:
    readers: Readers = {"codec": _codec, "error_feedback": _error_feedback, "elastic": _elastic}
    return _made_of(LocalSteps, key, value, readers)


def _made_of(kind: type[C], key: str, value: object, readers: Readers) -> C | None:
    """Make a ``kind`` from a mapping of its arguments, some read by ``readers``; return any ``kind`` unchanged."""
    if value is None or value is False or isinstance(value, kind):
        return value or None
    if value is True:
        value = {}  # the defaults
    if not isinstance(value, Mapping):
        raise TypeError(f"{key}: must be true, false or a mapping of {kind.__name__}'s arguments, got {value!r}")
    arguments: dict[str, Any] = dict(value)
    _read_all(readers, arguments, f"{key}.")
    return _at(key, lambda given: kind(**given), arguments)


def _read_all(readers: Readers, arguments: dict[str, Any], prefix: str = "") -> None:
    for name, read in readers.items():
        if name in arguments:
            arguments[name] = read(f"{prefix}{name}", arguments[name])


def _at(key: str, read: Callable[[S], T], value: S) -> T:
    """Return ``read(value)``; its errors begin with ``key``."""
    try:
        return read(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{key}: {error}") from None
