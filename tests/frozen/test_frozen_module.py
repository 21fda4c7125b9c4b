"""A quantized module is still one of its kind: its weight reads as before and can't be written to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_zpp import Int8, dequantize_frozen_params, quantize_frozen_params


def test_a_quantized_module_is_one_of_its_kind() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(101, 64), nn.Linear(64, 96, bias=False)).requires_grad_(False)
    plain = copy.deepcopy(net)
    quantize_frozen_params(net, Int8(64))
    layer, tokens = net[1], torch.arange(101)
    assert isinstance(layer, nn.Linear)
    assert (layer.weight.shape, layer.weight.dtype, layer.weight.device.type) == ((96, 64), torch.float32, "cpu")
    assert list(net.state_dict()) == list(net.parameters()) == list(net.buffers()) == []
    # A step of 1/127 of a block's largest value, rounded.
    bound = plain[1].weight.abs().max().item() / 254 + 1e-6
    torch.testing.assert_close(layer.weight + 0, plain[1].weight.data, rtol=0, atol=bound)
    expected = net(tokens)
    copied = copy.deepcopy(net)
    assert type(copied[1]) is nn.Linear
    assert torch.equal(copied(tokens), expected)
    assert torch.equal(net[1](expected.new_ones(64)), copied[1](expected.new_ones(64)))
    assert net.to(torch.bfloat16)(tokens).dtype == torch.bfloat16
    assert torch.equal(net.to(torch.float32)(tokens), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(net(tokens), copied(tokens))
    assert dequantize_frozen_params(net) == 2
    assert type(net[1]) is nn.Linear
    assert torch.equal(net(tokens), expected)


WRITES: dict[str, tuple[Callable[[nn.Linear], Any], str]] = {
    "in place": (lambda layer: layer.weight.add_(1), "can't be written to"),
    "data": (lambda layer: setattr(layer.weight, "data", torch.zeros(1)), "can't be written to"),
    "merge": (lambda layer: layer.weight.data.__iadd__(torch.zeros(1)), "can't be written to"),
    "assign": (lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros(1))), "can't be written to"),
    "reset": (lambda layer: layer.reset_parameters(), "can't be written to"),
    "unfreeze": (lambda layer: layer.weight.requires_grad_(), "can't be trained"),
    "unfreeze by attribute": (lambda layer: setattr(layer.weight, "requires_grad", True), "can't be trained"),
    "unfreeze the layer": (lambda layer: layer.requires_grad_(), "can't be trained"),
}


@pytest.mark.parametrize(("write", "message"), WRITES.values(), ids=WRITES)
def test_writes_to_a_quantized_weight_are_refused(write: Callable[[nn.Linear], Any], message: str) -> None:
    net = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)
    quantize_frozen_params(net)
    with pytest.raises(RuntimeError, match=message):
        write(net[0])
