"""Bounds on what codecs do to the weights that a model computes with, to its gradients and to its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import STOCK, Adapter, Case, Precision
from harness.covering import ADAPTERS, SCOPES, over_adapters, over_each, over_pairs
from harness.fsdp1 import Fsdp1
from harness.pool import Pool
from harness.training import gradients, loss_after, mean_loss
from torch import Tensor

from fsdp_zpp import Int4, Int8, Strategy
from fsdp_zpp.config.levels import LEGAL_LEVELS

BF16 = Precision(torch.bfloat16, torch.bfloat16)


def weights_seen(adapter: Adapter, case: Case, strategy: Strategy) -> list[Tensor]:
    """In a worker: a matrix as it is computed with in forward, recomputation and evaluation."""
    model = adapter.make(case, strategy)
    seen: list[Tensor] = []
    block = next(module for module in model.modules() if isinstance(module, models.Block))
    block.up.register_forward_pre_hook(lambda module, args: seen.append(module.weight.detach().cpu().clone()))
    models.loss_of(model, models.batch(0, 0)).backward()
    mean_loss(model, 0)
    return seen


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy.zeropp(gpus_per_node=2),
        Strategy("IGG", weights=Int8(256), gpus_per_node=2),
        Strategy("GGG", weights=Int4(32), gpus_per_node=1),
    ],
    ids=["zeropp", "int8", "int4"],
)
@pytest.mark.parametrize(
    ("adapter", "checkpointing"),
    [*((adapter, "inside no_reentrant") for adapter in ADAPTERS), (Fsdp1(), "outside no_reentrant")],
    ids=str,
)
def test_all_ranks_compute_with_the_same_weights(
    pool: Callable[[int], Pool], adapter: Adapter, checkpointing: str, strategy: Strategy
) -> None:
    full, half = (
        pool(4).run(weights_seen, adapter, Case(checkpointing=checkpointing, precision=precision), strategy)
        for precision in (None, BF16)
    )
    expected = full[0][0]
    for seen in full:
        assert len(seen) == 3
        assert all(torch.equal(weight, expected) for weight in seen)
    for seen in half:  # encoded from the full-precision weights, not from their 16-bit copy
        assert len(seen) == 3
        assert all(torch.equal(weight, expected.bfloat16()) for weight in seen)
    exact = models.make_net().blocks[0].up.weight.detach().cpu()
    # A block of the layer norm's ones reaches into the matrix behind it, so steps are at most as large as theirs.
    step = 1 / (127 if isinstance(strategy.weights, Int8) else 7)
    assert 0 < (expected - exact).abs().max() <= step / 2 * (1 + 1e-5)


def gradient_distances(adapter: Adapter, case: Case, strategy: Strategy) -> tuple[float, float]:
    """In a worker: the distance of the whole gradient from stock, and the largest of a single parameter's."""
    ours, stock = gradients(adapter, case, strategy), gradients(adapter, case, STOCK)
    whole = [torch.cat([g[name].flatten() for name in stock]) for g in (ours, stock)]
    return models.distance({"": whole[0]}, {"": whole[1]}), models.distance(ours, stock)


ENCODED = {
    "int8 gradients": (Strategy("GGG", gradients=Int8(64)), 0.02, 0.02),
    "int8 gradients hpZ": (Strategy("IGG", gradients=Int8(64)), 0.02, 0.02),
    "int4 gradients": (Strategy("IGG", gradients=Int4(32)), 0.2, 0.3),
    "int4 between only": (Strategy("GGG", gradients=Int4(32), intra_gradients=None), 0.2, 0.3),
    "int8 weights": (Strategy("GGG", weights=Int8(64)), 0.05, 0.05),
}
"""Strategies, and how far the whole gradient and that of a parameter may be from stock's."""


@over_pairs(adapter=ADAPTERS, encoded=ENCODED, gpus_per_node=[1, 2, 4], precision={"fp32": None, "bf16": BF16})
def test_encoded_gradients_are_near_stocks(
    pool: Callable[[int], Pool],
    adapter: Adapter,
    encoded: tuple[Strategy, float, float],
    gpus_per_node: int,
    precision: Precision | None,
) -> None:
    """A wrong mean, order or dtype would be off by far more than quantization noise."""
    strategy, bound, parameter_bound = encoded
    strategy = replace(strategy, gpus_per_node=gpus_per_node)
    distances = pool(4).run(gradient_distances, adapter, Case(precision=precision), strategy)
    for whole, parameter in distances:
        assert whole <= bound
        assert parameter <= parameter_bound
        assert (parameter > 1e-4) == (gpus_per_node < 4)  # on one node nothing is encoded


@over_adapters
def test_zeropp_ends_at_stocks_loss(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    case = Case(precision=Precision(torch.bfloat16, torch.float32), steps=20)
    ours, stock = (pool(4).run(loss_after, adapter, case, s)[0] for s in (Strategy.zeropp(gpus_per_node=2), STOCK))
    assert ours == pytest.approx(stock, rel=0.01)


stock_gradients = cache(partial(gradients, case=Case(), strategy=STOCK))


def gradients_beside_stock(adapter: Adapter, strategy: Strategy) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """In a worker: our gradients and torch's."""
    return gradients(adapter, Case(), strategy), stock_gradients(adapter)


@over_each(adapter=ADAPTERS, scopes=LEGAL_LEVELS)
def test_encoded_gradients_of_all_scopes_are_near_stocks(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str
) -> None:
    strategy = Strategy(scopes, gradients=Int8(64), gpus_per_node=2)
    for ours, exact in pool(4).run(gradients_beside_stock, adapter, strategy):
        error = sum((ours[name] - g).square().sum() for name, g in exact.items()).sqrt()
        norm = sum(g.square().sum() for g in exact.values()).sqrt()
        # Half a step of 1/127 of a block's largest value, a hop; three of them where sums are gathered again.
        assert 0 < error <= 0.02 * norm


def encoded_run(adapter: Adapter, strategy: Strategy | None) -> float:
    """In a worker: the loss on one batch after training on it."""
    model = adapter.make(Case(), strategy)
    optimizer = models.make_optimizer("sgd", model.parameters())
    for _ in range(8):
        loss = models.loss_of(model, models.batch(0, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(loss.detach())
    return loss.item() / dist.get_world_size()


stock_run = cache(partial(encoded_run, strategy=STOCK))


def encoded_beside_stock(adapter: Adapter, strategy: Strategy) -> tuple[float, float]:
    """In a worker: the losses of ours and of stock."""
    return encoded_run(adapter, strategy), stock_run(adapter)


@over_each(adapter=ADAPTERS, scopes=SCOPES)
def test_encoded_strategies_of_all_scopes_end_at_stocks_loss(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str
) -> None:
    strategy = Strategy(scopes, weights=Int8(64), gradients=Int4(32), gpus_per_node=2)
    for ours, stock in pool(4).run(encoded_beside_stock, adapter, strategy):
        assert ours == pytest.approx(stock, rel=0.01)
