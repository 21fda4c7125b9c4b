"""What can't be honoured of a DeepSpeed configuration raises, and the error says what to do."""

from __future__ import annotations

import re
from typing import Any

import pytest
from harness.deepspeed import LOCO, QUANTIZED, from_zero, refusal

from fsdp_zpp import Int4, Int8, LoCo, Strategy


@pytest.mark.parametrize(
    ("zero", "key", "reason"),
    [
        ({"stage": 4}, "stage=4", "0, 1, 2 or 3"),
        ({"stage": -1}, "stage=-1", "at least 0"),
        ({"stage": "auto"}, "stage='auto'", "write the value"),
        ({"stage": 3, "zero_hpz_partition_size": "auto"}, "zero_hpz_partition_size", "write the value"),
        ({"stage": 3, "zero_quantized_weights": "auto"}, "zero_quantized_weights", "write the value"),
        ({"stage": 3, "zero_hpz_partition_size": -8}, "zero_hpz_partition_size=-8", "at least 0"),
        ({"stage": 3, "mics_shard_size": -8}, "mics_shard_size=-8", "at least -1"),
        ({"stage": 2, "zero_hpz_partition_size": 8}, "zero_hpz_partition_size=8", "under ZeRO stage 2; set stage to 3"),
        ({"zero_hpz_partition_size": 8}, "zero_hpz_partition_size=8", "under ZeRO stage 0; set stage to 3"),
        ({"stage": 1, "mics_shard_size": 4}, "mics_shard_size=4", "under ZeRO stage 1; set stage to 3"),
        ({"paro_strategy": "IIG", "mics_shard_size": 4}, "mics_shard_size=4", "under PaRO's IIG"),
        (
            {"stage": 3, "mics_shard_size": 4, "zero_hpz_partition_size": 4},
            "zero_hpz_partition_size=4",
            "one of the two",
        ),
        ({"paro_strategy": "IIG", "stage": 3}, "paro_strategy='IIG'", "contradicts stage=3, which is GGG"),
        ({"paro_strategy": "NGG", "stage": 1}, "paro_strategy='NGG'", "contradicts stage=1, which is NNG"),
        ({"paro_strategy": "NIN"}, "paro_strategy='NIN'", "one of NNG, NGG, GGG, NII"),
        ({"paro_strategy": "III"}, "paro_strategy='III'", r"write Strategy\(letters\)"),
        ({"stage": 3, "zeropp_loco_param": {}}, "zeropp_loco_param", "set zero_quantized_gradients to true"),
        (LOCO | {"zeropp_loco_param": {"err_beta": 1}}, "zeropp_loco_param.err_beta=1", r"in \[0, 1\)"),
        (LOCO | {"zeropp_loco_param": {"err_beta": "auto"}}, "zeropp_loco_param.err_beta='auto'", "write the value"),
        (LOCO | {"zeropp_loco_param": {"reset_T": 0}}, "zeropp_loco_param.reset_T=0", "at least 1"),
        (LOCO | {"zeropp_loco_param": {"beta": 0.8}}, "zeropp_loco_param.beta=0.8", "did you mean 'err_beta'"),
        ({"offload_param": {"device": "cpu"}}, "offload_param", r"CPUOffload\(offload_params=True\)"),
        ({"offload_optimizer": {"device": "cpu"}}, "offload_optimizer", r"CPUOffloadPolicy\(\) to fully_shard"),
        ({"offload_param": {"device": "nvme"}}, "offload_param", "no device 'nvme' to offload to, only cpu"),
        ({"offload_param": {"device": "auto"}}, "offload_param.device='auto'", "write the value"),
        ({"offload_param": {"devise": "cpu"}}, "offload_param.devise='cpu'", "did you mean 'device'"),
        ({"cpu_offload": True}, "cpu_offload=True", "CPUOffload"),
        ({"cpu_offload_param": True}, "cpu_offload_param=True", "CPUOffload"),
        ({"stage": 2, "zenflow": {"topk_ratio": 0.1}}, "zenflow", "another optimizer step"),
    ],
)
def test_errors_name_key_and_value_and_say_what_to_do(zero: dict[str, Any], key: str, reason: str) -> None:
    message = refusal({"zero_optimization": zero})
    assert message.startswith(f"zero_optimization.{key}")
    assert re.search(reason, message), message


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": "3"},
        {"stage": True},
        {"stage": None},
        {"stage": 2.5},
        {"stage": float("nan")},
        {"zero_hpz_partition_size": "8"},
        {"zero_quantized_weights": 1},
        {"zero_quantized_gradients": "true"},
        {"zeropp_loco_param": 0.8},
        QUANTIZED | {"zeropp_loco_param": {"err_beta": "0.8"}},
        QUANTIZED | {"zeropp_loco_param": {"reset_T": True}},
        {"offload_param": "cpu"},
        {"cpu_offload": "cpu"},
    ],
)
def test_values_of_a_wrong_type_are_refused(zero: dict[str, Any]) -> None:
    culprit = list(zero)[-1]
    assert re.match(rf"zero_optimization\.{culprit}.* must be ", refusal({"zero_optimization": zero}, TypeError))


@pytest.mark.parametrize("place", [{}, {"stage": 1}, {"stage": 2}, {"paro_strategy": "IIG"}, {"mics_shard_size": 4}])
@pytest.mark.parametrize(
    "quantized",
    [
        {"zero_quantized_weights": True},
        {"zero_quantized_nontrainable_weights": True},
        {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.7}},
    ],
)
def test_quantization_that_deepspeed_ignores_raises_and_names_the_strategy_that_has_it(
    place: dict, quantized: dict
) -> None:
    if "mics_shard_size" in place:
        place = {"stage": 3} | place
    message = refusal({"zero_optimization": place | quantized})
    assert all(key in message for key in quantized)
    # What the message tells to write is the same places with the codecs that stage 3 would have had.
    written = re.search(r"or write (Strategy\(.*\)) to quantize", message)
    assert written is not None
    asked = from_zero(stage=3, **quantized)
    plain = from_zero(**place)
    suggested = eval(written.group(1), {"Strategy": Strategy, "Int4": Int4, "Int8": Int8, "LoCo": LoCo})
    assert (suggested.levels, suggested.gpus_per_node) == (plain.levels, plain.gpus_per_node)
    for part in ("weights", "gradients", "intra_gradients", "error_feedback", "frozen"):
        assert getattr(suggested, part) == getattr(asked, part)
