"""DeepSpeed configurations: what they become, what is logged of them, and what is refused. No key is passed over."""

from __future__ import annotations

import copy
import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_zpp import Int4, Int8, Strategy
from fsdp_zpp.strategy.deepspeed import REFUSED, SCRIPT, WITHOUT_EFFECT, ZERO_SCRIPT, ZERO_WITHOUT_EFFECT

# The zero_optimization of DeepSpeed's ZeRO++ tutorial.
ZEROPP: dict[str, Any] = {"stage": 3, "reduce_bucket_size": 10000000, "reduce_scatter": True, "overlap_comm": True}
ZEROPP |= {"zero_quantized_weights": True, "zero_hpz_partition_size": 16, "zero_quantized_gradients": True}
ZEROPP |= {"contiguous_gradients": True}

# ZeRO-3 as projects around Hugging Face's Trainer ship it.
HUGGING_FACE: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "offload_param": {"device": "none", "pin_memory": True},
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
}
QUANTIZED = {"stage": 3, "zero_quantized_gradients": True}
INT4_BOTH = {"gradients": Int4(128), "intra_gradients": Int4(128)}


def from_zero(**zero: Any) -> Strategy:
    return Strategy.from_deepspeed({"zero_optimization": zero})


def refusal(config: Any, error: type[Exception] = ValueError) -> str:
    with pytest.raises(error) as raised:
        Strategy.from_deepspeed(config)
    return str(raised.value)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# ---- strategies


@pytest.mark.parametrize(
    ("zero", "strategy"),
    [
        ({}, Strategy("NNN")),
        ({"stage": 0}, Strategy("NNN")),
        ({"stage": 1}, Strategy("NNG")),
        ({"stage": 2}, Strategy("NGG")),
        ({"stage": 3}, Strategy("GGG")),
        (ZEROPP, Strategy("IGG", weights=Int8(256), **INT4_BOTH, gpus_per_node=16)),
        ({"stage": 3, "zero_hpz_partition_size": 8}, Strategy("IGG", gpus_per_node=8)),
        ({"stage": 3, "zero_hpz_partition_size": 1}, Strategy("GGG")),
        ({"stage": 3, "zero_quantized_weights": True}, Strategy("GGG", weights=Int8(256))),
        (QUANTIZED, Strategy("GGG", **INT4_BOTH)),
        ({"stage": 3, "zero_quantized_nontrainable_weights": True}, Strategy("GGG", frozen="auto")),
        ({"stage": 3, "mics_shard_size": -1, "mics_hierarchical_params_gather": True}, Strategy("GGG")),
        ({"stage": 2, "offload_optimizer": None, "cpu_offload": False, "offload_param": {}}, Strategy("NGG")),
    ],
)
def test_a_configuration_becomes_the_strategy_that_deepspeed_would_run(
    zero: dict[str, Any], strategy: Strategy
) -> None:
    assert from_zero(**zero) == strategy


def test_configurations_as_they_are_shipped(caplog: pytest.LogCaptureFixture) -> None:
    before = copy.deepcopy(HUGGING_FACE)
    assert Strategy.from_deepspeed(HUGGING_FACE) == Strategy("GGG")
    assert before == HUGGING_FACE
    # Without ZeRO, all is replicated, as in DeepSpeed.
    assert Strategy.from_deepspeed({"train_batch_size": 8}) == Strategy("NNN")
    assert Strategy.from_deepspeed({"zero_optimization": None}) == Strategy("NNN")
    # OpenRLHF writes values that change nothing, either.
    defaults = {"data_types": {"grad_accum_dtype": None}, "prescale_gradients": False, "gradient_clipping": 1.0}
    assert Strategy.from_deepspeed(defaults | {"zero_optimization": {"stage": 2}}) == Strategy("NGG")
    assert not warnings_of(caplog)


def test_null_is_not_set(caplog: pytest.LogCaptureFixture) -> None:
    strategies = "zero_hpz_partition_size mics_shard_size zeropp_loco_param"
    quantized = "zero_quantized_weights zero_quantized_gradients zero_quantized_nontrainable_weights"
    for key in f"{strategies} {quantized} offload_param offload_optimizer cpu_offload".split():
        assert from_zero(stage=3, **{key: None}) == Strategy("GGG")
    assert not warnings_of(caplog)


def test_a_file_is_read_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": ZEROPP}))
    assert Strategy.from_deepspeed(str(file)) == Strategy.from_deepspeed(file) == from_zero(**ZEROPP)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        Strategy.from_deepspeed(tmp_path / "nowhere.json")
    for text, error, message in (
        ('{"zero_optimization": {"stage": 3}, // why', ValueError, r"ds\.json is not .* plain JSON: .*line 1"),
        ("[3]", TypeError, r"ds\.json must hold a dict, got \[3\]"),
    ):
        file.write_text(text)
        with pytest.raises(error, match=message):
            Strategy.from_deepspeed(file)


def test_arguments_are_instead_of_those_of_the_file(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fsdp_zpp")
    config = {"gradient_accumulation_steps": 4, "zero_optimization": ZEROPP}
    advice = "for gradient_accumulation_steps, pass levels='IIG'"
    for changes in ({}, {"levels": "IIG", "gpus_per_node": None}, {"weights": None, "gpus_per_node": 2}):
        caplog.clear()
        assert Strategy.from_deepspeed(config, **changes) == replace(from_zero(**ZEROPP), **changes)
        assert (advice in caplog.messages[0]) == ("levels" not in changes)
    with pytest.raises(TypeError, match="level"):
        Strategy.from_deepspeed(config, level="IIG")


# ---- what is logged


def test_one_log_line_sorts_all_keys_by_what_becomes_of_them(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fsdp_zpp"):
        Strategy.from_deepspeed(HUGGING_FACE | {"zero_optimization": HUGGING_FACE["zero_optimization"] | ZEROPP})
    [record] = caplog.records
    assert (record.name, record.levelno) == ("fsdp_zpp", logging.INFO)
    strategy, script, without = record.getMessage().split("; ")
    assert strategy == (
        "DeepSpeed configuration read as Strategy(levels='IGG', gpus_per_node=16, weights=Int8(block=256), "
        "gradients=Int4(block=128), intra_gradients=Int4(block=128))"
    )
    assert script == (
        "not part of a strategy, set these in your script: stage3_gather_16bit_weights_on_model_save, bf16, fp16, "
        "gradient_accumulation_steps, optimizer, train_batch_size"
    )
    assert without == (
        "without effect under FSDP: contiguous_gradients, overlap_comm, reduce_bucket_size, reduce_scatter, "
        "stage3_param_persistence_threshold, steps_per_print"
    )


def test_keys_that_choose_no_strategy_are_logged_and_no_others(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fsdp_zpp")
    zero = ((key, {"zero_optimization": {"stage": 3, key: "auto"}}) for key in ZERO_WITHOUT_EFFECT | ZERO_SCRIPT)
    top = ((key, {key: "auto", "zero_optimization": {"stage": 3}}) for key in WITHOUT_EFFECT | SCRIPT)
    for key, config in (*zero, *top):
        caplog.clear()
        assert Strategy.from_deepspeed(config) == Strategy("GGG")
        assert re.search(rf": {key}\b", caplog.messages[0])
    caplog.clear()
    from_zero(stage=3)
    assert caplog.messages == ["DeepSpeed configuration read as Strategy(levels='GGG')"]


def test_keys_that_deepspeed_ignores_have_no_effect_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert from_zero(stage=2, zero_hpz_partition_size=8) == Strategy("NGG")
    [warning] = warnings_of(caplog)
    said = "the DeepSpeed configuration has zero_optimization.zero_hpz_partition_size=8, which DeepSpeed ignores under "
    assert warning == f"{said}ZeRO stage 2, so it is ignored here; set stage to 3 to have it, or remove it"


@pytest.mark.parametrize("place", [{}, {"stage": 2}])
@pytest.mark.parametrize(
    "quantized",
    [
        {"zero_quantized_nontrainable_weights": True},
        {"zero_quantized_weights": True, "zero_quantized_gradients": True},
    ],
)
def test_quantization_that_deepspeed_ignores_is_named_with_the_strategy_that_has_it(
    place: dict[str, Any], quantized: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    plain = from_zero(**place)
    caplog.clear()
    assert from_zero(**place, **quantized) == plain
    [warning] = warnings_of(caplog)
    assert all(key in warning for key in quantized)
    # The strategy that the warning names is of the same places, with the codecs that stage 3 would have had.
    written = re.search(r"write (Strategy\(.*\)) to quantize", warning)
    assert written is not None
    requested = from_zero(stage=3, **quantized)
    suggested = eval(written.group(1), {"Strategy": Strategy, "Int4": Int4, "Int8": Int8})
    assert (suggested.levels, suggested.gpus_per_node) == (plain.levels, plain.gpus_per_node)
    for part in ("weights", "gradients", "intra_gradients", "frozen"):
        assert getattr(suggested, part) == getattr(requested, part)


# ---- no key is passed over

DEEPSPEEDS_ZERO_KEYS = """
    stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions
    allgather_bucket_size overlap_comm load_from_fp32_weights elastic_checkpoint offload_param offload_optimizer zenflow
    sub_group_size cpu_offload_param cpu_offload_use_pin_memory cpu_offload stage3_prefetch_bucket_size
    stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters
    stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold
    stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential stage3_partition_stream_chunk_size
    stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1 round_robin_gradients
    zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients
    zeropp_loco_param mics_shard_size mics_hierarchical_params_gather memory_efficient_linear
    pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks
    save_muon_momentum_buffer_in_memory leaf_module
""".split()
"""The keys of zero_optimization, written out: an oracle of its own."""


def test_every_key_of_deepspeed_is_known() -> None:
    for key in DEEPSPEEDS_ZERO_KEYS:
        try:
            from_zero(**{"stage": 3, key: "auto"})
        except (TypeError, ValueError) as error:
            assert "unknown key" not in str(error)  # noqa: PT017


def test_an_unknown_key_raises_wherever_it_is_and_whatever_its_value() -> None:
    for key, value in (("stag", None), ("zero_hpz_partition_sizes", False), ("", 0), ("Stage", "auto")):
        own = {key: value}
        for where, config in {
            "": own | {"zero_optimization": {"stage": 3}},
            "zero_optimization.": {"zero_optimization": own | {"stage": 3}},
        }.items():
            message = refusal(config)
            assert message.startswith(f"{where}{key}={value!r} in the DeepSpeed configuration: unknown key; ")


@pytest.mark.parametrize(
    ("config", "hint"),
    [
        ({"zero_optimisation": {"stage": 3}}, "did you mean 'zero_optimization'?"),
        ({"zero_optimization": {"hpz_partition_size": 8}}, "did you mean 'zero_hpz_partition_size'?"),
    ],
)
def test_unknown_keys_get_a_hint(config: dict[str, Any], hint: str) -> None:
    assert refusal(config).endswith(f"unknown key; {hint}")
    for misplaced in ({"stage": 3}, {"zero_optimization": {"bf16": {"enabled": True}}}):
        assert refusal(misplaced).endswith('move it across the border of "zero_optimization"')


# ---- what is refused


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_top_level_keys_that_cannot_be_honoured_raise_unless_they_are_off(key: str) -> None:
    neutral = {"gradient_allreduce_op": "mean", "sequence_parallel_size": 1, "tensor_parallel": {"autotp_size": 1}}
    for on in ({"enabled": True}, {"autotp_size": 4}, True, "fp32", "auto", 2):
        assert refusal({key: on}).startswith(f"{key}={on!r} in the DeepSpeed configuration: can't be honoured")
    for off in ({"enabled": False}, {}, None, False, neutral.get(key)):
        assert Strategy.from_deepspeed({key: off, "zero_optimization": {"stage": 3}}) == Strategy("GGG")


@pytest.mark.parametrize(
    ("zero", "key", "reason"),
    [
        ({"stage": 4}, "stage=4", "0, 1, 2 or 3"),
        ({"stage": "auto"}, "stage='auto'", "write the value"),
        ({"stage": 3, "mics_shard_size": 8}, "mics_shard_size=8", "can't be honoured"),
        (QUANTIZED | {"zeropp_loco_param": {"err_beta": 0.5}}, "zeropp_loco_param", r"Strategy\.loco"),
        ({"paro_strategy": "IIG"}, "paro_strategy='IIG'", "unknown key"),
        ({"offload_param": {"device": "cpu"}}, "offload_param", r"CPUOffload\(offload_params=True\)"),
        ({"offload_param": {"device": "nvme"}}, "offload_param", "to the CPU alone"),
        ({"cpu_offload": True}, "cpu_offload=True", "CPUOffload"),
        ({"stage": 2, "zenflow": {"topk_ratio": 0.1}}, "zenflow", "can't be honoured"),
        ({"offload_param": {"devise": "cpu"}}, "offload_param", "can't be honoured"),
    ],
)
def test_errors_name_key_and_value_and_say_what_to_do(zero: dict[str, Any], key: str, reason: str) -> None:
    message = refusal({"zero_optimization": zero})
    assert message.startswith(f"zero_optimization.{key}")
    assert re.search(reason, message), message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("stage", value) for value in ("3", True, 1.5, None)),
        *(("zero_hpz_partition_size", True), ("zero_quantized_weights", 1)),
    ],
)
def test_values_of_a_wrong_type_are_type_errors(key: str, value: object) -> None:
    message = refusal({"zero_optimization": QUANTIZED | {key: value}}, TypeError)
    assert message.startswith(f"zero_optimization.{key}={value!r} in the DeepSpeed configuration: must be ")
    assert 'old true is {"stage": 1}' in refusal({"zero_optimization": True}, TypeError)
