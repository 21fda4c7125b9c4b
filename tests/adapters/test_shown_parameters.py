"""Between steps, modules show the parameters that they would show under stock FSDP, whatever a scope keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import models
from harness.adapter import STOCK, Adapter, Case
from harness.covering import ADAPTERS, SCOPES, over_pairs
from harness.fsdp2 import Fsdp2
from harness.pool import Pool
from harness.training import logits, train
from harness.wiretap import wiretap
from torch import nn
from torch.distributed.tensor import Shard

from fsdp_zpp import Strategy, invalidate

EVERY_SCOPE = (*SCOPES, "NGG", "NII")
CASE = Case(model=(("width", 24), ("hidden", 40)))
"""Sizes that can be cut along any dimension."""


def evaluated(adapter: Adapter, model: Any) -> None:
    logits(model)


def evaluated_after_a_step(adapter: Adapter, model: Any) -> None:
    train(adapter, model, Case(steps=1))
    logits(model)
    logits(model)


def accumulated(adapter: Adapter, model: Any) -> None:
    with adapter.micro_batch(model, False, False):
        models.loss_of(model, models.batch(0, 0)).backward()


def synchronized(adapter: Adapter, model: Any) -> None:
    models.loss_of(model, models.batch(0, 0)).backward()


def run_forward(adapter: Adapter, model: Any) -> None:
    models.loss_of(model, models.batch(0, 0))


def frozen_and_synchronized(adapter: Adapter, model: Any) -> None:
    getattr(model, "module", model).blocks[1].requires_grad_(False)
    models.loss_of(model, models.batch(0, 0)).backward()
    logits(model)


WAYS = [evaluated, evaluated_after_a_step, accumulated, synchronized, run_forward, frozen_and_synchronized]


def kinds(adapter: Adapter, model: Any) -> Any:
    """What modules show, and what their own state dicts hold."""
    shown = {name: (type(p), type(p.data), p.requires_grad) for name, p in model.named_parameters()}
    if adapter.torch_name == "FullyShardedDataParallel":  # whose shards' shapes are those of the scope
        return shown
    shapes = {name: p.shape for name, p in model.named_parameters()}
    states = [{name: type(value) for name, value in block.state_dict().items()} for block in model.blocks]
    return shown, shapes, states, kinds_shown_after_state_dicts(model)


def kinds_shown_after_state_dicts(model: Any) -> Any:
    model.state_dict()
    return {name: (type(p), p.requires_grad) for name, p in model.named_parameters()}


def kinds_after(way: Callable[[Adapter, Any], None], adapter: Adapter, strategy: Strategy | None) -> Any:
    model = adapter.make(CASE, strategy)
    way(adapter, model)
    return kinds(adapter, model)


stock_kinds_after = functools.cache(kinds_after)


def shows_as_stock(way: Callable[[Adapter, Any], None], adapter: Adapter, strategy: Strategy) -> bool:
    """In a worker."""
    ours, stock = kinds_after(way, adapter, strategy), stock_kinds_after(way, adapter, STOCK)
    assert ours == stock, (ours, stock)
    return True


@over_pairs(adapter=ADAPTERS, way=WAYS, scopes=EVERY_SCOPE)
def test_modules_show_what_stock_would_show(
    pool: Callable[[int], Pool], adapter: Adapter, way: Callable[[Adapter, Any], None], scopes: str
) -> None:
    assert all(pool(4).run(shows_as_stock, way, adapter, Strategy(scopes, gpus_per_node=2)))


def written_after_an_evaluation(adapter: Adapter, strategy: Strategy | None) -> Any:
    """In a worker: logits once blocks were written to in place, through what they show, and announced."""
    model = adapter.make(Case(), strategy)
    logits(model)
    with torch.no_grad():
        for p in getattr(model, "module", model).blocks.parameters():
            p.mul_(1.5)
    if strategy is not STOCK:
        invalidate(model)
    return logits(model)


def write_reaches_the_weights(adapter: Adapter, strategy: Strategy) -> float:
    ours, stock = written_after_an_evaluation(adapter, strategy), written_after_an_evaluation(adapter, STOCK)
    return float((ours - stock).abs().max())


def gathered_after_an_evaluation(adapter: Adapter, strategy: Strategy) -> int:
    """In a worker: bytes that gathers of forwards and of an accumulating backward send once weights are kept."""
    model = adapter.make(CASE, strategy)
    logits(model)
    with wiretap(2) as tap:
        logits(model)
        logits(model)
    return tap.total("inter") + tap.total("intra")


KEEPING = [scopes for scopes in EVERY_SCOPE if scopes[0] == "N" and scopes != "NNN"]


@over_pairs(adapter=ADAPTERS, scopes=KEEPING)
def test_what_is_kept_is_put_back_not_gathered(pool: Callable[[int], Pool], adapter: Adapter, scopes: str) -> None:
    strategy = Strategy(scopes, gpus_per_node=2)
    assert pool(4).run(gathered_after_an_evaluation, adapter, strategy) == [0] * 4
    assert max(pool(4).run(write_reaches_the_weights, adapter, strategy)) <= 1e-5


def along_the_last_dimension(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 4 == 0 else None


@pytest.mark.parametrize("way", WAYS)
def test_what_torch_unshards_is_shown_as_by_stock(
    pool: Callable[[int], Pool], way: Callable[[Adapter, Any], None]
) -> None:
    adapter = Fsdp2(arguments=(("shard_placement_fn", along_the_last_dimension),))
    strategy = Strategy("NGG", gpus_per_node=2)
    assert all(pool(4).run(shows_as_stock, way, adapter, strategy))
    assert pool(4).run(gathered_after_an_evaluation, adapter, strategy) == [0] * 4
