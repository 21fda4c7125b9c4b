"""Features that programs may have beyond plain steps, and a switch to leave some out.

A program has none of them, or a few that are drawn first: each then meets others often enough, and a program stays
small. ``FSDP_ZPP_FUZZ_WITHOUT=fused,inference mode`` keeps features out of all programs, to go on past a known fault;
``FSDP_ZPP_FUZZ_ONLY`` names the only ones that programs may have.
"""

from __future__ import annotations

import os
from enum import Enum

from torch.distributed.fsdp import FSDPModule

HAS_UNUSED_FLAG = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
HAS_RESET = hasattr(FSDPModule, "reset_iter_state")
ALL = ("fsdp1", "fsdp1 flat", "fsdp2")
ORIGINAL = ("fsdp1", "fsdp2")
FSDP2 = ("fsdp2",)


class Feature(Enum):
    """A feature: its name in counts and in ``FSDP_ZPP_FUZZ_WITHOUT``, and the adapters that can have it."""

    HALF_PRECISION = "16 bits", ALL
    TWO_DTYPES = "two dtypes in a unit", FSDP2
    FREEZE_WITHIN_STEP = "freezing within a step", ORIGINAL
    FREEZE_BRANCH = "freezing a part of a unit", ORIGINAL
    FREEZE_KEEPING_GRADIENTS = "freezing what has gradients", ORIGINAL
    ZEROS = "gradients set to zeros", ALL
    FUSED = "fused", ALL
    FOREACH = "foreach", ALL
    SCHEDULE_FREE = "schedule-free", ORIGINAL
    SAM = "SAM", ORIGINAL
    LBFGS = "LBFGS", FSDP2
    REPLACED_DATA = "p.data replaced", ("fsdp1",)
    TWO_IN_A_UNIT = "two optimizers in a unit", ORIGINAL
    FROZEN_IN_OPTIMIZER = "frozen parameters in optimizers", ORIGINAL
    ADAPTERS = "adapters off for a reference", ORIGINAL
    OPTIMIZERS_ANEW = "optimizers made anew", ORIGINAL
    SHOWN = "what modules show", ALL
    LOCAL_STEPS = "local steps", ORIGINAL
    COMM_HOOK = "comm hook", ("fsdp1", "fsdp1 flat")
    DIVIDE_FACTOR = "divide factor", FSDP2
    REQUIRES_ALL_REDUCE = "set_requires_all_reduce", FSDP2
    PARTIAL_SYNC = "partial synchronization", FSDP2
    PREFETCH = "prefetch setters", ALL
    RESHARD = "reshard setters", FSDP2
    UNSHARD = "manual unshard", FSDP2
    UNSHARD_ASYNC = "asynchronous unshard", FSDP2
    SEVERAL_FORWARDS = "several forwards", ALL
    RETAIN_GRAPH = "retain_graph", FSDP2
    PIPELINED = "1F1B", FSDP2
    CHECKPOINTING = "checkpointing", ALL
    DIRECT_CALL = "submodule called directly", FSDP2
    INFERENCE = "inference mode", ALL
    NESTED = "nested units", ALL
    LIST = "units of a list", FSDP2
    ROOTLESS = "rootless", ALL
    SEVERAL_STRATEGIES = "several strategies", ALL
    SHARD_1 = "Shard(1)", FSDP2
    OFFLOAD = "offload", FSDP2
    TWO_AXES = "mesh of two axes", ALL
    LOADS_IN_PLACE = "loads in place", FSDP2
    IDLE_WITH_FEEDBACK = "idle parameters with feedback", ORIGINAL
    SECOND_JOB = "second job", ALL

    def __init__(self, title: str, adapters: tuple[str, ...]) -> None:
        self.title = title
        self.adapters = adapters


OTHERS = ("codecs", "other worlds", "gradient law")
"""Kinds of programs, and a check, that can be left out, too."""


def _named(variable: str) -> set[str]:
    names = {name.strip() for name in os.environ.get(variable, "").split(",")} - {""}
    known = [*(feature.title for feature in Feature), *OTHERS]
    if unknown := names - set(known):
        raise ValueError(f"{variable} names {sorted(unknown)}; features are {', '.join(known)}")
    return names


_without = _named("FSDP_ZPP_FUZZ_WITHOUT")
only = _named("FSDP_ZPP_FUZZ_ONLY")
"""The features that ``FSDP_ZPP_FUZZ_ONLY`` names, if any: then every program has some of them and no others."""


def is_left_out(title: str) -> bool:
    """Return whether ``FSDP_ZPP_FUZZ_WITHOUT`` names it."""
    return title in _without


KINDS_OF_PROGRAM = (Feature.LOCAL_STEPS, Feature.COMM_HOOK)
NOT_WITH = {
    "local": {  # the simulation does not know them, nor when roots exchange that a micro-batch leaves out
        *(Feature.SAM, Feature.LBFGS, Feature.ROOTLESS, Feature.DIRECT_CALL),
        *(Feature.SEVERAL_STRATEGIES, Feature.TWO_AXES, Feature.LOADS_IN_PLACE),
    },
    "hook": {Feature.SEVERAL_STRATEGIES, Feature.TWO_AXES},
}
TOGETHER = (
    (Feature.FREEZE_KEEPING_GRADIENTS, Feature.ZEROS, Feature.FUSED),
    (Feature.FREEZE_KEEPING_GRADIENTS, Feature.ZEROS),
    (Feature.FREEZE_WITHIN_STEP, Feature.FREEZE_BRANCH),
    (Feature.ADAPTERS, Feature.FUSED),
    (Feature.ADAPTERS, Feature.OPTIMIZERS_ANEW),
    (Feature.SHOWN, Feature.OPTIMIZERS_ANEW),
    (Feature.FROZEN_IN_OPTIMIZER, Feature.FREEZE_KEEPING_GRADIENTS, Feature.SHOWN),
    (Feature.HALF_PRECISION, Feature.PARTIAL_SYNC),
    (Feature.DIVIDE_FACTOR, Feature.SEVERAL_FORWARDS),
)
"""Features that say more together."""


def choices(adapter: str, flavour: str) -> list[Feature]:
    """Features that a program of an adapter may have beside its kind."""
    out = NOT_WITH.get(flavour, set()) | set(KINDS_OF_PROGRAM)
    out |= set() if flavour == "codecs" else {Feature.IDLE_WITH_FEEDBACK}
    return [
        f
        for f in Feature
        if adapter in f.adapters and f not in out and not is_left_out(f.title) and (not only or f.title in only)
    ]
