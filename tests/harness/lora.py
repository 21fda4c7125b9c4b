"""Nets whose weights are frozen, but for low-rank detours; and the same with weights as a codec leaves them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from fsdp_zpp.codecs.base import Codec

from . import models

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
