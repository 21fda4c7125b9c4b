"""A frozen net with all kinds of tensors, its files, and what a failed call must have left alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_zpp import Int8
from fsdp_zpp.frozen.modules import FrozenModule

from . import lora, models

CODEC = Int8(64)
INDEX = "frozen_base.safetensors.index.json"


def make_base(seed: int = 0, tied: bool = False, **arguments: Any) -> models.Net:
    """A frozen net with norms, biases and persistent buffers, all of them random."""
    net = models.Net(**lora.SIZES | {"tied": tied} | arguments).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*net.parameters(), *net.buffers()):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return net


def make_empty(**arguments: Any) -> models.Net:
    """The same without values; ties hold."""
    with torch.device("meta"):
        return models.Net(**lora.SIZES | arguments).requires_grad_(False)


def rounded(net: models.Net) -> models.Net:
    """The net with every matrix as its codec gives it back."""
    lora.round_weights(net.parameters(), CODEC)
    return net


def output_of(net: nn.Module) -> Tensor:
    """What it computes from a fixed batch, without ranks."""
    return net(torch.arange(14).view(2, 7))


def snapshot(net: nn.Module) -> dict[str, Any]:
    """All that a failed call must leave as it was: classes, tensors themselves, and their values."""
    tensors = [*net.named_parameters(remove_duplicate=False), *net.named_buffers()]
    kept = {name: (id(tensor), tensor.is_meta or tensor.nan_to_num().sum().item()) for name, tensor in tensors}
    return kept | {"frozen": [name for name, module in net.named_modules() if isinstance(module, FrozenModule)]}


def refused(net: nn.Module, load: Callable[[nn.Module], Any], *messages: str) -> None:
    """Assert that a call is refused, names all of ``messages``, and leaves the net alone."""
    before = snapshot(net)
    with pytest.raises(ValueError, match=re.escape(messages[-1])) as error:
        load(net)
    assert all(message in str(error.value) for message in messages), error.value
    assert snapshot(net) == before
