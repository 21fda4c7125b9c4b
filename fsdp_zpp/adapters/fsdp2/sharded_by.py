"""Which strategy has sharded a parameter, for errors that name it."""

from __future__ import annotations

import dataclasses
from functools import cache

from torch import Tensor

from fsdp_zpp.config.mapping import source_of
from fsdp_zpp.config.strategy import Strategy

MARK = "_fsdp_zpp_sharded"
"""Attribute of a parameter that a strategy has sharded: the strategy, as :func:`as_mark` gives it."""


@cache  # for all layers of a model; a process shards by a few strategies
def as_mark(strategy: Strategy) -> str:
    """Return a strategy as source code: torch.load() takes text with weights_only, and parameters keep attributes."""
    given = {field.name: getattr(strategy, field.name) for field in dataclasses.fields(strategy)}
    defaults = {field.name: field.default for field in dataclasses.fields(strategy)}
    return source_of({name: value for name, value in given.items() if value != defaults[name]})


def sharded_by(parameter: Tensor) -> str | None:
    """Return the strategy that has sharded a parameter, as source code; None if torch alone has, or nothing."""
    return getattr(parameter, MARK, None)
