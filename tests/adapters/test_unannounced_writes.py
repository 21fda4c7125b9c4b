"""FSDP_ZPP_CHECK=1 notices every write that no event announces, however it is made, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from checking import checked_weights
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, over_each, over_pairs
from harness.pool import Pool
from harness.training import logits, train
from torch import Tensor

from fsdp_zpp import Int8, Strategy, invalidate
from fsdp_zpp.collectives.secondary_shard import StaleSecondaryError


def in_place(adapter: Adapter, parameters: list[Any]) -> None:
    for p in parameters:
        p.mul_(0.5)


def foreach(adapter: Adapter, parameters: list[Any]) -> None:
    torch._foreach_mul_(parameters, 0.5)


def average(adapter: Adapter, parameters: list[Any]) -> None:
    """As the exponential average of a teacher."""
    torch._foreach_lerp_(parameters, [torch.zeros_like(p) for p in parameters], 0.5)


def copied(adapter: Adapter, parameters: list[Any]) -> None:
    for p in parameters:
        p.copy_(p * 0.5)


def data(adapter: Adapter, parameters: list[Any]) -> None:
    for p in parameters:
        p.data.mul_(0.5)


def shards(adapter: Adapter, parameters: list[Any]) -> None:
    torch._foreach_mul_([adapter.local(p).detach() for p in parameters], 0.5)


def fused_kernel(adapter: Adapter, parameters: list[Any]) -> None:
    """Called by itself, so that there is no step."""
    local = [adapter.local(p).detach() for p in parameters]
    state: list[list[Tensor]] = [[torch.zeros_like(p) for p in local] for _ in range(2)]
    steps = [torch.tensor(1.0, device=p.device) for p in local]
    how = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False, "maximize": False}
    torch._fused_adamw_(local, [torch.ones_like(p) for p in local], *state, [], steps, lr=0.5, **how)


WAYS = [in_place, foreach, average, copied, data, shards, fused_kernel]
STRATEGIES = {scopes: Strategy(scopes, gpus_per_node=2) for scopes in ("IGG", "IIG", "NGG", "NNG", "NII")} | {
    "zeropp": Strategy.zeropp(gpus_per_node=2),
    "encoded NGG": Strategy("NGG", weights=Int8(64), gpus_per_node=2),
}


def written(adapter: Adapter, way: Callable[[Adapter, list[Any]], None], strategy: Strategy, announce: bool) -> str:
    """In a worker: the error of a forward after blocks were written to."""
    with checked_weights():
        model = adapter.make(Case(), strategy)
    before = logits(model)
    with torch.no_grad():
        way(adapter, [p for p in getattr(model, "module", model).blocks.parameters() if adapter.local(p).numel()])
    if announce:
        invalidate(model)
    try:
        return "ignored" if torch.equal(logits(model), before) else "used"
    except StaleSecondaryError as error:
        return str(error)


@over_pairs(adapter=ADAPTERS, way=WAYS, strategy=STRATEGIES)
def test_every_write_is_noticed(
    pool: Callable[[int], Pool], adapter: Adapter, way: Callable[[Adapter, list[Any]], None], strategy: Strategy
) -> None:
    for message in pool(4).run(written, adapter, way, strategy, False):
        assert "the weights of blocks.0 were changed" in message
    assert pool(4).run(written, adapter, way, strategy, True) == ["used"] * 4


def checked_training(adapter: Adapter, strategy: Strategy) -> bool:
    """In a worker: whether training under the check goes as without."""
    weights = []
    for on in (True, False):
        with checked_weights(on):
            model = adapter.make(Case(), strategy)
        case = Case(steps=2, micro_batches=2, optimizer="adamw-fused")
        train(adapter, model, case, after_step=lambda step, optimizer, model=model: logits(model))
        adapter.load_from(model, model, adapter.state_dict_kinds[0])
        logits(model)
        weights.append(adapter.full_weights(model))
    return all(torch.equal(weights[0][name], value) for name, value in weights[1].items())


@over_each(adapter=ADAPTERS, strategy=STRATEGIES)
def test_training_is_the_same(pool: Callable[[int], Pool], adapter: Adapter, strategy: Strategy) -> None:
    assert pool(4).run(checked_training, adapter, strategy) == [True] * 4
