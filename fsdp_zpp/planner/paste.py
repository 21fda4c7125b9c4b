"""The line of Python that makes a strategy: the shortest, by a preset where there is one."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from fsdp_zpp.config.mapping import PRESETS
from fsdp_zpp.config.strategy import Strategy


def line_of(strategy: Strategy, gpus_per_node: int | None = None) -> str:
    """Return a line that makes ``strategy``, with its imports.

    Args:
        strategy: The strategy. Its own ``gpus_per_node`` is left out: the launcher, or the machine, tells it.
        gpus_per_node: Node size to pass explicitly.
    """
    call, names = _call(dataclasses.replace(strategy, gpus_per_node=gpus_per_node))
    return f"from fsdp_zpp import {', '.join(sorted({'Strategy', *names}))}; strategy = {call}"


def line_of_torch(name: str) -> str:
    """Return a line with torch's ``ShardingStrategy`` of this name."""
    return f"from torch.distributed.fsdp import ShardingStrategy; strategy = ShardingStrategy.{name}"


def _call(strategy: Strategy) -> tuple[str, set[str]]:
    """Return the shortest call that makes ``strategy``, and the names in it."""
    # Of equally short calls the first is taken: of a quantized base MixZ++'s, of local steps DiLoCo's.
    first = {"mixzpp": strategy.frozen is not None, "diloco": strategy.local_steps is not None}
    names = sorted(PRESETS, key=lambda name: not first.get(name, False))
    calls = [(f"Strategy.{name}", _differences(strategy, getattr(Strategy, name)())) for name in names]
    calls.append(("Strategy", {"levels": strategy.levels} | _differences(strategy, Strategy())))
    return _written(*min(calls, key=lambda call: len(call[1]) - (call[0] == "Strategy")))


def _differences(strategy: Strategy, base: Strategy) -> dict[str, Any]:
    fields = [field.name for field in dataclasses.fields(Strategy)]
    return {name: getattr(strategy, name) for name in fields if getattr(strategy, name) != getattr(base, name)}


def _written(maker: str, arguments: dict[str, Any]) -> tuple[str, set[str]]:
    names: set[str] = set()
    texts = [f"{name}={_value(value, names)}" for name, value in arguments.items()]
    if maker == "Strategy":
        texts[0] = texts[0].removeprefix("levels=")
    return f"{maker}({', '.join(texts)})", names


def _value(value: Any, names: set[str]) -> str:
    """Write a value as Python, without arguments that are its class's defaults; add the classes' names to ``names``."""
    if isinstance(value, str):
        return json.dumps(value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return repr(value)
    names.add(type(value).__name__)
    # Dataclasses of strategies have defaults for all arguments.
    default = type(value)()
    given = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    texts = [f"{name}={_value(each, names)}" for name, each in given.items() if each != getattr(default, name)]
    return f"{type(value).__name__}({', '.join(texts)})"
