"""Frozen nets with low-rank detours and without, also with weights as a codec leaves them, and refusals of files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_zpp import Int8
from fsdp_zpp.codecs import Codec
from fsdp_zpp.frozen._torch_modules import FrozenModule

from . import models

CODEC = Int8(64)
INDEX = "frozen_base.safetensors.index.json"
SIZES: dict[str, Any] = {"width": 66, "hidden": 91, "vocabulary": 71}
"""Weights of a few thousand values that divide by nothing."""


class LowRank(nn.Module):
    """A frozen linear layer and a trainable detour around it."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def make_net(seed: int = 0, rank: int = 3, **arguments: Any) -> models.Net:
    """A frozen net with detours of some rank in its blocks, the same on every rank."""
    net = models.make_net(seed, **SIZES | arguments)
    net.requires_grad_(False)
    for block in net.blocks:
        block.up, block.down = LowRank(block.up, rank), LowRank(block.down, rank)
    # Reentrant checkpointing passes on gradients only where its inputs have some.
    net.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    return net.to(models.device())


def rounded_net(codec: Codec, **arguments: Any) -> models.Net:
    """The oracle: that net, unsharded, with every matrix of the base as ``codec`` gives it back."""
    net = make_net(**arguments)
    round_weights([p for p in net.parameters() if not p.requires_grad], codec)
    return net


def round_weights(weights: Iterable[nn.Parameter], codec: Codec) -> None:
    """Replace the values of matrices by what ``codec`` gives back."""
    for weight in weights:
        if weight.dim() == 2:
            round_weight(weight, codec)


def round_weight(weight: nn.Parameter, codec: Codec) -> None:
    """Replace the values of a whole weight by what ``codec`` gives back."""
    flat = weight.data.reshape(-1)
    codec.decode(codec.encode(flat.clone(), 1, 1), flat, 1, 1)
    weight.data = flat.view_as(weight)


def gradients_of(net: nn.Module) -> dict[str, Tensor]:
    """An unsharded net's gradients."""
    return {name: p.grad.float().cpu().clone() for name, p in net.named_parameters() if p.grad is not None}


# ---- without detours


def make_base(seed: int = 0, tied: bool = False, **arguments: Any) -> models.Net:
    """A frozen net with norms, biases and persistent buffers, all of them random."""
    net = models.Net(**SIZES | {"tied": tied} | arguments).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*net.parameters(), *net.buffers()):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return net


def make_empty(**arguments: Any) -> models.Net:
    """The same without values; ties hold."""
    with torch.device("meta"):
        return models.Net(**SIZES | arguments).requires_grad_(False)


def rounded(net: models.Net) -> models.Net:
    """The net with every matrix as its codec gives it back."""
    round_weights(net.parameters(), CODEC)
    return net


def output_of(net: nn.Module) -> Tensor:
    """Its output for a fixed batch, without ranks."""
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
