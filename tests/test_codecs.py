"""What codecs do to the weights that a model computes with and to its gradients, at most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from harness import models
from harness.adapter import STOCK, Adapter, Case, Precision
from harness.adapters import ADAPTERS, over_adapters
from harness.covering import over_pairs
from harness.fsdp1 import Fsdp1
from harness.pool import Pool
from harness.training import gradients, mean_loss, train
from torch import Tensor

from fsdp_zpp import Int4, Int8, Strategy

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
def test_codecs_keep_the_gradient(
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


def final_loss(adapter: Adapter, strategy: Strategy | None) -> float:
    """In a worker: the mean loss over all ranks after twenty steps."""
    case = Case(precision=Precision(torch.bfloat16, torch.float32), steps=20)
    model = adapter.make(case, strategy)
    train(adapter, model, case)
    return mean_loss(model, 0)


@over_adapters
def test_zeropp_trains(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    ours, stock = (pool(4).run(final_loss, adapter, s)[0] for s in (Strategy.zeropp(gpus_per_node=2), STOCK))
    assert ours == pytest.approx(stock, rel=0.01)
