"""Reading a DeepSpeed configuration: the file and its sections, whose errors name keys by their full path."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .deepspeed_keys import Refused


def load(config: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    """The configuration, read from its file if it is a path.

    Raises:
        TypeError: If it is neither a dict nor a path, or the file holds no dict.
        ValueError: If the file is not plain JSON, or has a key twice.
        OSError: If the file can't be read.
    """
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, str | os.PathLike):
        raise TypeError(f"a DeepSpeed configuration must be a dict or the path of a JSON file, got {config!r}")
    path = Path(config)
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except ValueError as error:
        raise ValueError(f"{path} is not a DeepSpeed configuration in plain JSON: {error}") from error
    if not isinstance(values, dict):
        raise TypeError(f"{path} must hold a dict, got {values!r}")
    return values


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of ``pairs``, which must not repeat a key: json would silently keep the last value."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate keys: {', '.join(sorted({key for key in keys if keys.count(key) > 1}))}")
    return values


@dataclass(frozen=True)
class Section:
    """One section of a configuration; the top level is one, too.

    Args:
        prefix: The path of the section, which ends in a dot; empty for the top level.
        values: The keys and values.
    """

    prefix: str
    values: Mapping[str, Any]

    def error(self, key: str, reason: str, kind: type[Exception] = ValueError) -> Exception:
        return kind(f"{self.prefix}{key}={self.values.get(key)!r} in the DeepSpeed configuration: {reason}")

    def check_known(self, known: Iterable[str], inside: Iterable[str] = (), outside: Iterable[str] = ()) -> None:
        """Raise for a key that is not in ``known``; ``inside`` and ``outside`` are known to another section."""
        for key in self.values:
            if key in known:
                continue
            near = difflib.get_close_matches(str(key), sorted(known), n=1)
            hint = f"did you mean {near[0]!r}?" if near else "correct or remove it"
            # A key that is right elsewhere is misplaced, however close to a known one it is.
            if key in inside:
                hint = 'it belongs inside "zero_optimization"'
            elif key in outside:
                hint = f'it belongs outside "{self.prefix.rstrip(".")}"'
            raise self.error(key, f"unknown key; {hint}")

    def refuse(self, refused: Mapping[str, Refused]) -> None:
        for key, refusal in refused.items():
            if key in self.values and not refusal.is_off(self.values[key]):
                raise self.error(key, f"can't be honoured: {refusal.reason}")

    def check_not_auto(self, key: str) -> None:
        if self.values.get(key) == "auto":
            raise self.error(key, 'it decides the strategy, and nothing here resolves "auto"; write the value')

    def flag(self, key: str) -> bool:
        self.check_not_auto(key)
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false", TypeError)
        return value

    def number(self, key: str, default: int, least: int) -> int:
        self.check_not_auto(key)
        value = self.values.get(key, default)
        # 1e9 is a float in JSON. The last test also catches NaN and infinities, whose // 1 is NaN.
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
            raise self.error(key, "must be a whole number", TypeError)
        if value < least:
            raise self.error(key, f"must be at least {least}")
        return int(value)

    def mapping(self, key: str, hint: str = "") -> Mapping[str, Any] | None:
        self.check_not_auto(key)
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(key, f"must be a dict{hint}", TypeError)
        return value
