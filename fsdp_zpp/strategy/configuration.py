"""Strategies from mappings, and from DeepSpeed's configuration."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar

from fsdp_zpp.codecs import NAMED, NF4, AsStored, Codec, FrozenName, Int4, Int4Delta, Int8
from fsdp_zpp.names import REMOVED, did_you_mean

from .error_feedback import LoCo
from .local_steps import Elastic, LocalSteps

# ---- strategy arguments
#
# The arguments of a strategy as a dict, which presets override and configuration files give.


class StrategyArguments(TypedDict, total=False):
    """Keyword arguments of ``Strategy``, which describes them; each may be missing."""

    levels: str
    weights: Codec | None
    gradients: Codec | None
    intra_gradients: Codec | Literal["auto"] | None
    error_feedback: LoCo | None
    frozen: Codec | FrozenName | None
    local_steps: LocalSteps | None
    gpus_per_node: int | None
    overrides: Mapping[str, Any] | tuple[tuple[str, Any], ...]


# ---- names
#
# Codecs by name, for configuration files and command lines: ``int8``, ``int8:256``, ``int4``, ``int4delta``, ``nf4``.
#
# A name may be followed by the codec's block, as in ``int8:256``. ``as stored`` and ``auto`` are for frozen weights:
# the codes that they have, and no codec, or ``int8``, for weights in full precision.
#
# A mapping names each argument of a codec: ``{codec: int4delta, block: 256, whole: int8:128}``.

_Named = Int8 | Int4 | Int4Delta | NF4
CODECS: dict[str, type[_Named]] = {"int8": Int8, "int4": Int4, "int4delta": Int4Delta, "nf4": NF4}


def codec_from_name(value: object) -> Codec | None:
    """Return the codec of a configuration: a name, with a block (``int8:256``) or without, a mapping, or a codec."""
    if value is None or isinstance(value, Codec):
        return value
    if isinstance(value, Mapping):
        return _from_mapping(dict(value))
    if not isinstance(value, str):
        raise TypeError(f"a codec is a name such as 'int8:256', a mapping such as {{codec: int8}}, or none: {value!r}")
    if value == "none":
        return None
    if value in NAMED:
        return NAMED[value]
    name, has_block, block = value.partition(":")
    cls = _class_of(name)
    if not has_block:
        return cls()
    if ":" in block:
        raise ValueError(f"{value!r} is not a codec: {name} takes block alone, as in 'int8:256'")
    try:
        numel = int(block)
    except ValueError:
        raise ValueError(f"{value!r} is not a codec: a block is a number, as in 'int8:256'") from None
    return cls(block=numel)


def name_of_codec(codec: Codec) -> str | dict[str, object]:
    """Return the name or mapping that :func:`codec_from_name` reads as ``codec``, one of the library's."""
    if isinstance(codec, AsStored):
        return codec.name
    name = next((name for name, cls in CODECS.items() if cls is type(codec)), None)
    if name is None:
        raise TypeError(f"{codec!r} has no name; those with names are {', '.join(CODECS)}")
    arguments = {field.name: getattr(codec, field.name) for field in dataclasses.fields(CODECS[name])}
    brief = f"{name}:{arguments['block']}"
    if codec_from_name(brief) == codec:
        return brief
    others = {key: value for key, value in arguments.items() if key != "block"}
    codecs = {key: name_of_codec(value) if isinstance(value, Codec) else value for key, value in others.items()}
    return {"codec": name, "block": arguments["block"]} | codecs


def _class_of(name: object) -> type[_Named]:
    if name == "topk":
        raise ValueError(f"'topk' is not a codec any more: {REMOVED['TopK']}")
    if not isinstance(name, str) or name not in CODECS:
        hint = did_you_mean(name, ["none", *CODECS], before="; ")
        raise ValueError(f"{name!r} is not a codec; allowed are none, {', '.join(CODECS)}{hint}")
    return CODECS[name]


def _from_mapping(values: dict[str, Any]) -> Codec:
    if "codec" not in values:
        raise ValueError(f"{values!r} does not say which codec it is: add 'codec', one of {', '.join(CODECS)}")
    cls = _class_of(values.pop("codec"))
    known = [field.name for field in dataclasses.fields(cls)]
    for key in values:
        if key not in known:
            hint = did_you_mean(key, known, before="; ")
            raise ValueError(f"{key!r} is not an argument of {cls.__name__}, which takes {', '.join(known)}{hint}")
    if "whole" in values:
        values["whole"] = codec_from_name(values["whole"])
    return cls(**values)


# ---- mapping
#
# A strategy as a mapping, the form it has in YAML and JSON.
#
# strategy: zeropp                    the name of a preset
#
# strategy:                           or a preset and what is different, or no preset at all
#   preset: zeropp
#   levels: IIG
#   weights: int8:256                 see ``codec_from_name``
#   error_feedback: {hops: both, dtype: int8}
#   frozen: nf4
#   local_steps: {every: 64, codec: int4:128}
#   gpus_per_node: 8
#   overrides: {"*Experts": {preset: zeropp, weights: int4delta}}

# The names of the class methods of Strategy that make one.
PRESETS = ("zeropp", "mixzpp", "loco", "zero1", "zero2", "zero3", "mics", "diloco")

_CODECS = ("weights", "gradients", "intra_gradients", "frozen")
_KEYS = ("preset", "levels", *_CODECS, "error_feedback", "local_steps", "gpus_per_node", "overrides")

S = TypeVar("S")
T = TypeVar("T")
C = TypeVar("C", LoCo, LocalSteps, Elastic)
Readers = Mapping[str, Callable[[str, Any], object]]


def arguments_from_mapping(values: object, read_strategy: Callable[[Any], object]) -> tuple[str | None, dict[str, Any]]:
    """Return the preset and the keyword arguments of the Strategy in a mapping, which may be the name of a preset.

    ``read_strategy`` makes a strategy of such a mapping, for the overrides. Errors name the key.
    """
    if isinstance(values, str):
        values = {"preset": values}
    if not isinstance(values, Mapping):
        raise TypeError(f"a strategy is the name of a preset ({', '.join(PRESETS)}) or a mapping, got {values!r}")
    _check_known("", values, _KEYS)
    preset = values.get("preset")
    if preset is not None and preset not in PRESETS:
        hint = did_you_mean(preset, PRESETS, before="; ")
        raise ValueError(f"preset: {preset!r} is not known; allowed are {', '.join(PRESETS)}{hint}")
    arguments = {key: value for key, value in values.items() if key != "preset"}
    readers: Readers = {key: _codec for key in _CODECS if arguments.get(key) != "auto" or key != "intra_gradients"}
    _read_all({**readers, "error_feedback": _error_feedback, "local_steps": _local_steps}, arguments)
    overrides = arguments.pop("overrides", None)
    if isinstance(overrides, Mapping):
        overrides = {pattern: _at(f"overrides.{pattern}", read_strategy, each) for pattern, each in overrides.items()}
    if overrides is not None:
        arguments["overrides"] = overrides
    return preset, arguments


def mapping_from_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping, of strings, numbers and dicts, that :func:`arguments_from_mapping` reads as ``arguments``."""
    mapping = dict(arguments)
    for key in _CODECS:
        if mapping.get(key) is not None and not isinstance(mapping[key], str):
            mapping[key] = _at(key, name_of_codec, mapping[key])
    mapping["error_feedback"] = _fields_of(mapping.get("error_feedback"), "error_feedback")
    if (local_steps := _fields_of(mapping.get("local_steps"), "local_steps")) is not None:
        local_steps["error_feedback"] = _fields_of(local_steps["error_feedback"], "local_steps.error_feedback")
        local_steps["elastic"] = _fields_of(local_steps["elastic"], "local_steps.elastic")
        mapping["local_steps"] = local_steps
    mapping["overrides"] = {pattern: strategy.to_dict() for pattern, strategy in mapping["overrides"]}
    return mapping


def _fields_of(value: LoCo | LocalSteps | Elastic | None, key: str) -> dict[str, Any] | None:
    if value is None:
        return None
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    for name, each in fields.items():
        if isinstance(each, Codec):
            fields[name] = _at(f"{key}.{name}", name_of_codec, each)
    return fields


def source_of(arguments: Mapping[str, object]) -> str:
    return f"Strategy({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


# Readers take the key of a value, with which their errors begin, and the value.


def _codec(key: str, value: object) -> Codec | None:
    return _at(key, codec_from_name, value)


def _error_feedback(key: str, value: object) -> LoCo | None:
    return _made_of(LoCo, key, value, {"dtype": _codec})


def _elastic(key: str, value: object) -> Elastic | None:
    if value is True:
        raise TypeError("local_steps.elastic: must be false or a mapping with max_nodes, got True")
    return _made_of(Elastic, key, value, {})


def _local_steps(key: str, value: object) -> LocalSteps | None:
    readers: Readers = {"codec": _codec, "error_feedback": _error_feedback, "elastic": _elastic}
    return _made_of(LocalSteps, key, value, readers)


def _made_of(kind: type[C], key: str, value: object, readers: Readers) -> C | None:
    """Return the ``kind`` with the arguments in a mapping, some of them read; None, or a ``kind``, as it is."""
    if value is None or value is False or isinstance(value, kind):
        return value or None
    if value is True:
        value = {}  # the defaults
    if not isinstance(value, Mapping):
        raise TypeError(f"{key}: must be true, false or a mapping of {kind.__name__}'s arguments, got {value!r}")
    _check_known(f"{key}.", value, [field.name for field in dataclasses.fields(kind)])
    arguments: dict[str, Any] = dict(value)
    _read_all(readers, arguments, f"{key}.")
    return _at(key, lambda given: kind(**given), arguments)


def _read_all(readers: Readers, arguments: dict[str, Any], prefix: str = "") -> None:
    for name, read in readers.items():
        if name in arguments:
            arguments[name] = read(f"{prefix}{name}", arguments[name])


def _check_known(prefix: str, values: Iterable[object], known: Iterable[str]) -> None:
    allowed = list(known)
    for key in values:
        if key not in allowed:
            hint = did_you_mean(key, allowed, f"{prefix}{{}}") or f"allowed are {', '.join(allowed)}"
            raise ValueError(f"{prefix}{key}: unknown key; {hint}")


def _at(key: str, read: Callable[[S], T], value: S) -> T:
    """Return ``read(value)``; its errors begin with ``key``."""
    try:
        return read(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{key}: {error}") from None


# ---- section
#
# Reading a DeepSpeed configuration: the file and its sections, whose errors name keys by their full path.
#
# All errors of a configuration are raised at once: users would otherwise correct one key a launch.


def load(config: Mapping[str, object] | str | os.PathLike[str]) -> Mapping[str, object]:
    """Return the configuration, read from its file, in plain JSON, if it is a path."""
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
    values = dict(pairs)
    if len(values) < len(pairs):  # json would silently keep the last value
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate keys: {', '.join(sorted({key for key in keys if keys.count(key) > 1}))}")
    return values


@dataclass(frozen=True)
class ConfigurationIssues:
    """Errors of a configuration, and keys that DeepSpeed ignores in it, under which setting, with a remedy."""

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
    """One section of a configuration, or its top level, whose ``prefix`` is empty. A key that is null is not set.

    Methods add errors to ``findings`` and go on, with a default where they return a value.
    """

    prefix: str
    values: Mapping[str, object]
    findings: ConfigurationIssues

    def inner(self, key: str, hint: str = "") -> Section:
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
        if self.values.get(key) == "auto":  # an error, too
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


# ---- keys
#
# DeepSpeed's configuration keys that decide no strategy, and how each is treated.
#
# A key that only tunes DeepSpeed's own machinery is *without effect* and is logged. A key for which every training
# script has a line of its own is *the script's* and is logged with that line. A key that changes the result, whose
# absence nobody would notice until the loss differs, is *refused* unless it is switched off.
#
# The names are those of DeepSpeed 0.19, including aliases.


@dataclass(frozen=True)
class Refused:
    """A key that raises, unless it is switched off or has one of the ``neutral`` values, which change nothing."""

    reason: str
    neutral: tuple[object, ...] = ()

    def is_off(self, value: object) -> bool:
        if isinstance(value, Mapping):
            return not value or value.get("enabled") is False or value in self.neutral
        # Equality alone would take true for 1.
        return value is None or value is False or (not isinstance(value, bool) and value in self.neutral)


_STAGE_3_ALIASES = """
    prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters max_reuse_distance
    module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential partition_stream_chunk_size
""".split()

ZERO_WITHOUT_EFFECT = frozenset(
    """
    allgather_bucket_size allgather_partitions contiguous_gradients cpu_offload_use_pin_memory elastic_checkpoint
    enable_sanity_checks ignore_unused_parameters legacy_stage1 load_from_fp32_weights log_trace_cache_warnings
    memory_efficient_linear mics_hierarchical_params_gather overlap_comm override_module_apply
    pipeline_loading_checkpoint reduce_bucket_size reduce_scatter round_robin_gradients
    save_muon_momentum_buffer_in_memory sub_group_size use_multi_rank_bucket_allreduce
    """.split()
    + _STAGE_3_ALIASES
    + [f"stage3_{name}" for name in _STAGE_3_ALIASES]
)

OFFLOAD_KEYS = frozenset(
    """
    buffer_count buffer_size convert_grad_on_cpu cpuadam_cores_perc device fast_init max_in_cpu nvme_path pin_memory
    pipeline_read pipeline_write ratio super_offload
    """.split()
)

ZERO_SCRIPT = {
    "gather_16bit_weights_on_model_save": "a full state dict",
    "stage3_gather_16bit_weights_on_model_save": "a full state dict",
    "stage3_gather_fp16_weights_on_model_save": "a full state dict",
    "leaf_module": "auto_wrap_policy",
}
ZERO_REFUSED = {"zenflow": Refused("it asks for another optimizer step, which FSDP does not have; remove it")}

TOP_WITHOUT_EFFECT = frozenset(
    """
    aio allgather_size autotuning comet comms_logger csv_monitor datastates disable_allgather dump_state flops_profiler
    gradient_predivide_factor graph_harvesting log_level memory_breakdown nebula prescale_gradients
    seq_parallel_comm_data_type steps_per_print tensorboard timers
    use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    """.split()
)

TOP_SCRIPT = {
    "activation_checkpointing": "apply_activation_checkpointing",
    "amp": "MixedPrecision",
    "bf16": "MixedPrecision",
    "bfloat16": "MixedPrecision",
    "checkpoint": "torch.distributed.checkpoint",
    "compile": "torch.compile",
    "data_types": "MixedPrecision",
    "dataloader_drop_last": "DataLoader",
    "fp16": "MixedPrecision and a gradient scaler",
    "gradient_accumulation_steps": "no_sync",
    "gradient_clipping": "clip_grad_norm_",
    "hybrid_engine": "summon_full_params around generate",
    "managed_gradient_accumulation": "no_sync",
    "optimizer": "torch.optim",
    "scheduler": "torch.optim.lr_scheduler",
    "torch_autocast": "torch.autocast",
    "train_batch_size": "DataLoader",
    "train_micro_batch_size_per_gpu": "DataLoader",
}

_MESH = (
    "a strategy shards over data-parallel ranks only; build that mesh yourself, pass FSDP the data-parallel group, "
    "and remove it"
)
_DATA = "it changes the training data; change the data in your data loader, and remove it"
_MODEL = "it changes the model itself; change the model in your script, and remove it"

TOP_REFUSED = {
    "communication_data_type": Refused(
        "FSDP takes it as MixedPrecision(reduce_dtype=...), whose default differs; set it there, and remove it"
    ),
    "compression_training": Refused(_MODEL),
    "curriculum_learning": Refused(_DATA),
    "data_efficiency": Refused(_DATA),
    "eigenvalue": Refused(_MODEL),
    "elasticity": Refused("it decides the batch sizes; set them in your script, and remove it"),
    "expert_parallel": Refused(_MESH),
    "gradient_allreduce_op": Refused(
        "a strategy reduces to the mean over all ranks; multiply the loss by the world size, and remove it", ("mean",)
    ),
    "pipeline": Refused(_MESH),
    "progressive_layer_drop": Refused(_MODEL),
    "quantize_training": Refused(_MODEL),
    "sequence_parallel_size": Refused(_MESH, (1,)),
    "sparse_attention": Refused(_MODEL),
    "sparse_gradients": Refused("FSDP reduces dense gradients; use Embedding(sparse=False), and remove it"),
    "tensor_parallel": Refused(_MESH, ({"autotp_size": 0}, {"autotp_size": 1})),
    "weight_quantization": Refused(_MODEL),
}


# ---- place
#
# Place of the states in a DeepSpeed configuration: its stage or PaRO's name for one, hpZ's groups and MiCS's.

_STAGES = ("NNN", "NNG", "NGG", "GGG")  # the index is the stage
STAGE_3 = "ZeRO stage 3"
_PARO = ("NII", "NIG", "ING", "IIG", "IGG")  # those that PaRO's branch of DeepSpeed has a name for
PLACE_KEYS = ("stage", "paro_strategy", "zero_hpz_partition_size", "mics_shard_size")


class Place(NamedTuple):
    """The place of the states, and the engine of DeepSpeed that would put them there."""

    levels: str
    engine: str
    gpus_per_node: int | None = None

    def arguments(self) -> StrategyArguments:
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


# ---- arguments
#
# A DeepSpeed configuration, read as the arguments of a Strategy.
#
# The strategy is the one that DeepSpeed would run, not the one that the keys might suggest: DeepSpeed honours ZeRO++'s
# keys only under its stage 3 and ignores them elsewhere. Frameworks write them there, too, so a warning names them and
# what would honour them. This module skips no key: it translates, logs or refuses each.
#
# Differences from DeepSpeed:
#
# - This library's codecs are finer at the same number of bits: 256 values (weights) or 128 (gradients) share a scale.
#   In DeepSpeed, up to 16,000 values of a weight gather do, and as many values of a gradient as the shorter side of its
#   matrix has.
# - The size of hpZ's groups becomes ``gpus_per_node`` for both collectives; DeepSpeed's gradient reduction takes the
#   visible devices as a node. If hpZ's groups are nodes, as DeepSpeed advises, the two agree.
# - DeepSpeed quantizes only frozen weights of more than 500,000 values, and resets LoCo's errors tensor by tensor.

logger = logging.getLogger("fsdp_zpp")

# DeepSpeed reduces gradients in 4 bits on both hops, where intra_gradients="auto" would take 8 on the intra-node hop.
_CODEC_ARGUMENTS: dict[str, StrategyArguments] = {
    "zero_quantized_weights": {"weights": Int8(256)},
    "zero_quantized_gradients": {"gradients": Int4(128), "intra_gradients": Int4(128)},
    "zero_quantized_nontrainable_weights": {"frozen": "auto"},
}
_OFFLOADS = ("offload_param", "offload_optimizer", "cpu_offload_param", "cpu_offload")
_ZERO_KEYS = (
    {*PLACE_KEYS, *_CODEC_ARGUMENTS, "zeropp_loco_param", *_OFFLOADS}
    | ZERO_WITHOUT_EFFECT
    | ZERO_SCRIPT.keys()
    | ZERO_REFUSED.keys()
)
_TOP_KEYS = {"zero_optimization"} | TOP_WITHOUT_EFFECT | TOP_SCRIPT.keys() | TOP_REFUSED.keys()


def strategy_arguments(config: Mapping[str, object] | str | os.PathLike[str]) -> StrategyArguments:
    """Return the arguments of the Strategy that ``config`` asks for, without defaults. Log the keys left to others.

    An error names all keys that are unknown, can't be honoured, contradict each other or have the wrong type.
    """
    findings = ConfigurationIssues()
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
    for ignored in findings.ignored:
        logger.warning(
            "the DeepSpeed configuration has %s, which DeepSpeed ignores %s, so it is ignored here; %s", *ignored
        )
    _log(arguments, top, zero)
    return arguments


def _codecs(zero: Section, place: Place) -> StrategyArguments:
    keys = [key for key in _CODEC_ARGUMENTS if zero.flag(key)]
    arguments: StrategyArguments = {}
    for key in keys:
        arguments |= _CODEC_ARGUMENTS[key]
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
    if zero.values.get("zeropp_loco_param") is None:
        return None
    # As DeepSpeed runs it: err_beta weighs the old error, as beta here, and both hops keep 8-bit errors.
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
    without = [*sorted(zero.values.keys() & ZERO_WITHOUT_EFFECT), *sorted(top.values.keys() & TOP_WITHOUT_EFFECT)]
    script = [f"{key} ({ZERO_SCRIPT[key]})" for key in sorted(zero.values.keys() & ZERO_SCRIPT.keys())]
    script += [f"{key} ({TOP_SCRIPT[key]})" for key in sorted(top.values.keys() & TOP_SCRIPT.keys())]
    parts = [f"DeepSpeed configuration read as {source_of(arguments)}"]
    parts += [f"not part of a strategy, set these in your script: {', '.join(script)}"] if script else []
    parts += [f"without effect under FSDP: {', '.join(without)}"] if without else []
    logger.info("; ".join(parts))
