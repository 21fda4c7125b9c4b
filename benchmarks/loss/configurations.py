"""Configurations of the studies by name: gaps.py and local_gaps.py say how names are made."""

from __future__ import annotations

import re
from typing import Any

from experimental_codecs import Bytewise, Hadamard
from torch.distributed.fsdp import ShardingStrategy

from fsdp_zpp import Int4, Int8, LocalSteps, LoCo, Strategy, TopK

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

_EXCHANGED = {"none": None, "int8": Int8(128), "int4": Int4(128), "topk": TopK()}
_CHANGES = {
    "overlap": ("overlap", int),
    "mix": ("mix", float),
    "outer": ("outer_lr", float),
    "momentum": ("outer_momentum", float),
    "start": ("start", int),
    "moments": ("moments_every", int),
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
    any_changes = r"(?::(?:at-once|momentum-auto|[a-z]+[\d.]+))*"
    parts = re.fullmatch(rf"local(\d+)((?:-\d+-\d+)*):(none|int8|int4|topk)(\+loco)?({any_changes})", name)
    if parts is None:
        raise ValueError(f"{name!r} is unknown; local steps are named like local32:int4+loco:overlap1:mix0.5")
    first, later, codec, feedback, changes = parts.groups()
    numbers = [int(number) for number in later.split("-")[1:]]
    every = ((0, int(first)), *zip(numbers[::2], numbers[1::2], strict=True)) if numbers else int(first)
    # SparseLoCo has errors in place of an outer momentum; others have DiLoCo's, unless the name says otherwise.
    options: dict[str, Any] = {"outer_momentum": 0.9}
    if codec == "topk":
        options = {"outer_lr": 1.0, "outer_momentum": 0.0}
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
            known = ", ".join(("at-once", "momentum-auto", *_CHANGES))
            raise ValueError(f"{name!r} changes {word!r}; what can be changed is {known}")
    if options.get("outer_momentum") == 0:
        options["nesterov"] = False
    loco = LoCo(beta=0, decay=0.95, reset_every=0) if codec == "topk" else LoCo(beta=0.8)
    return LocalSteps(every=every, codec=_EXCHANGED[codec], error_feedback=loco if feedback else None, **options)
