"""A quantized base is told from another one by a few of its scales."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from harness import frozen_files
from torch import nn

from fsdp_zpp import NF4, Int8, quantize_frozen_params
from fsdp_zpp.frozen.files.identity import check_base, describe_base

CODEC = Int8(64)


def quantized(seed: int = 0, codec: Any = CODEC) -> nn.Module:
    net = frozen_files.make_base(seed)
    quantize_frozen_params(net, codec)
    return net


def described(model: nn.Module) -> Any:
    """As a file gives it back."""
    return json.loads(json.dumps(describe_base(model)))


def test_the_same_base_is_accepted_up_to_rounding() -> None:
    saved = described(quantized())
    assert saved
    for said in saved.values():
        said["scales"] = [scale * (1 + 1e-6) for scale in said["scales"]]  # as another kernel may round
    check_base(quantized(), saved, "it")


def test_another_base_is_refused() -> None:
    saved = described(quantized())
    with pytest.raises(ValueError, match=f"it was saved with another base: {len(saved)} of the {len(saved)} quantized"):
        check_base(quantized(seed=1), saved, "it")


def test_another_codec_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "fsdp_zpp")
    check_base(quantized(codec=NF4(64)), described(quantized()), "it")
    assert "it was saved with int8(64) of" in caplog.text
