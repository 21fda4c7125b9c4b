"""Keys of a DeepSpeed configuration that can't be honoured raise, and the error says what to do."""

from __future__ import annotations

import re
from typing import Any

import pytest
from deepspeed_configs import LOCO, QUANTIZED, refusal


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
        ({"paro_strategy": "IIG", "stage": 3}, "paro_strategy='IIG'", "contradicts stage=3, which is GGG"),
        ({"paro_strategy": "NGG", "stage": 1}, "paro_strategy='NGG'", "contradicts stage=1, which is NNG"),
        ({"paro_strategy": "NIN"}, "paro_strategy='NIN'", "one of NNG, NGG, GGG, NII"),
        ({"paro_strategy": "III"}, "paro_strategy='III'", r"write Strategy\(letters\)"),
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


def test_all_that_is_wrong_is_told_at_once() -> None:
    zero = {"stage": 7, "zero_quantized_weigths": True, "offload_param": {"device": "cpu"}, "sub_group_size": "auto"}
    message = refusal({"zero_optimization": zero, "bf17": {}, "elasticity": {"enabled": True}})
    first, *others = message.splitlines()
    assert first == "5 keys are wrong:"
    keys = [re.match(r"- ([\w.]+)=.* in the DeepSpeed configuration: ", other) for other in others]
    assert [key.group(1) for key in keys if key is not None] == [
        "bf17",
        "zero_optimization.zero_quantized_weigths",
        "elasticity",
        "zero_optimization.offload_param",
        "zero_optimization.stage",
    ]


def test_several_values_of_a_wrong_type_are_one_type_error() -> None:
    message = refusal({"zero_optimization": {"stage": "3", "zero_quantized_weights": 1}}, TypeError)
    assert "must be a whole number" in message
    assert "must be true or false" in message
