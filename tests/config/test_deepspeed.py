"""DeepSpeed configurations: what they become, where they are read from, and what is logged of them."""

from __future__ import annotations

import copy
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from deepspeed_configs import HUGGING_FACE, INT4_BOTH, LOCO, QUANTIZED, ZEROPP, from_zero, refusal

from fsdp_zpp import Int8, LoCo, Strategy


@pytest.mark.parametrize(
    ("zero", "strategy"),
    [
        ({}, Strategy("NNN")),
        ({"stage": 0}, Strategy("NNN")),
        ({"stage": 1}, Strategy("NNG")),
        ({"stage": 2}, Strategy("NGG")),
        ({"stage": 3}, Strategy("GGG")),
        ({"stage": 3.0}, Strategy("GGG")),
        (ZEROPP, Strategy("IGG", weights=Int8(256), **INT4_BOTH, gpus_per_node=16)),
        ({"stage": 3, "zero_hpz_partition_size": 8}, Strategy("IGG", gpus_per_node=8)),
        ({"stage": 3, "zero_hpz_partition_size": 1}, Strategy("GGG")),
        ({"stage": 2, "zero_hpz_partition_size": 0}, Strategy("NGG")),
        ({"stage": 3, "zero_quantized_weights": True}, Strategy("GGG", weights=Int8(256))),
        ({"stage": 1, "zero_quantized_weights": False}, Strategy("NNG")),
        (QUANTIZED, Strategy("GGG", **INT4_BOTH)),
        ({"stage": 3, "zero_quantized_nontrainable_weights": True}, Strategy("GGG", frozen="auto")),
        ({"stage": 3, "mics_shard_size": 4}, Strategy("III", gpus_per_node=4)),
        ({"stage": 3, "mics_shard_size": 4, "mics_hierarchical_params_gather": True}, Strategy.mics(gpus_per_node=4)),
        ({"stage": 3, "mics_shard_size": -1}, Strategy("GGG")),
        ({"paro_strategy": "IIG"}, Strategy("IIG")),
        ({"paro_strategy": None, "stage": 1}, Strategy("NNG")),
        ({"paro_strategy": "NGG", "stage": 2}, Strategy("NGG")),
        ({"paro_strategy": "GGG", "zero_quantized_weights": True}, Strategy("GGG", weights=Int8(256))),
        ({"stage": 2, "offload_optimizer": None, "cpu_offload": False, "offload_param": {}}, Strategy("NGG")),
    ],
)
def test_a_configuration_becomes_the_strategy_that_deepspeed_would_run(
    zero: dict[str, Any], strategy: Strategy
) -> None:
    assert from_zero(**zero) == strategy


@pytest.mark.parametrize("name", ["NII", "NIG", "ING", "IIG", "IGG", "NNG", "NGG", "GGG"])
def test_every_paro_strategy_of_deepspeeds_branch_is_taken(name: str) -> None:
    assert from_zero(paro_strategy=name) == Strategy(name)


def test_the_configuration_that_hugging_face_ships_is_zero_3() -> None:
    assert Strategy.from_deepspeed(HUGGING_FACE) == Strategy("GGG")


def test_a_configuration_without_zero_is_replicated_as_in_deepspeed() -> None:
    assert Strategy.from_deepspeed({"train_batch_size": 8}) == Strategy("NNN")
    assert Strategy.from_deepspeed({"zero_optimization": None}) == Strategy("NNN")


def test_loco_keeps_errors_as_deepspeed_does() -> None:
    expected = LoCo(beta=0.5, reset_every=512, hops="both", dtype=Int8(256))
    assert from_zero(**LOCO) == Strategy("GGG", **INT4_BOTH, error_feedback=expected)


def test_loco_has_the_defaults_that_deepspeed_documents() -> None:
    expected = LoCo(beta=0.8, reset_every=1024, hops="both", dtype=Int8(256))
    assert from_zero(**QUANTIZED, zeropp_loco_param={}).error_feedback == expected


@pytest.mark.parametrize("as_type", [str, Path])
def test_a_file_is_read_by_its_path(tmp_path: Path, as_type: type) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"zero_optimization": ZEROPP}))
    assert Strategy.from_deepspeed(as_type(file)) == from_zero(**ZEROPP)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('{"zero_optimization": {"stage": 3}, // why', ValueError, r"ds\.json is not .* plain JSON: .*line 1"),
        ("[3]", TypeError, r"ds\.json must hold a dict, got \[3\]"),
        ('{"zero_optimization": {"stage": 3, "stage": 2}}', ValueError, "duplicate keys: stage"),
    ],
)
def test_files_that_are_no_configuration_are_refused(
    tmp_path: Path, text: str, error: type[Exception], message: str
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(error, match=message):
        Strategy.from_deepspeed(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        Strategy.from_deepspeed(tmp_path / "nowhere.json")


def test_a_configuration_is_a_dict_or_a_path() -> None:
    assert "got 3" in refusal(3, TypeError)
    assert 'old true is {"stage": 1}' in refusal({"zero_optimization": True}, TypeError)


def test_the_configuration_is_not_changed() -> None:
    config = copy.deepcopy(HUGGING_FACE)
    Strategy.from_deepspeed(config)
    assert config == HUGGING_FACE


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
    assert script.startswith("not part of a strategy, set these in your script: ")
    assert re.findall(r"(\w+) \(", script) == [
        "stage3_gather_16bit_weights_on_model_save",
        "bf16",
        "fp16",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "optimizer",
        "scheduler",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
    ]
    assert without == (
        "without effect under FSDP: contiguous_gradients, overlap_comm, reduce_bucket_size, reduce_scatter, "
        "stage3_max_live_parameters, stage3_max_reuse_distance, stage3_param_persistence_threshold, "
        "stage3_prefetch_bucket_size, sub_group_size, steps_per_print, wall_clock_breakdown"
    )


def test_the_log_line_leaves_out_what_is_empty(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fsdp_zpp"):
        from_zero(stage=3)
    assert caplog.messages == ["DeepSpeed configuration read as Strategy(levels='GGG')"]
