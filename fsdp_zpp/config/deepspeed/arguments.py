"""A DeepSpeed configuration, read as the arguments of a Strategy.

The strategy is the one that DeepSpeed would run, not the one that the keys might suggest: DeepSpeed honours ZeRO++'s
keys only under its stage 3 and ignores them elsewhere. Frameworks write them there, too, so a warning names them and
what would honour them. This module skips no key: it translates, logs or refuses each.

Differences from DeepSpeed:

- This library's codecs are finer at the same number of bits: 256 values (weights) or 128 (gradients) share a scale. In
  DeepSpeed, up to 16,000 values of a weight gather do, and as many values of a gradient as the shorter side of its
  matrix has.
- The size of hpZ's groups becomes ``gpus_per_node`` for both collectives; DeepSpeed's gradient reduction takes the
  visible devices as a node. If hpZ's groups are nodes, as DeepSpeed advises, the two agree.
- DeepSpeed quantizes only frozen weights of more than 500,000 values, and resets LoCo's errors tensor by tensor.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from fsdp_zpp.codecs.blockwise import Int4, Int8
from fsdp_zpp.config.error_feedback import LoCo
from fsdp_zpp.config.mapping import source_of
from fsdp_zpp.config.strategy_arguments import StrategyArguments

from .keys import (
    OFFLOAD_KEYS,
    TOP_REFUSED,
    TOP_SCRIPT,
    TOP_WITHOUT_EFFECT,
    ZERO_REFUSED,
    ZERO_SCRIPT,
    ZERO_WITHOUT_EFFECT,
)
from .place import PLACE_KEYS, STAGE_3, Place, place_of
from .section import Findings, Section, load

logger = logging.getLogger("fsdp_zpp")

# DeepSpeed reduces gradients in 4 bits on both hops, where intra_gradients="auto" would take 8 on the intra-node hop.
_CODECS: dict[str, StrategyArguments] = {
    "zero_quantized_weights": {"weights": Int8(256)},
    "zero_quantized_gradients": {"gradients": Int4(128), "intra_gradients": Int4(128)},
    "zero_quantized_nontrainable_weights": {"frozen": "auto"},
}
_OFFLOADS = ("offload_param", "offload_optimizer", "cpu_offload_param", "cpu_offload")
_ZERO_KEYS = (
    {*PLACE_KEYS, *_CODECS, "zeropp_loco_param", *_OFFLOADS}
    | ZERO_WITHOUT_EFFECT
    | ZERO_SCRIPT.keys()
    | ZERO_REFUSED.keys()
)
_TOP_KEYS = {"zero_optimization"} | TOP_WITHOUT_EFFECT | TOP_SCRIPT.keys() | TOP_REFUSED.keys()


def strategy_arguments(config: Mapping[str, object] | str | os.PathLike[str]) -> StrategyArguments:
    """Return the arguments of the Strategy that ``config`` asks for. Log in one line what it leaves to others.

    Args:
        config: A DeepSpeed configuration, or the path of one in JSON.

    Returns:
        Keyword arguments, without those that keep their default.

    Raises:
        ValueError: If keys are unknown, can't be honoured or contradict each other; the error names all of them.
        TypeError: If values have the wrong type, and nothing else is wrong; the error names all of them.
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
    place = place_of(zero)
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


def _codecs(zero: Section, place: Place) -> StrategyArguments:
    """Return the codecs and the error feedback, as arguments of a Strategy."""
    keys = [key for key in _CODECS if zero.flag(key)]
    arguments: StrategyArguments = {}
    for key in keys:
        arguments |= _CODECS[key]
    loco = _loco(zero)
    if loco is not None:
        if "gradients" in arguments:
            keys.append("zeropp_loco_param")
            arguments["error_feedback"] = loco
        else:
            remedy = "set zero_quantized_gradients to true to have it, or remove it"
            zero.ignored(["zeropp_loco_param"], "where gradients are not quantized", remedy)
    if keys and place.engine != STAGE_3:
        written = source_of(place.arguments() | arguments)
        zero.ignored(keys, f"under {place.engine}", f"write {written} to quantize, or remove it")
        return {}
    return arguments


def _loco(zero: Section) -> LoCo | None:
    """Return LoCo as DeepSpeed runs it: err_beta weighs the old error, as beta here; both hops keep 8-bit errors."""
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
            device: object = "cpu" if zero.flag(key) else "none"
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
