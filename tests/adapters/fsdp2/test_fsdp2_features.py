"""What only fully_shard composes with: recovery, hooks of its all-reduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import models
from harness.adapter import STOCK, Case
from harness.fsdp2 import Fsdp2
from harness.pool import Pool
from harness.training import train
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_zpp import Strategy

HPZ = Strategy("IGG", gpus_per_node=2)


def recover(strategy: Strategy) -> None:
    """In a worker: after an exception in a second micro-batch, reset_iter_state() and the next iteration."""
    adapter, case = Fsdp2(), Case(steps=1)
    model, other = adapter.make(case, strategy), adapter.make(case, STOCK)
    model.set_requires_gradient_sync(False)
    models.loss_of(model, models.batch(1, 0)).backward()
    model.set_requires_gradient_sync(True)

    def fail(module: nn.Module, args: Any) -> None:
        raise FloatingPointError

    handle = model.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(FloatingPointError):
        models.loss_of(model, models.batch(0, 0))
    handle.remove()
    model.reset_iter_state()
    for each in (model, other):
        train(adapter, each, case)
    assert models.distance(adapter.full_weights(model), adapter.full_weights(other)) <= 1e-6


@pytest.mark.skipif(not hasattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state"), reason="new in torch 2.13")
@pytest.mark.parametrize("strategy", [HPZ, Strategy(gpus_per_node=4), Strategy("NNN", gpus_per_node=2)], ids=str)
def test_reset_iter_state_recovers_from_an_exception(pool: Callable[[int], Pool], strategy: Strategy) -> None:
    pool(4).run(recover, strategy)


def users_hook(strategy: Strategy, hooked: bool) -> dict[str, Tensor]:
    """In a worker: gradients of a model whose all-reduce hook doubles them."""
    adapter = Fsdp2()
    model = adapter.make(Case(), strategy)
    if hooked:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(lambda gradient: gradient.mul_(2))
    models.loss_of(model, models.batch(0, 0)).backward()
    return adapter.full_gradients(model)


@pytest.mark.parametrize("strategy", [HPZ, Strategy.zeropp(gpus_per_node=2), Strategy("III", gpus_per_node=2)], ids=str)
def test_a_users_all_reduce_hook_sees_the_reduced_gradient(pool: Callable[[int], Pool], strategy: Strategy) -> None:
    plain, doubled = (pool(4).run(users_hook, strategy, hooked) for hooked in (False, True))
    for ours, theirs in zip(plain, doubled, strict=True):
        assert all(torch.equal(2 * ours[name], theirs[name]) for name in ours)
