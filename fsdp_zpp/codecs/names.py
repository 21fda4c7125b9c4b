"""Codecs by name, for configuration files and command lines: ``int8``, ``int8:256``, ``int4``, ``int4delta``, ``nf4``.

A name may be followed by the codec's block, as in ``int8:256``; ``topk`` by fraction, bits and block, as in
``topk:0.02:4:4096``. The last ones may be left out. ``as stored`` and ``auto`` are for frozen weights: the codes that
they have, and no codec, or ``int8``, for weights in full precision.

A mapping names each argument of a codec: ``{codec: int4delta, block: 256, whole: int8:128}``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fsdp_zpp.suggestions import did_you_mean

from .as_stored import NAMED, AsStored
from .base import Codec
from .blockwise import Int4, Int8
from .delta import Int4Delta
from .nf4 import NF4
from .top_k import TopK

_Named = Int8 | Int4 | Int4Delta | NF4 | TopK
CODECS: dict[str, type[_Named]] = {"int8": Int8, "int4": Int4, "int4delta": Int4Delta, "nf4": NF4, "topk": TopK}
_IN_NAMES: dict[str, tuple[str, ...]] = {"topk": ("fraction", "bits", "block")}
"""The arguments that follow a name, in order; ``block`` alone for all others."""


def codec_from_name(value: object) -> Codec | None:
    """Return the codec that a configuration names.

    Args:
        value: ``none`` or None; a name, with numbers (``int8:256``, ``topk:0.02:4``) or without; a mapping; or a codec
            itself.

    Raises:
        ValueError: If there is no codec of that name, it has no such argument, or a value is out of range.
        TypeError: If ``value`` or an argument has the wrong type.
        ModuleNotFoundError: If the codec needs a package that is not installed.
    """
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
    name, *numbers = value.split(":")
    cls, names = _class_of(name), _IN_NAMES.get(name, ("block",))
    arguments = {key: _number(key, number, value) for key, number in zip(names, numbers, strict=False)}
    if len(numbers) > len(names):
        raise ValueError(f"{value!r} is not a codec: {name} takes {', '.join(names)} alone, as in {_example(name)!r}")
    return cls(**arguments)


def _number(key: str, text: str, value: str) -> Any:
    """Return the number ``text``, which the codec's name ``value`` gives for the argument ``key``."""
    try:
        return float(text) if key == "fraction" else int(text)
    except ValueError:
        example = _example(value.split(":")[0])
        raise ValueError(f"{value!r} is not a codec: a {key} is a number, as in {example!r}") from None


def _example(name: str) -> str:
    return "topk:0.02:4" if name == "topk" else "int8:256"


def name_of_codec(codec: Codec) -> str | dict[str, object]:
    """Return what :func:`codec_from_name` reads as ``codec``.

    Raises:
        TypeError: If it is not one of the library's codecs.
    """
    if isinstance(codec, AsStored):
        return codec.name
    name = next((name for name, cls in CODECS.items() if cls is type(codec)), None)
    if name is None:
        raise TypeError(f"{codec!r} has no name; those with names are {', '.join(CODECS)}")
    arguments = {field.name: getattr(codec, field.name) for field in dataclasses.fields(CODECS[name])}
    in_name = _IN_NAMES.get(name, ("block",))
    brief = ":".join([name, *(str(arguments[key]) for key in in_name)])
    if codec_from_name(brief) == codec:
        return brief
    others = {key: value for key, value in arguments.items() if key != "block"}
    codecs = {key: name_of_codec(value) if isinstance(value, Codec) else value for key, value in others.items()}
    return {"codec": name, "block": arguments["block"]} | codecs


def _class_of(name: object) -> type[_Named]:
    if not isinstance(name, str) or name not in CODECS:
        hint = did_you_mean(name, ["none", *CODECS], before="; ")
        raise ValueError(f"{name!r} is not a codec; allowed are none, {', '.join(CODECS)}{hint}")
    return CODECS[name]


def _from_mapping(values: dict[str, Any]) -> Codec:
    if "codec" not in values:
        raise ValueError(f"{values!r} does not say which codec it is: add 'codec', one of {', '.join(CODECS)}")
    cls = _class_of(values.pop("codec"))
    known = [field.name for field in dataclasses.fields(cls)]
    for key in values:
        if key not in known:
            hint = did_you_mean(key, known, before="; ")
            raise ValueError(f"{key!r} is not an argument of {cls.__name__}, which takes {', '.join(known)}{hint}")
    if "whole" in values:
        values["whole"] = codec_from_name(values["whole"])
    return cls(**values)
