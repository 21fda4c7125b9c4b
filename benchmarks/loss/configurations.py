"""What the studies compare, by name: gaps.py and local_gaps.py say how names are made."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from experimental_codecs import Hadamard, Int2, StochasticInt4
from torch.distributed.fsdp import ShardingStrategy

from fsdp_zpp import Int4, Int8, LocalSteps, LoCo, Strategy

Sharding = Strategy | ShardingStrategy

_INT4: dict[str, Any] = {"gradients": Int4(128), "intra_gradients": Int8(128)}
_INT4X2: dict[str, Any] = {"gradients": Int4(2048), "intra_gradients": Int4(2048)}
_INT4C: dict[str, Any] = {"gradients": Int4(2048), "intra_gradients": Int8(128)}
_INT2: dict[str, Any] = {"gradients": Int2(128), "intra_gradients": Int8(128)}

_GRADIENTS: dict[str, dict[str, Any]] = {
    "int8": {"gradients": Int8(128)},
    "int4": _INT4,
    "int4+loco": _INT4 | {"error_feedback": LoCo(beta=0.8)},
    "int4+loco-beta0": _INT4 | {"error_feedback": LoCo(beta=0.0)},
    "int4+loco-both": _INT4 | {"error_feedback": LoCo(beta=0.8, hops="both")},
    "int4+loco-int8state": _INT4 | {"error_feedback": LoCo(beta=0.8, dtype=Int8(256))},
    "int4+hadamard": _INT4 | {"gradients": Hadamard(Int4(128))},
    "int4+stochastic": _INT4 | {"gradients": StochasticInt4(128)},
    "int4x2": _INT4X2,
    "int4x2+loco": _INT4X2 | {"error_feedback": LoCo(beta=0.8, hops="both")},
    "int4x2+loco-beta0": _INT4X2 | {"error_feedback": LoCo(beta=0.0, hops="both")},
    "int4x2+hadamard": {"gradients": Hadamard(Int4(2048)), "intra_gradients": Hadamard(Int4(2048))},
    "int4c": _INT4C,
    "int4c+loco": _INT4C | {"error_feedback": LoCo(beta=0.8)},
    "int2": _INT2,
    "int2+loco": _INT2 | {"error_feedback": LoCo(beta=0.8)},
    "int2+loco-beta0": _INT2 | {"error_feedback": LoCo(beta=0.0)},
    "int2+hadamard": _INT2 | {"gradients": Hadamard(Int2(128))},
}

# IGG is full_shard with its sums in another order: what it differs by is the noise of the comparison.
NAMES = (
    "full_shard int4 int4+loco int4x2 int4x2+loco int2 int2+loco int4+loco-beta0 int4+hadamard int8 "
    "w8:full_shard w8:int4 w8:int4+loco int4x2+loco-beta0 int2+loco-beta0 int4x2+hadamard int2+hadamard IGG "
    "w8:int4+loco-beta0 w8:int4+hadamard w8:int8 int4+loco-both int4+loco-int8state int4+stochastic "
    "w8:int4x2 w8:int4x2+loco w8:int2 w8:int2+loco w8:int4x2+loco-beta0 w8:int2+loco-beta0 w8:int4x2+hadamard "
    "w8:int2+hadamard w8:int4+loco-both w8:int4+loco-int8state w8:int4+stochastic int4c int4c+loco"
).split()
"""All names of the convergence study, in the order in which they are trained, the most important first."""

_EXCHANGED = {"none": None, "int8": Int8(128), "int4": Int4(128)}
_CHANGES: dict[str, tuple[str, Callable[[str], float]]] = {
    "overlap": ("overlap", int),
    "mix": ("mix", float),
    "outer": ("outer_lr", float),
    "momentum": ("outer_momentum", float),
}


def sharding(name: str, gpus_per_node: int) -> Sharding:
    """What FullyShardedDataParallel is given for the configuration of that name."""
    if name == "full_shard":
        return ShardingStrategy.FULL_SHARD
    if name.startswith("local"):
        return Strategy("III", local_steps=local_steps(name), gpus_per_node=gpus_per_node)
    prefix, _, gradients = name.rpartition(":")
    weights = Int8(256) if prefix == "w8" else None
    encoded = {} if gradients in ("full_shard", "IGG") else _GRADIENTS[gradients]
    return Strategy("IGG", weights=weights, gpus_per_node=gpus_per_node, **encoded)


def local_steps(name: str) -> LocalSteps:
    """What the name of a configuration with local steps says.

    Raises:
        ValueError: If it is none, or LocalSteps doesn't take what it says.
    """
    parts = re.fullmatch(r"local(\d+):(none|int8|int4)(\+loco)?((?::(?:at-once|[a-z]+[\d.]+))*)", name)
    if parts is None:
        raise ValueError(f"{name!r} is unknown; local steps are named like local32:int4+loco:overlap1:mix0.5")
    every, codec, feedback, changes = parts.groups()
    options: dict[str, Any] = {}
    for change in changes.split(":")[1:]:
        word = change.rstrip("0123456789.")
        if change == "at-once":
            options["spread"] = False
        elif word in _CHANGES:
            option, number = _CHANGES[word]
            options[option] = number(change.removeprefix(word))
        else:
            raise ValueError(f"{name!r} changes {word!r}; what can be changed is at-once, {', '.join(_CHANGES)}")
    if options.get("outer_momentum") == 0:
        options["nesterov"] = False
    loco = LoCo(beta=0.8) if feedback else None
    return LocalSteps(every=int(every), codec=_EXCHANGED[codec], error_feedback=loco, **options)
