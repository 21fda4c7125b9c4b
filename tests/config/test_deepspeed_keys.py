"""No key of a DeepSpeed configuration is passed over: each is translated, logged or refused."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from deepspeed_configs import QUANTIZED, from_zero, refusal
from hypothesis import HealthCheck, given, settings, strategies as st

from fsdp_zpp import Strategy
from fsdp_zpp.config.deepspeed.keys import (
    OFFLOAD_KEYS,
    TOP_REFUSED,
    TOP_SCRIPT,
    TOP_WITHOUT_EFFECT,
    ZERO_REFUSED,
    ZERO_SCRIPT,
    ZERO_WITHOUT_EFFECT,
)


@pytest.mark.parametrize("key", sorted(ZERO_WITHOUT_EFFECT | ZERO_SCRIPT.keys()))
def test_keys_of_zero_optimization_that_choose_no_strategy_are_logged(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "fsdp_zpp"):
        assert from_zero(stage=3, **{key: "auto"}) == Strategy("GGG")
    assert re.search(rf": {key}\b", caplog.messages[0])


@pytest.mark.parametrize("key", sorted(TOP_WITHOUT_EFFECT | TOP_SCRIPT.keys()))
def test_top_level_keys_that_choose_no_strategy_are_logged(key: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fsdp_zpp"):
        assert Strategy.from_deepspeed({key: "auto", "zero_optimization": {"stage": 3}}) == Strategy("GGG")
    assert re.search(rf": {key}\b", caplog.messages[0])


@pytest.mark.parametrize("key", sorted(TOP_REFUSED))
def test_top_level_keys_that_cannot_be_honoured_raise_unless_they_are_off(key: str) -> None:
    for on in ({"enabled": True}, {"anything": 1}, True, "fp32", "auto", 2):
        assert refusal({key: on}).startswith(f"{key}={on!r} in the DeepSpeed configuration: can't be honoured")
    for off in ({"enabled": False}, {}, None, False):
        assert Strategy.from_deepspeed({key: off, "zero_optimization": {"stage": 3}}) == Strategy("GGG")


@pytest.mark.parametrize(
    ("key", "off", "on"),
    [
        ("gradient_allreduce_op", "mean", "sum"),
        ("sequence_parallel_size", 1, 4),
        ("tensor_parallel", {"autotp_size": 1}, {"autotp_size": 4}),
    ],
)
def test_values_that_change_nothing_are_accepted(key: str, off: object, on: object) -> None:
    assert Strategy.from_deepspeed({key: off}) == Strategy("NNN")
    assert "remove it" in refusal({key: on})


# Each key has one fate; the sets are DeepSpeed's zero_optimization, written out as an oracle of its own.
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


@pytest.mark.parametrize("key", DEEPSPEEDS_ZERO_KEYS)
def test_every_key_of_deepspeed_is_translated_logged_or_refused(key: str, caplog: pytest.LogCaptureFixture) -> None:
    values = {"stage": 2, "zero_hpz_partition_size": 2, "mics_shard_size": 2, "zeropp_loco_param": {"err_beta": 0.5}}
    offloads = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    base = QUANTIZED if key == "zeropp_loco_param" else {"stage": 3}
    with caplog.at_level(logging.INFO, "fsdp_zpp"):
        before = from_zero(**base)
        caplog.clear()
        try:
            strategy = from_zero(**base | {key: (values | offloads).get(key, True)})
        except ValueError as error:
            assert str(error).startswith(f"zero_optimization.{key}=")  # noqa: PT017
            assert "unknown" not in str(error)  # noqa: PT017
            return
    assert strategy != before or re.search(rf"\b{key}\b", caplog.messages[0])


KNOWN = {
    *DEEPSPEEDS_ZERO_KEYS,
    *ZERO_WITHOUT_EFFECT,
    *ZERO_SCRIPT,
    *ZERO_REFUSED,
    *TOP_WITHOUT_EFFECT,
    *TOP_SCRIPT,
    *TOP_REFUSED,
    *OFFLOAD_KEYS,
    "zero_optimization",
    "paro_strategy",
    "err_beta",
    "reset_T",
}


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    key=st.one_of(
        st.text(max_size=20),
        st.builds(lambda known, extra: known + extra, st.sampled_from(sorted(KNOWN)), st.sampled_from(["s", "_", "X"])),
        st.sampled_from(sorted(KNOWN)).map(lambda known: known[1:]),
    ).filter(lambda key: key not in KNOWN),
    value=st.sampled_from([None, False, True, 0, "auto", {}]),
)
def test_any_unknown_key_raises(key: str, value: object) -> None:
    for where, config in {
        "": {key: value, "zero_optimization": {"stage": 3}},
        "zero_optimization.": {"zero_optimization": {"stage": 3, key: value}},
        "zero_optimization.offload_param.": {"zero_optimization": {"offload_param": {key: value}}},
        "zero_optimization.zeropp_loco_param.": {"zero_optimization": QUANTIZED | {"zeropp_loco_param": {key: value}}},
    }.items():
        message = refusal(config)
        assert message.startswith(f"{where}{key}={value!r} in the DeepSpeed configuration: unknown key; ")


@pytest.mark.parametrize(
    ("config", "hint"),
    [
        ({"zero_optimisation": {"stage": 3}}, "did you mean 'zero_optimization'?"),
        ({"zero_optimization": {"zero_quantised_weights": True}}, "did you mean 'zero_quantized_weights'?"),
        ({"zero_optimization": {"hpz_partition_size": 8}}, "did you mean 'zero_hpz_partition_size'?"),
        ({"stage": 3}, 'it belongs inside "zero_optimization"'),
        ({"zero_optimization": {"bf16": {"enabled": True}}}, 'it belongs outside "zero_optimization"'),
        ({"zero_optimization": {"qqq": 1}}, "correct or remove it"),
        ({7: 1}, "correct or remove it"),
    ],
)
def test_unknown_keys_get_a_hint(config: dict[str, Any], hint: str) -> None:
    assert refusal(config).endswith(f"unknown key; {hint}")
