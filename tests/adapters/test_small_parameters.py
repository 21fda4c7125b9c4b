"""Codecs leave small parameters as they are, and matrices beside them as exact as by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import models
from harness.adapter import STOCK, Adapter
from harness.covering import ADAPTERS, over_each, over_pairs
from harness.fsdp2 import Fsdp2
from harness.pool import Pool
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from fsdp_zpp import Int4, Int4Delta, Int8, LoCo, Strategy
from fsdp_zpp.collectives.exact_places import sent_exactly

SCOPES = ("IGG", "NNN", "III", "GNG")
CODECS: dict[str, dict[str, Any]] = {
    "zeropp": {"weights": Int8(256), "gradients": Int4(128), "intra_gradients": Int8(128)},
    "inter only": {"weights": None, "gradients": Int4(128), "intra_gradients": None},
    "intra only": {"weights": None, "gradients": None, "intra_gradients": Int8(128)},
    "loco": {"weights": None, "gradients": Int4(128), "error_feedback": LoCo(beta=0.0, dtype=Int8(128))},
}


class Loud(nn.Module):
    """Small parameters whose gradients are a thousandth of those of the matrices between which they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(64, 96)
        self.norm = nn.LayerNorm(96)
        self.router = nn.Linear(96, 1, bias=False)
        self.after = nn.Linear(96, 64, bias=False)
        self.scalar = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        small = (self.router(x @ x.new_ones(64, 96) / 64).mean() + self.scalar).sum()
        return self.after(self.norm(self.before(x))).square().mean() + 1e-3 * small


def trained(adapter: Adapter, strategy: Any, micro_batches: int) -> dict[str, Tensor]:
    """In a worker: the gradients of a step."""
    torch.manual_seed(0)
    model = adapter.wrap(Loud().to(models.device()), strategy)
    for number in range(micro_batches):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(number)).to(models.device())
        with adapter.micro_batch(model, number == micro_batches - 1, False):
            model(x).backward()
    return adapter.full_gradients(model)


@over_pairs(adapter=ADAPTERS, scopes=SCOPES, codecs=CODECS, micro_batches=(1, 2))
def test_gradients_of_small_parameters_are_as_without_codecs(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str, codecs: dict[str, Any], micro_batches: int
) -> None:
    strategy = Strategy(scopes, gpus_per_node=2, **codecs)
    ours = pool(4).run(trained, adapter, strategy, micro_batches)[0]
    exact = pool(4).once(trained, adapter, STOCK, micro_batches)[0]
    for name, gradient in exact.items():
        if gradient.dim() < 2 or "router" in name:
            assert (ours[name] == 0).sum() <= (gradient == 0).sum()
            if strategy.weights is None:
                torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-8)
        assert cosine_similarity(ours[name].flatten(), gradient.flatten(), dim=0) > 0.98, name


def test_which_parameters_are_small() -> None:
    assert sent_exactly([(4096, 4096), (4096,), (64, 4096), (), (11008, 4096)]) == [False, True, True, True, False]
    assert sent_exactly([(8, 8), (8, 8)]) == [False, False]
    assert sent_exactly([]) == []


# ---- several dtypes in one unit


class Adapted(nn.Module):
    """A bf16 base with fp32 adapters, as PEFT makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64).to(torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 8, bias=False), nn.Linear(8, 64, bias=False)
        self.norm = nn.LayerNorm(64).to(torch.bfloat16).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x.bfloat16()) + self.up(self.down(x)).bfloat16()
        return self.norm(y)[..., :32].float().square().mean()


def two_dtypes(strategy: Any, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """In a worker: losses, and gradients of the first step."""
    torch.manual_seed(0)
    net = Adapted().to(models.device())
    model = Fsdp2().wrap(net, strategy)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
    losses, first = [], {}
    for step in range(steps):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(models.device())
        loss = model(x)
        loss.backward()
        first = first or Fsdp2().full_gradients(model)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, first


@over_each(scopes=["GGG", "IGG", "III", "NNG", "NGG"], weights=[Int8(64), Int4Delta(64, whole=Int8(64)), None])
def test_a_unit_may_have_two_dtypes(pool: Callable[[int], Pool], scopes: str, weights: Any) -> None:
    if scopes != "IGG" and isinstance(weights, Int4Delta):
        weights = Int8(32)
    strategy = Strategy(scopes, weights=weights, gpus_per_node=2)
    (losses, gradients), (stock_losses, stock) = (pool(4).once(two_dtypes, each, 4)[0] for each in (strategy, STOCK))
    if weights is None:
        assert losses == stock_losses
    for name, gradient in stock.items():
        assert cosine_similarity(gradients[name].flatten(), gradient.flatten(), dim=0) > 0.99, name
    assert losses[-1] < losses[0] * 1.5
