"""Reading a DeepSpeed configuration: the file and its sections, whose errors name keys by their full path.

All that is wrong with a configuration is told at once: users would otherwise correct one key a launch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_zpp.suggestions import did_you_mean

from .keys import Refused


def load(config: Mapping[str, object] | str | os.PathLike[str]) -> Mapping[str, object]:
    """Return the configuration, read from its file if it is a path.

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


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Make a dict of ``pairs``, which must not repeat a key: json would silently keep the last value."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate keys: {', '.join(sorted({key for key in keys if keys.count(key) > 1}))}")
    return values


@dataclass(frozen=True)
class Findings:
    """Errors of a configuration, and keys of it that DeepSpeed ignores, collected as its sections are read."""

    errors: list[Exception] = field(default_factory=list)
    ignored: list[tuple[str, str, str]] = field(default_factory=list)

    def check(self) -> None:
        """Raise all errors as one: a TypeError if each of them is one."""
        if not self.errors:
            return
        if len(self.errors) == 1:
            raise self.errors[0]
        kind = TypeError if all(isinstance(error, TypeError) for error in self.errors) else ValueError
        raise kind("\n".join([f"{len(self.errors)} keys are wrong:", *(f"- {error}" for error in self.errors)]))


@dataclass(frozen=True)
class Section:
    """One section of a configuration; the top level is one, too.

    Its methods add errors to ``findings`` and go on, with a default where they return a value.

    Args:
        prefix: The path of the section, which ends in a dot; empty for the top level.
        values: The keys and values. One that is null is not set.
        findings: The findings of the whole configuration.
    """

    prefix: str
    values: Mapping[str, object]
    findings: Findings

    def inner(self, key: str, hint: str = "") -> Section:
        """Return the section at ``key``, empty if there is none."""
        return Section(f"{self.prefix}{key}.", self.mapping(key, hint) or {}, self.findings)

    def error(self, key: str, reason: str, kind: type[Exception] = ValueError) -> None:
        self.findings.errors.append(kind(f"{self._at(key)} in the DeepSpeed configuration: {reason}"))

    def ignored(self, keys: Sequence[str], under: str, remedy: str) -> None:
        """Note that DeepSpeed would skip ``keys`` without a word, ``under`` which setting, and the ``remedy``."""
        self.findings.ignored.append((" and ".join(map(self._at, keys)), under, remedy))

    def _at(self, key: str) -> str:
        return f"{self.prefix}{key}={self.values.get(key)!r}"

    def check_known(self, known: Iterable[str], inside: Iterable[str] = (), outside: Iterable[str] = ()) -> None:
        """Check for keys that are not in ``known``; ``inside`` and ``outside`` are known to another section."""
        for key in self.values:
            if key in known:
                continue
            hint = did_you_mean(key, sorted(known), "{!r}") or "correct or remove it"
            # A key that is right elsewhere is misplaced, however close to a known one it is.
            if key in inside:
                hint = 'it belongs inside "zero_optimization"'
            elif key in outside:
                hint = f'it belongs outside "{self.prefix.rstrip(".")}"'
            self.error(key, f"unknown key; {hint}")

    def refuse(self, refused: Mapping[str, Refused]) -> None:
        for key, refusal in refused.items():
            if key in self.values and not refusal.is_off(self.values[key]):
                self.error(key, f"can't be honoured: {refusal.reason}")

    def is_auto(self, key: str) -> bool:
        """Return whether the value is "auto", which is an error."""
        if self.values.get(key) == "auto":
            self.error(key, 'it decides the strategy, and nothing here resolves "auto"; write the value')
            return True
        return False

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value is None or self.is_auto(key):
            return False
        if not isinstance(value, bool):
            self.error(key, "must be true or false", TypeError)
        return value is True

    def number(self, key: str, default: int, least: int) -> int:
        value = self.values.get(key)
        if value is None or self.is_auto(key):
            return default
        # 1e9 is a float in JSON. The last test also catches NaN and infinities, whose // 1 is NaN.
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
            self.error(key, "must be a whole number", TypeError)
        elif value < least:
            self.error(key, f"must be at least {least}")
        else:
            return int(value)
        return default

    def mapping(self, key: str, hint: str = "") -> Mapping[str, object] | None:
        value = self.values.get(key)
        if value is None or self.is_auto(key):
            return None
        if not isinstance(value, Mapping):
            self.error(key, f"must be a dict{hint}", TypeError)
            return None
        return value
