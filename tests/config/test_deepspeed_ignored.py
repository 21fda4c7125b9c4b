"""Keys that DeepSpeed ignores are ignored, too, with a warning that says what would honour it."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from deepspeed_configs import QUANTIZED, from_zero

from fsdp_zpp import Int4, Int8, LoCo, Strategy


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("zero", "strategy", "key", "reason"),
    [
        ({"stage": 2, "zero_hpz_partition_size": 8}, "NGG", "zero_hpz_partition_size=8", "ZeRO stage 2.*stage to 3"),
        ({"zero_hpz_partition_size": 8}, "NNN", "zero_hpz_partition_size=8", "under ZeRO stage 0.* set stage to 3"),
        ({"stage": 1, "mics_shard_size": 4}, "NNG", "mics_shard_size=4", "under ZeRO stage 1.* set stage to 3"),
        ({"paro_strategy": "IIG", "mics_shard_size": 4}, "IIG", "mics_shard_size=4", "under PaRO's IIG"),
        (
            {"stage": 3, "mics_shard_size": 4, "zero_hpz_partition_size": 8},
            Strategy.mics(gpus_per_node=4),
            "zero_hpz_partition_size=8",
            "beside mics_shard_size.* one of the two",
        ),
        ({"stage": 3, "zeropp_loco_param": {}}, "GGG", "zeropp_loco_param={}", "zero_quantized_gradients to true"),
    ],
)
def test_keys_that_deepspeed_ignores_have_no_effect_and_a_warning(
    zero: dict[str, Any], strategy: Strategy | str, key: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert from_zero(**zero) == (Strategy(strategy) if isinstance(strategy, str) else strategy)
    [warning] = warnings_of(caplog)
    assert warning.startswith(f"the DeepSpeed configuration has zero_optimization.{key}, which DeepSpeed ignores ")
    assert re.search(reason, warning), warning


@pytest.mark.parametrize("place", [{}, {"stage": 1}, {"stage": 2}, {"paro_strategy": "IIG"}, {"mics_shard_size": 4}])
@pytest.mark.parametrize(
    "quantized",
    [
        {"zero_quantized_weights": True},
        {"zero_quantized_nontrainable_weights": True},
        {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.7}},
    ],
)
def test_quantization_that_deepspeed_ignores_is_named_with_the_strategy_that_has_it(
    place: dict[str, Any], quantized: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    if "mics_shard_size" in place:
        place = {"stage": 3} | place
    plain = from_zero(**place)
    caplog.clear()
    assert from_zero(**place, **quantized) == plain
    [warning] = warnings_of(caplog)
    assert all(key in warning for key in quantized)
    # What the warning tells to write is the same places with the codecs that stage 3 would have had.
    written = re.search(r"write (Strategy\(.*\)) to quantize", warning)
    assert written is not None
    requested = from_zero(stage=3, **quantized)
    suggested = eval(written.group(1), {"Strategy": Strategy, "Int4": Int4, "Int8": Int8, "LoCo": LoCo})
    assert (suggested.levels, suggested.gpus_per_node) == (plain.levels, plain.gpus_per_node)
    for part in ("weights", "gradients", "intra_gradients", "error_feedback", "frozen"):
        assert getattr(suggested, part) == getattr(requested, part)


OPENRLHF = {
    "steps_per_print": 100,
    "zero_optimization": {
        "stage": 2,
        "offload_param": {"device": "none"},
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "sub_group_size": "auto",
        "stage3_max_live_parameters": "auto",
        "stage3_max_reuse_distance": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "reduce_bucket_size": "auto",
        "zero_hpz_partition_size": 8,
        "zero_quantized_weights": False,
        "zero_quantized_gradients": False,
    },
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "wall_clock_breakdown": False,
    "data_types": {"grad_accum_dtype": None},
    "tensor_parallel": {"autotp_size": 1},
}


def test_openrlhfs_defaults_are_zero_2(caplog: pytest.LogCaptureFixture) -> None:
    assert Strategy.from_deepspeed(OPENRLHF) == Strategy("NGG")
    assert len(warnings_of(caplog)) == 1


NULLS = (
    "zero_hpz_partition_size mics_shard_size zero_quantized_weights zero_quantized_gradients zeropp_loco_param "
    "zero_quantized_nontrainable_weights offload_param offload_optimizer cpu_offload paro_strategy"
).split()


@pytest.mark.parametrize("key", NULLS)
def test_null_is_not_set(key: str, caplog: pytest.LogCaptureFixture) -> None:
    assert from_zero(stage=3, **{key: None}) == Strategy("GGG")
    assert not warnings_of(caplog)


def test_null_in_a_section_is_the_default() -> None:
    nulls = {"err_beta": None, "reset_T": None}
    assert from_zero(**QUANTIZED, zeropp_loco_param=nulls) == from_zero(**QUANTIZED, zeropp_loco_param={})
    assert from_zero(stage=3, offload_param={"device": None}) == Strategy("GGG")
