"""26 of transformers' architectures: exact strategies train as stock does, and zeropp's gradients point its way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from foreign.architectures import ARCHITECTURES, config_of
from harness import models
from harness.adapter import STOCK
from harness.covering import over_each
from harness.fsdp2 import Fsdp2
from harness.pool import Pool
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from fsdp_zpp import Strategy
from fsdp_zpp.config.levels import LEGAL_LEVELS

pytestmark = pytest.mark.slow

STEPS = 20
TOLERANCE = 1e-5
"""Relative and absolute, of losses, norms and weights, as in transformers' comparison with DDP."""
COSINE = 0.97
NOISE = 1e-5
"""The share of the whole gradient's norm below which a parameter's has no direction but rounding's."""

CLEAR = 20.0
"""What routers are multiplied by: at random, experts are nearly tied, and any rounding of weights routes anew."""


def make(architecture: str, strategy: Strategy | None) -> nn.Module:
    """A model with random weights, the same on every rank, whose layers are units."""
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config_of(architecture)).to(models.device())
    for name, parameter in model.named_parameters():
        if name.endswith(("mlp.gate.weight", "mlp.router.weight", "block_sparse_moe.gate.weight")):
            parameter.data.mul_(CLEAR)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == 2 and type(module[0]) is not nn.Linear:
            if any("experts" in name for name, each in model.named_modules() if each is module):
                continue
            for layer in module:
                Fsdp2().apply(layer, strategy)
    return Fsdp2().apply(model, strategy)


def batch(rank: int) -> Tensor:
    """Tokens."""
    return torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(rank)).to(models.device())


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Cross entropy of the next token."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def trained(architecture: str, strategy: Strategy | None) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and norms of the gradient in all steps on one batch, and the weights in the end."""
    model: Any = make(architecture, strategy)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    tokens, values = batch(0), []
    for _ in range(STEPS):
        loss = loss_of(model, tokens)
        loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        values += [loss.item(), norm.full_tensor().item()]
        optimizer.step()
        optimizer.zero_grad()
    return values, Fsdp2().full_weights(model)


_stock: dict[str, Any] = {}


def check_training(architecture: str, strategy: Strategy) -> None:
    """In a worker: fail unless a strategy trains as stock does, on the same tokens on every rank."""
    if architecture not in _stock:
        _stock.clear()
        _stock[architecture] = trained(architecture, STOCK)
    values, weights = trained(architecture, strategy)
    expected_values, expected_weights = _stock[architecture]
    torch.testing.assert_close(torch.tensor(values), torch.tensor(expected_values), rtol=TOLERANCE, atol=TOLERANCE)
    for name, expected in expected_weights.items():
        torch.testing.assert_close(weights[name], expected, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


@over_each(rest=False, architecture=list(ARCHITECTURES), levels=LEGAL_LEVELS)
def test_exact_strategies_train_as_stock(pool: Callable[[int], Pool], architecture: str, levels: str) -> None:
    pool(4).run(check_training, architecture, Strategy(levels, gpus_per_node=2))


def cosines(architecture: str, strategy: Strategy) -> dict[str, float]:
    """In a worker: of the gradient of each parameter in the first step, other tokens on each rank, with stock's."""
    gradients = []
    for each in (strategy, STOCK):
        model = make(architecture, each)
        loss_of(model, batch(dist.get_rank())).backward()
        gradients.append(Fsdp2().full_gradients(model))
    ours, stock = gradients
    whole = torch.stack([value.norm() for value in stock.values()]).norm()
    return {
        name: F.cosine_similarity(ours[name].flatten(), value.flatten(), dim=0).item()
        for name, value in stock.items()
        if value.norm() > NOISE * whole
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients_of_zeropp_point_where_stock_s_do(pool: Callable[[int], Pool], architecture: str) -> None:
    found = pool(4).run(cosines, architecture, Strategy.zeropp(gpus_per_node=2))[0]
    assert {name: cosine for name, cosine in found.items() if cosine <= COSINE} == {}
