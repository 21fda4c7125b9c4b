"""Place of the states in a DeepSpeed configuration: its stage or PaRO's name for one, hpZ's groups and MiCS's."""

from __future__ import annotations

from dataclasses import dataclass

from ..strategy_arguments import StrategyArguments
from .section import Section

_STAGES = ("NNN", "NNG", "NGG", "GGG")  # the index is the stage
STAGE_3 = "ZeRO stage 3"
_PARO = ("NII", "NIG", "ING", "IIG", "IGG")  # those that PaRO's branch of DeepSpeed has a name for
PLACE_KEYS = ("stage", "paro_strategy", "zero_hpz_partition_size", "mics_shard_size")


@dataclass(frozen=True)
class Place:
    """Place where the states live, and the engine of DeepSpeed that would place them there."""

    levels: str
    engine: str
    gpus_per_node: int | None = None

    def arguments(self) -> StrategyArguments:
        """Return the arguments of a Strategy for this place."""
        levels = StrategyArguments(levels=self.levels)
        return levels if self.gpus_per_node is None else {**levels, "gpus_per_node": self.gpus_per_node}


def place_of(zero: Section) -> Place:
    """Return the place that the stage, or PaRO's name, and stage 3's two group sizes ask for."""
    place = _stage_or_paro(zero)
    # The defaults switch both off: a group of one rank keeps nothing, and MiCS takes -1 for no.
    secondary = zero.number("zero_hpz_partition_size", default=1, least=0)
    mics = zero.number("mics_shard_size", default=-1, least=-1)
    requests = {"zero_hpz_partition_size": secondary > 1, "mics_shard_size": mics > 0}
    for key, is_on in requests.items():
        if is_on and place.engine != STAGE_3:
            zero.ignored([key], f"under {place.engine}", "set stage to 3 to have it, or remove it")
    if place.engine != STAGE_3:
        return place
    if all(requests.values()):
        zero.ignored(["zero_hpz_partition_size"], "beside mics_shard_size", "remove one of the two")
    if requests["mics_shard_size"]:
        return Place("III", "MiCS", mics)
    return Place("IGG", STAGE_3, secondary) if requests["zero_hpz_partition_size"] else place


def _stage_or_paro(zero: Section) -> Place:
    stage = zero.number("stage", default=0, least=0)
    if zero.values.get("stage", stage) is None:  # which would train without ZeRO
        zero.error("stage", "must be a whole number", TypeError)
    if stage >= len(_STAGES):
        zero.error("stage", "must be 0, 1, 2 or 3")
        stage = 0
    name = zero.values.get("paro_strategy")
    if name is None:
        return Place(_STAGES[stage], f"ZeRO stage {stage}")
    if name not in _PARO and name not in _STAGES[1:]:
        known = ", ".join(_STAGES[1:] + _PARO)
        zero.error("paro_strategy", f"must be one of {known}; for other scopes, write Strategy(letters)")
    elif zero.values.get("stage") is not None and _STAGES[stage] != name:
        zero.error("paro_strategy", f"contradicts stage={stage}, which is {_STAGES[stage]}; remove one of the two")
    name = str(name)
    return Place(name, f"ZeRO stage {_STAGES.index(name)}" if name in _STAGES else f"PaRO's {name}")
