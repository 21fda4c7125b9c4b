"""A DeepSpeed configuration, read as the arguments of a Strategy.

The strategy is the one that DeepSpeed would run, not the one that the keys might suggest: DeepSpeed honours ZeRO++'s
keys only under its stage 3 and ignores them elsewhere. Frameworks write them there, too, so a warning names them, with
what would honour them. This module passes over no key: it translates, logs or refuses each.

Differences from DeepSpeed:

- Our codecs are finer at the same number of bits: 256 values (weights) or 128 (gradients) share a scale. In DeepSpeed,
  up to 16,000 values of a weight gather do, and as many values of a gradient as the shorter side of its matrix has.
- The size of hpZ's groups becomes ``gpus_per_node`` for both collectives; DeepSpeed's gradient reduction takes the
  visible devices as a node. If hpZ's groups are nodes, as DeepSpeed advises, the two agree.
- DeepSpeed quantizes only frozen weights of more than 500,000 values, and resets LoCo's errors tensor by tensor.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.codecs.blockwise import Int4, Int8

from .deepspeed_keys import (
    OFFLOAD_KEYS,
    TOP_REFUSED,
    TOP_SCRIPT,
    TOP_WITHOUT_EFFECT,
    ZERO_REFUSED,
    ZERO_SCRIPT,
    ZERO_WITHOUT_EFFECT,
)
from .deepspeed_section import Findings, Section, load
from .error_feedback import LoCo
from .mapping import source_of

logger = logging.getLogger("fsdp_zpp")

_STAGES = ("NNN", "NNG", "NGG", "GGG")  # the index is the stage
_STAGE_3 = "ZeRO stage 3"
_PARO = ("NII", "NIG", "ING", "IIG", "IGG")  # those that PaRO's branch of DeepSpeed has a name for
# DeepSpeed reduces gradients in 4 bits on both hops, where intra_gradients="auto" would take 8 inside a node.
_CODECS: dict[str, dict[str, Codec]] = {
    "zero_quantized_weights": {"weights": Int8(256)},
    "zero_quantized_gradients": {"gradients": Int4(128), "intra_gradients": Int4(128)},
    "zero_quantized_nontrainable_weights": {"frozen": Int8(256)},
}
_OFFLOADS = ("offload_param", "offload_optimizer", "cpu_offload_param", "cpu_offload")
_WHERE = ("stage", "paro_strategy", "zero_hpz_partition_size", "mics_shard_size")
_ZERO_KEYS = (
    {*_WHERE, *_CODECS, "zeropp_loco_param", *_OFFLOADS}
    | ZERO_WITHOUT_EFFECT
    | ZERO_SCRIPT.keys()
    | ZERO_REFUSED.keys()
)
_TOP_KEYS = {"zero_optimization"} | TOP_WITHOUT_EFFECT | TOP_SCRIPT.keys() | TOP_REFUSED.keys()


def strategy_arguments(config: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """The arguments of the Strategy that ``config`` asks for. Logs in one line what it leaves to others.

    Args:
        config: A DeepSpeed configuration, or the path of one in JSON.

    Returns:
        Keyword arguments, without those that keep their default.

    Raises:
        ValueError: If keys are unknown, can't be honoured or contradict each other; the error names all of them.
        TypeError: If values have the wrong type, and nothing else is wrong; likewise.
        OSError: If the file can't be read.
    """
    findings = Findings()
    top = Section("", load(config), findings)
    top.check_known(_TOP_KEYS, inside=_ZERO_KEYS)
    zero = top.inner("zero_optimization", '; DeepSpeed\'s old true is {"stage": 1}')
    zero.check_known(_ZERO_KEYS, outside=_TOP_KEYS)
    top.refuse(TOP_REFUSED)
    zero.refuse(ZERO_REFUSED)
    _refuse_offload(zero)
    place = _place(zero)
    arguments = place.arguments() | _codecs(zero, place)
    findings.check()
    for keys, under, remedy in findings.ignored:
        logger.warning(
            "the DeepSpeed configuration has %s, which DeepSpeed ignores %s, so it is ignored here; %s",
            keys,
            under,
            remedy,
        )
    _log(arguments, top, zero)
    return arguments


@dataclass(frozen=True)
class _Place:
    """Where the states live, and the engine of DeepSpeed that would place them there."""

    levels: str
    engine: str
    gpus_per_node: int | None = None

    def arguments(self) -> dict[str, Any]:
        size = {} if self.gpus_per_node is None else {"gpus_per_node": self.gpus_per_node}
        return {"levels": self.levels, **size}


def _place(zero: Section) -> _Place:
    """The scopes, from the stage or PaRO's name and the two group sizes that stage 3 takes."""
    place = _stage_or_paro(zero)
    # The defaults switch both off: a group of one rank keeps nothing, and MiCS takes -1 for no.
    secondary = zero.number("zero_hpz_partition_size", default=1, least=0)
    mics = zero.number("mics_shard_size", default=-1, least=-1)
    asked = {"zero_hpz_partition_size": secondary > 1, "mics_shard_size": mics > 0}
    for key, is_on in asked.items():
        if is_on and place.engine != _STAGE_3:
            zero.ignored([key], f"under {place.engine}", "set stage to 3 to have it, or remove it")
    if place.engine != _STAGE_3:
        return place
    if all(asked.values()):
        zero.ignored(["zero_hpz_partition_size"], "beside mics_shard_size", "remove one of the two")
    if asked["mics_shard_size"]:
        return _Place("III", "MiCS", mics)
    return _Place("IGG", _STAGE_3, secondary) if asked["zero_hpz_partition_size"] else place


def _stage_or_paro(zero: Section) -> _Place:
    stage = zero.number("stage", default=0, least=0)
    if zero.values.get("stage", stage) is None:  # which would train without ZeRO
        zero.error("stage", "must be a whole number", TypeError)
    if stage >= len(_STAGES):
        zero.error("stage", "must be 0, 1, 2 or 3")
        stage = 0
    name = zero.values.get("paro_strategy")
    if name is None:
        return _Place(_STAGES[stage], f"ZeRO stage {stage}")
    if name not in _PARO and name not in _STAGES[1:]:
        known = ", ".join(_STAGES[1:] + _PARO)
        zero.error("paro_strategy", f"must be one of {known}; for other scopes, write Strategy(letters)")
    elif zero.values.get("stage") is not None and _STAGES[stage] != name:
        zero.error("paro_strategy", f"contradicts stage={stage}, which is {_STAGES[stage]}; remove one of the two")
    return _Place(name, f"ZeRO stage {_STAGES.index(name)}" if name in _STAGES else f"PaRO's {name}")


def _codecs(zero: Section, place: _Place) -> dict[str, Any]:
    """The codecs and the error feedback, as arguments of a Strategy."""
    asked = [key for key in _CODECS if zero.flag(key)]
    arguments: dict[str, Any] = {name: codec for key in asked for name, codec in _CODECS[key].items()}
    loco = _loco(zero)
    if loco is not None:
        if "gradients" in arguments:
            asked.append("zeropp_loco_param")
            arguments["error_feedback"] = loco
        else:
            remedy = "set zero_quantized_gradients to true to have it, or remove it"
            zero.ignored(["zeropp_loco_param"], "where gradients are not quantized", remedy)
    if asked and place.engine != _STAGE_3:
        written = source_of(place.arguments() | arguments)
        zero.ignored(asked, f"under {place.engine}", f"write {written} to quantize, or remove it")
        return {}
    return arguments


def _loco(zero: Section) -> LoCo | None:
    """LoCo as DeepSpeed runs it: err_beta weighs the old error, as our beta does, and both hops keep 8-bit errors."""
    if zero.values.get("zeropp_loco_param") is None:
        return None
    section = zero.inner("zeropp_loco_param")
    section.check_known(("err_beta", "reset_T"))
    beta = section.values.get("err_beta")
    if beta is None or section.is_auto("err_beta"):
        beta = 0.8
    elif isinstance(beta, bool) or not isinstance(beta, int | float):
        section.error("err_beta", "must be a number", TypeError)
        beta = 0.8
    # 0 means never in our LoCo, but resets at every step in DeepSpeed.
    reset_every = section.number("reset_T", default=1024, least=1)
    try:
        return LoCo(beta=beta, reset_every=reset_every, hops="both", dtype=Int8(256))
    except ValueError as error:  # LoCo names its own argument, but the reader knows DeepSpeed's key
        section.error("err_beta", str(error))
        return None


def _refuse_offload(zero: Section) -> None:
    for key in _OFFLOADS:
        if zero.values.get(key) is None:
            continue
        if key.startswith("cpu_"):  # older keys, which are true or false
            device = "cpu" if zero.flag(key) else "none"
        else:
            section = zero.inner(key)
            section.check_known(OFFLOAD_KEYS)
            device = "none" if section.is_auto("device") else section.values.get("device") or "none"
        if device == "none":
            continue
        cause = "FSDP offloads parameters, gradients and the optimizer step together, by its own argument"
        if device != "cpu":
            cause = f"FSDP has no device {device!r} to offload to, only cpu"
        zero.error(
            key,
            f"can't be honoured: {cause}; pass cpu_offload=CPUOffload(offload_params=True) to "
            "FullyShardedDataParallel, or offload_policy=CPUOffloadPolicy() to fully_shard, and remove it",
        )


def _log(arguments: Mapping[str, object], top: Section, zero: Section) -> None:
    without = sorted(key for key in zero.values if key in ZERO_WITHOUT_EFFECT)
    without += sorted(key for key in top.values if key in TOP_WITHOUT_EFFECT)
    script = [f"{key} ({ZERO_SCRIPT[key]})" for key in sorted(zero.values) if key in ZERO_SCRIPT]
    script += [f"{key} ({TOP_SCRIPT[key]})" for key in sorted(top.values) if key in TOP_SCRIPT]
    parts = [f"DeepSpeed configuration read as {source_of(arguments)}"]
    parts += [f"not part of a strategy, set these in your script: {', '.join(script)}"] if script else []
    parts += [f"without effect under FSDP: {', '.join(without)}"] if without else []
    logger.info("; ".join(parts))
