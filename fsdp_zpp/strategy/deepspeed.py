"""Strategies from DeepSpeed's configuration.

The strategy is the one that DeepSpeed would run, not the one that the keys might suggest: DeepSpeed honours ZeRO++'s
keys only under its stage 3 and ignores them under other stages. Frameworks write them under any stage, so a warning
names the ignored keys and says how to get their effect. No key is skipped: each is translated, logged or refused.

Differences from DeepSpeed:

- This library's codecs are finer at the same number of bits: 256 values (weights) or 128 (gradients) share a scale.
  In DeepSpeed, up to 16,000 weights do, and as many gradients as the shorter side of their matrix is long.
- The size of hpZ's groups becomes ``gpus_per_node``, for gathers and reductions. In DeepSpeed, the visible devices are
  a node in gradient reductions. The two agree if hpZ's groups are nodes, as DeepSpeed advises.
- DeepSpeed quantizes only frozen weights of more than 500,000 values.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdp_zpp.codecs import Int4, Int8
from fsdp_zpp.names import did_you_mean

from .configuration import StrategyArguments, source_of

logger = logging.getLogger("fsdp_zpp")

# ---- keys
#
# The names are those of DeepSpeed 0.19, including aliases.
#
# A key that only tunes DeepSpeed's own machinery is *without effect* and is logged. A key for a setting of the training
# script, such as its optimizer, is *the script's* and is logged, too. A key that changes the result is *refused* unless
# it is switched off: if it were ignored, nobody would notice until the loss differs.

_STAGE_3_ALIASES = """
    prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters max_reuse_distance
    module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential partition_stream_chunk_size
""".split()

WITHOUT_EFFECT = frozenset(
    """
    aio allgather_size autotuning comet comms_logger csv_monitor datastates disable_allgather dump_state flops_profiler
    gradient_predivide_factor graph_harvesting log_level memory_breakdown nebula prescale_gradients
    seq_parallel_comm_data_type steps_per_print tensorboard timers
    use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    """.split()
)
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

SCRIPT = frozenset(
    """
    activation_checkpointing amp bf16 bfloat16 checkpoint compile data_types dataloader_drop_last fp16
    gradient_accumulation_steps gradient_clipping hybrid_engine managed_gradient_accumulation optimizer scheduler
    torch_autocast train_batch_size train_micro_batch_size_per_gpu
    """.split()
)
ZERO_SCRIPT = frozenset(
    """
    gather_16bit_weights_on_model_save leaf_module stage3_gather_16bit_weights_on_model_save
    stage3_gather_fp16_weights_on_model_save
    """.split()
)

# Refused keys; the values in parentheses change nothing, so they are allowed.
REFUSED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("communication_data_type", "compression_training", "curriculum_learning", "data_efficiency"), ()),
    **dict.fromkeys(("eigenvalue", "elasticity", "expert_parallel", "pipeline", "progressive_layer_drop"), ()),
    **dict.fromkeys(("quantize_training", "sparse_attention", "sparse_gradients", "weight_quantization"), ()),
    "gradient_allreduce_op": ("mean",),
    "sequence_parallel_size": (1,),
    "tensor_parallel": ({"autotp_size": 0}, {"autotp_size": 1}),
}
ZERO_REFUSED: dict[str, tuple[object, ...]] = {"zenflow": (), "zeropp_loco_param": (), "mics_shard_size": (-1, 0)}
_REMEDIES = {
    "communication_data_type": "set reduce_dtype in FSDP's mixed precision",
    "zeropp_loco_param": "write Strategy.loco(...)",
    "mics_shard_size": "write Strategy.mics()",
    **dict.fromkeys(
        ("expert_parallel", "pipeline", "sequence_parallel_size", "tensor_parallel"),
        "build the mesh in your script, and pass FSDP its data-parallel group",
    ),
}

# DeepSpeed reduces gradients in 4 bits on both hops. intra_gradients="auto" would take 8 bits on the intra-node hop.
_CODEC_ARGUMENTS: dict[str, StrategyArguments] = {
    "zero_quantized_weights": {"weights": Int8(256)},
    "zero_quantized_gradients": {"gradients": Int4(128), "intra_gradients": Int4(128)},
    "zero_quantized_nontrainable_weights": {"frozen": "auto"},
}
_STAGES = ("NNN", "NNG", "NGG", "GGG")  # the index is the stage
_OFFLOADS = ("offload_param", "offload_optimizer", "cpu_offload_param", "cpu_offload")
_TOP_KEYS = {"zero_optimization", *WITHOUT_EFFECT, *SCRIPT, *REFUSED}
_ZERO_KEYS = {
    *("stage", "zero_hpz_partition_size", *_CODEC_ARGUMENTS, *_OFFLOADS),
    *(*ZERO_WITHOUT_EFFECT, *ZERO_SCRIPT, *ZERO_REFUSED),
}


# ---- section


def _load(config: Mapping[str, object] | str | os.PathLike[str]) -> Mapping[str, object]:
    """Return the configuration, read from a file of plain JSON if ``config`` is a path."""
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, str | os.PathLike):
        raise TypeError(f"a DeepSpeed configuration must be a dict or the path of a JSON file, got {config!r}")
    path = Path(config)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a DeepSpeed configuration in plain JSON: {error}") from error
    if not isinstance(values, dict):
        raise TypeError(f"{path} must hold a dict, got {values!r}")
    return values


@dataclass(frozen=True)
class _Section:
    """One section of a configuration, or its top level, whose ``prefix`` is empty. A null key counts as not set."""

    prefix: str
    values: Mapping[str, object]

    def inner(self, key: str, hint: str = "") -> _Section:
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(key, f"must be a dict{hint}", TypeError)
        return _Section(f"{self.prefix}{key}.", value or {})

    def error(self, key: str, reason: str, kind: type[Exception] = ValueError) -> Exception:
        return kind(f"{self._at(key)} in the DeepSpeed configuration: {reason}")

    def warn(self, keys: Collection[str], stage: int, remedy: str) -> None:
        """Warn that ``keys`` are ignored, as DeepSpeed silently ignores them under this stage; name a ``remedy``."""
        logger.warning(
            "the DeepSpeed configuration has %s, which DeepSpeed ignores under ZeRO stage %d, so it is ignored here; "
            "%s",
            " and ".join(map(self._at, keys)),
            stage,
            remedy,
        )

    def _at(self, key: str) -> str:
        return f"{self.prefix}{key}={self.values.get(key)!r}"

    def check(
        self, known: Collection[str], elsewhere: Collection[str], refused: Mapping[str, Collection[object]]
    ) -> None:
        """Raise if a key is in ``elsewhere``, not in ``known``, or refused with a value that changes something."""
        for key, value in self.values.items():
            if key in elsewhere:
                raise self.error(key, 'unknown key here; move it across the border of "zero_optimization"')
            if key not in known:
                hint = did_you_mean(key, sorted(known), "{!r}") or "correct or remove it"
                raise self.error(key, f"unknown key; {hint}")
            if key in refused and not _is_off(value, refused[key]):
                remedy = f"{_REMEDIES.get(key, 'do it in your script')}, and remove the key"
                raise self.error(key, f"can't be honoured: no strategy is derived from it; {remedy}")

    def refuse_auto(self, key: str) -> None:
        if self.values.get(key) == "auto":
            raise self.error(key, 'it decides the strategy, and nothing here resolves "auto"; write the value')

    def flag(self, key: str) -> bool:
        self.refuse_auto(key)
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, "must be true or false", TypeError)
        return value is True

    def number(self, key: str, default: int) -> int:
        self.refuse_auto(key)
        value = self.values.get(key)
        if value is None:
            return default
        # 1e9 is a float in JSON. The last test also catches NaN and infinities: ``// 1`` makes both NaN.
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
            raise self.error(key, "must be a whole number", TypeError)
        if value < 0:
            raise self.error(key, "must be at least 0")
        return int(value)


def _is_off(value: object, neutral: Collection[object]) -> bool:
    """Return whether the value switches its key off, or is one of ``neutral``."""
    if isinstance(value, bool):  # True == 1, and 1 may be neutral
        return not value
    is_disabled = isinstance(value, Mapping) and (not value or value.get("enabled") is False)
    return value is None or is_disabled or value in neutral


# ---- arguments


def strategy_arguments(
    config: Mapping[str, object] | str | os.PathLike[str], changes: StrategyArguments
) -> StrategyArguments:
    """Return the arguments of the Strategy that ``config`` asks for, with ``changes``, without defaults.

    Log keys that do not affect it.

    Raises:
        ValueError: If a key is unknown, can't be honoured, contradicts another one, or is out of range.
        TypeError: If a value has the wrong type.
    """
    top = _Section("", _load(config))
    top.check(_TOP_KEYS, _ZERO_KEYS, REFUSED)
    zero = top.inner("zero_optimization", '; DeepSpeed\'s old true is {"stage": 1}')
    zero.check(_ZERO_KEYS, _TOP_KEYS, ZERO_REFUSED)
    _refuse_offload(zero)
    stage = zero.number("stage", default=0)
    if zero.values.get("stage", stage) is None:  # as stage 0, a null would train without ZeRO
        raise zero.error("stage", "must be a whole number", TypeError)
    if stage >= len(_STAGES):
        raise zero.error("stage", "must be 0, 1, 2 or 3")
    secondary = zero.number("zero_hpz_partition_size", default=1)
    keys = [key for key in _CODEC_ARGUMENTS if zero.flag(key)]
    arguments, codecs = StrategyArguments(levels=_STAGES[stage]), StrategyArguments()
    for key in keys:
        codecs |= _CODEC_ARGUMENTS[key]
    if secondary > 1 and stage == 3:  # a group of one rank keeps no secondary shard
        arguments = {"levels": "IGG", "gpus_per_node": secondary}
    elif secondary > 1:
        zero.warn(["zero_hpz_partition_size"], stage, "set stage to 3 to have it, or remove it")
    if stage == 3:
        arguments |= codecs
    elif keys:
        zero.warn(keys, stage, f"write {source_of(arguments | codecs)} to quantize, or remove it")
    arguments |= changes
    _log(arguments, top, zero)
    return arguments


def _refuse_offload(zero: _Section) -> None:
    for key in _OFFLOADS:
        value = zero.values.get(key)
        device = value.get("device", "a device") if value and isinstance(value, Mapping) else value
        # The older keys, cpu_offload and cpu_offload_param, are true or false.
        if device not in (None, False, {}, "none", "auto"):
            raise zero.error(
                key,
                "can't be honoured: FSDP offloads parameters, gradients and the optimizer step together, to the CPU "
                "alone; pass cpu_offload=CPUOffload(offload_params=True) to FullyShardedDataParallel, or "
                "offload_policy=CPUOffloadPolicy() to fully_shard, and remove it",
            )


def _log(arguments: Mapping[str, object], top: _Section, zero: _Section) -> None:
    without = [*sorted(zero.values.keys() & ZERO_WITHOUT_EFFECT), *sorted(top.values.keys() & WITHOUT_EFFECT)]
    script = [*sorted(zero.values.keys() & ZERO_SCRIPT), *sorted(top.values.keys() & SCRIPT)]
    parts = [f"DeepSpeed configuration read as {source_of(arguments)}"]
    parts += [f"not part of a strategy, set these in your script: {', '.join(script)}"] if script else []
    parts += [f"without effect under FSDP: {', '.join(without)}"] if without else []
    if arguments["levels"] == "IGG" and top.values.get("gradient_accumulation_steps") not in (None, 1, "auto"):
        parts += ["for gradient_accumulation_steps, pass levels='IIG': nodes then exchange gradients once a step"]
    logger.info("; ".join(parts))
