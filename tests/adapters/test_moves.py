"""A model that is moved or cast computes with the weights that it has then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import models
from harness.adapter import STOCK, Adapter, Case
from harness.covering import SCOPES, WITH_FLAT, over_adapters, over_adapters_and_flat, over_each
from harness.fsdp1 import Fsdp1
from harness.pool import Pool
from harness.training import logits, train
from torch import Tensor

from fsdp_zpp import Strategy

HPZ = Strategy("IGG", gpus_per_node=2)


def copied(adapter: Adapter, model: Any) -> None:
    """To other memory and back, as for an offload to the CPU between steps."""
    model._apply(torch.clone)
    model._apply(torch.clone)


def written_elsewhere(adapter: Adapter, model: Any) -> None:
    """Weights change while they are somewhere else."""
    model._apply(torch.clone)
    with torch.no_grad():
        for parameter in model.parameters():
            adapter.local(parameter).mul_(1.5)
    model._apply(torch.clone)


def scaled(adapter: Adapter, model: Any) -> None:
    """The move itself changes the weights."""
    model._apply(lambda value: value * 1.5)


def rounded(adapter: Adapter, model: Any) -> None:
    """Through 16 bits and back."""
    model.half()
    model.float()


def after_each_move(adapter: Adapter, strategy: Strategy) -> None:
    """In a worker: what is computed after a move, and after a step there, is what a net that is not sharded computes.

    Stock FullyShardedDataParallel is no oracle: it goes back to the memory of before the move.
    """
    model = adapter.make(Case(), strategy)
    train(adapter, model, Case(steps=1))
    for i, move in enumerate((copied, written_elsewhere, scaled, rounded)):
        before = adapter.full_weights(model)
        logits(model)
        move(adapter, model)
        if move is copied:  # a step at the new place, which no forward precedes
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter).add_(parameter.detach())
            torch.optim.SGD(model.parameters(), lr=0.5).step()
            model.zero_grad()
        expected = {
            name: value.half().float() if move is rounded else value * (0.5 if move is copied else 1.5)
            for name, value in before.items()
        }
        whole = models.make_net()
        whole.load_state_dict(expected, strict=False)
        for ours, theirs in zip(whole.buffers(), model.buffers(), strict=True):
            ours.copy_(theirs)
        found = logits(model)
        torch.testing.assert_close(found, logits(whole), rtol=1e-6, atol=1e-6)  # another order of sums
        assert models.distance(adapter.full_weights(model), expected) <= 1e-7, move.__name__
        train(adapter, model, Case(steps=1), first_step=i)
        assert models.distance(adapter.full_weights(model), expected) > 0.01


@over_each(2, adapter=WITH_FLAT, scopes=SCOPES)
def test_a_moved_model_computes_and_trains_with_the_weights_that_it_has_then(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str
) -> None:
    pool(4).run(after_each_move, adapter, Strategy(scopes, gpus_per_node=2))


def training_with_moves(adapter: Adapter, strategy: Strategy | None) -> dict[str, Tensor]:
    """In a worker: weights after a training in which the model is moved after each step."""
    model = adapter.make(Case(), strategy)
    train(adapter, model, Case(steps=3, micro_batches=2), after_step=lambda step, optimizer: copied(adapter, model))
    return adapter.full_weights(model)


@pytest.mark.parametrize("strategy", [HPZ, Strategy("NNG", gpus_per_node=2)], ids=["IGG", "NNG"])
@over_adapters
def test_a_training_with_moves_equals_stock(pool: Callable[[int], Pool], adapter: Adapter, strategy: Strategy) -> None:
    ours, stock = (pool(4).run(training_with_moves, adapter, each) for each in (strategy, STOCK))
    assert max(map(models.distance, ours, stock)) <= 1e-6


def cast(adapter: Adapter, strategy: Strategy | None) -> tuple[str, str]:
    """In a worker: what a forward raises of a model that was cast after its first one, and what that says."""
    model = adapter.make(Case(), strategy)
    logits(model)
    model.half()
    try:
        logits(model)
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


@pytest.mark.parametrize("strategy", [HPZ, Strategy.zeropp(gpus_per_node=2)], ids=["hpZ", "zeropp"])
@over_adapters_and_flat
def test_casts_that_stock_refuses_are_refused(
    pool: Callable[[int], Pool], adapter: Adapter, strategy: Strategy
) -> None:
    for (ours, message), (stock, _) in zip(
        *(pool(4).run(cast, adapter, each) for each in (strategy, STOCK)), strict=True
    ):
        assert stock != "no error"
        if isinstance(adapter, Fsdp1):  # torch leaves it to the backend, and each raises an error of its own
            assert ours == "ValueError"
            assert "were cast from torch.float32 to torch.float16 after their first forward" in message
        else:
            assert ours == stock
