"""A model that is moved, cast, or given other parameters computes with the weights that it has then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import models
from harness.adapter import STOCK, Adapter, Case
from harness.adapters import LEVELS, WITH_FLAT, over_adapters, over_adapters_and_flat
from harness.covering import over_each
from harness.fsdp1 import Fsdp1
from harness.fsdp2 import Fsdp2
from harness.pool import Pool
from harness.training import logits, train
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from fsdp_zpp import Int4Delta, Strategy

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


@over_each(2, adapter=WITH_FLAT, levels=LEVELS)
def test_weights_come_along(pool: Callable[[int], Pool], adapter: Adapter, levels: str) -> None:
    pool(4).run(after_each_move, adapter, Strategy(levels, gpus_per_node=2))


def training_with_moves(adapter: Adapter, strategy: Strategy | None) -> dict[str, Tensor]:
    """In a worker: weights after a training in which the model is moved after each step."""
    model = adapter.make(Case(), strategy)
    train(adapter, model, Case(steps=3, micro_batches=2), after_step=lambda step, optimizer: copied(adapter, model))
    return adapter.full_weights(model)


@pytest.mark.parametrize("strategy", [HPZ, Strategy("NNG", gpus_per_node=2)], ids=["IGG", "NNG"])
@over_adapters
def test_training_goes_on_as_stock(pool: Callable[[int], Pool], adapter: Adapter, strategy: Strategy) -> None:
    ours, stock = (pool(4).run(training_with_moves, adapter, each) for each in (strategy, STOCK))
    assert max(map(models.distance, ours, stock)) <= 1e-6


def offloaded_by_hand() -> tuple[bool, bool]:
    """In a worker: flat parameters moved by their handles, as some trainers for reinforcement learning do it.

    Returns:
        Whether the weights are used that were there after that, once as they were, once changed meanwhile.
    """
    model = Fsdp1().make(Case(), HPZ)
    found = [logits(model)]
    for factor in (1.0, 1.5):
        for module in FullyShardedDataParallel.fsdp_modules(model):
            flat: Any = module._handle.flat_param
            module._handle.flat_param_to(dtype=torch.float64)  # stands for the CPU
            flat.data.mul_(factor)
            module._handle.flat_param_to(dtype=torch.float32)
            flat._local_shard = flat.data
        found.append(logits(model))
    return torch.equal(found[0], found[1]), not torch.equal(found[1], found[2])


def test_offload_by_handles(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(offloaded_by_hand) == [(True, True)] * 4


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


# ---- load_state_dict(assign=True)


def reshard(model: Any) -> None:
    """Have a model show its sharded parameters: a forward leaves some unsharded, its root at least."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def assign(model: Any, source: Any) -> None:
    """Give ``model`` the parameters of another one's state dict."""
    reshard(model)
    model.load_state_dict({name: value.clone() for name, value in source.state_dict().items()}, assign=True)


def trained_after_assignment(strategy: Strategy | None, dropped: bool) -> dict[str, Tensor]:
    """In a worker: weights after steps with assigned parameters, and logits after one that no backward announces.

    Args:
        strategy: How the model is sharded.
        dropped: Whether there are gradients before each step that ``zero_grad`` drops.
    """
    adapter = Fsdp2()
    model, source = adapter.make(Case(), strategy), adapter.make(Case(), strategy)
    train(adapter, model, Case(steps=1))
    train(adapter, source, Case(steps=1), first_step=9)
    assign(model, source)
    optimizer = models.make_optimizer("sgd", model.parameters())
    for step in range(2):
        if dropped:
            with adapter.micro_batch(model, False, False):
                (1000 * models.loss_of(model, models.batch(step, 5))).backward()
            optimizer.zero_grad()
        train(adapter, model, Case(steps=1, micro_batches=2, clip=None), optimizer=optimizer, first_step=step)
    logits(model)
    reshard(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return {"logits": logits(model), **adapter.full_weights(model)}


@pytest.mark.parametrize("levels", LEVELS)
def test_assigned_parameters_are_watched(pool: Callable[[int], Pool], levels: str) -> None:
    """FullyShardedDataParallel, stock too, ignores what is assigned; fully_shard's own zero_grad drops nothing."""
    ours = pool(4).run(trained_after_assignment, Strategy(levels, gpus_per_node=2), True)
    stock = pool(4).run(trained_after_assignment, STOCK, False)
    assert max(map(models.distance, ours, stock)) <= 1e-6


def heard_after_assignment() -> list[bool]:
    """In a worker: whether the units of a model hear of a step of an optimizer of assigned parameters."""
    adapter = Fsdp2()
    strategy = Strategy.zeropp(weights=Int4Delta(), gpus_per_node=2)
    model = adapter.make(Case(), strategy)
    logits(model)
    assign(model, adapter.make(Case(), strategy))
    logits(model)
    gathers = [module._fsdp_zpp_unit.gather for module in (model, *model.blocks)]
    fresh = [not gather.stale for gather in gathers]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return fresh + [gather.stale for gather in gathers]


def test_steps_of_assigned_parameters_are_heard(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(heard_after_assignment) == [[True] * 8] * 4
