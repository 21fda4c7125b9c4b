"""Configurations of the studies by name: gaps.py and local_gaps.py say how names are made."""

from __future__ import annotations

import re
from typing import Any

from experimental_codecs import Bytewise, Hadamard
from torch.distributed.fsdp import ShardingStrategy

from fsdp_zpp import Int4, Int8, LocalSteps, LoCo, Strategy

Sharding = Strategy | ShardingStrategy

_FAMILIES: dict[str, dict[str, Any]] = {
    "int8": {"gradients": Int8(128)},
    "int4": {"gradients": Int4(128), "intra_gradients": Int8(128)},
    "int4x2": {"gradients": Int4(2048), "intra_gradients": Int4(2048)},
    "int4c": {"gradients": Int4(2048), "intra_gradients": Int8(128)},
    "int2": {"gradients": Bytewise(128, qmax=1), "intra_gradients": Int8(128)},
}
NAMES = (
    "full_shard int4 int4+loco int4x2 int4x2+loco int2 int2+loco int4+loco-beta0 int4+hadamard int8 "
    "w8:full_shard w8:int4 w8:int4+loco int4x2+loco-beta0 int4x2+hadamard w8:int4+loco-beta0 w8:int4+hadamard w8:int8 "
    "int4+stochastic w8:int4x2 w8:int4x2+loco w8:int4x2+loco-beta0 int4c int4c+loco"
).split()
"""All names of the convergence study, in the order in which they are trained, the most important first."""

_EXCHANGED = {"none": None, "int8": Int8(128), "int4": Int4(128)}
_CHANGES = {
    "overlap": ("overlap", int),
    "mix": ("mix", float),
    "outer": ("outer_lr", float),
    "momentum": ("outer_momentum", float),
}


def sharding(name: str, gpus_per_node: int) -> Sharding:
    """Return the sharding strategy for FullyShardedDataParallel under the configuration of that name."""
    if name == "full_shard":
        return ShardingStrategy.FULL_SHARD
    if name.startswith("local"):
        return Strategy("III", local_steps=local_steps(name), gpus_per_node=gpus_per_node)
    prefix, _, gradients = name.rpartition(":")
    weights = Int8(256) if prefix == "w8" else None
    encoded = {} if gradients == "full_shard" else _encoded(*gradients.partition("+")[::2])
    return Strategy("IGG", weights=weights, gpus_per_node=gpus_per_node, **encoded)


def _encoded(family: str, change: str) -> dict[str, Any]:
    """Return the codecs of a family of the convergence study with one change."""
    codecs = _FAMILIES[family]
    is_coarse_inside = family == "int4x2"
    if change.startswith("loco"):
        hops = "both" if is_coarse_inside else "inter"
        return codecs | {"error_feedback": LoCo(beta=0.0 if change == "loco-beta0" else 0.8, hops=hops)}
    if change == "hadamard":
        coarse = ("gradients", "intra_gradients") if is_coarse_inside else ("gradients",)
        return codecs | {name: Hadamard(codecs[name]) for name in coarse}
    return codecs | ({"gradients": Bytewise(128, qmax=7, stochastic=True)} if change == "stochastic" else {})


def local_steps(name: str) -> LocalSteps:
    """Return the local steps that a configuration's name describes.

    Raises:
        ValueError: If it describes none, or LocalSteps refuses them.
    """
    parts = re.fullmatch(r"local(\d+):(none|int8|int4)(\+loco)?((?::(?:at-once|momentum-auto|[a-z]+[\d.]+))*)", name)
    if parts is None:
        raise ValueError(f"{name!r} is unknown; local steps are named like local32:int4+loco:overlap1:mix0.5")
    every, codec, feedback, changes = parts.groups()
    options: dict[str, Any] = {}
    for change in changes.split(":")[1:]:
        word = change.rstrip("0123456789.")
        if change == "at-once":
            options["spread"] = False
        elif change == "momentum-auto":
            options["outer_momentum"] = "auto"
        elif word in _CHANGES:
            option, number = _CHANGES[word]
            options[option] = number(change.removeprefix(word))
        else:
            changes_known = ", ".join(("at-once", "momentum-auto", *_CHANGES))
            raise ValueError(f"{name!r} changes {word!r}; what can be changed is {changes_known}")
    if options.get("outer_momentum") == 0:
        options["nesterov"] = False
    loco = LoCo(beta=0.8) if feedback else None
    return LocalSteps(every=int(every), codec=_EXCHANGED[codec], error_feedback=loco, **options)
