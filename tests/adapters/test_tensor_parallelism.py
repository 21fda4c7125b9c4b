"""Data parallelism over two nodes of two, beside tensor parallelism over two ranks that neither dimension knows of."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from harness.adapter import Adapter
from harness.covering import SCOPES, over_adapters
from harness.pool import Pool
from tensor_parallel_nets import DATA_PARALLEL, TWO, batch, copies_that_differ, make, optimizer_of, trained, whole
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from fsdp_zpp import Int4, Int4Delta, Int8, LoCo, Strategy

STEPS = 4


@cache
def trained_alone() -> dict[str, Tensor]:
    """Train a net on this rank alone, on the batches of all data-parallel ranks."""
    net = make()
    optimizer = optimizer_of(net)
    for step in range(STEPS):
        for rank in range(DATA_PARALLEL):
            (net(batch(step, rank)).square().mean() / DATA_PARALLEL).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


def distance_to_one_rank(adapter: Adapter, strategy: Strategy) -> float:
    """In a worker: how far the trained weights are from those of a training on one rank."""
    model = trained(adapter, strategy, STEPS).model
    weights = {name: whole(value) for name, value in get_model_state_dict(model).items()}
    return max(float((weights[name] - value).abs().max()) for name, value in trained_alone().items())


def is_refused(adapter: Adapter, levels: str) -> bool:
    """Return whether torch can't do it: its NO_SHARD has no place for what is sharded already."""
    return str(adapter) == "fsdp1" and levels == "NNN"


@pytest.mark.parametrize("levels", SCOPES)
@over_adapters
def test_all_scopes_train_as_one_rank(pool: Callable[[int], Pool], adapter: Adapter, levels: str) -> None:
    if is_refused(adapter, levels):
        with pytest.raises(Exception, match="NO_SHARD, which can't be combined with another parallelism"):
            pool(8).run(distance_to_one_rank, adapter, Strategy(levels, **TWO))
        return
    assert max(pool(8).run(distance_to_one_rank, adapter, Strategy(levels, **TWO))) <= 1e-6


def differing(adapter: Adapter, strategy: Strategy) -> dict[str, float]:
    """In a worker: how far copies are apart after a training."""
    return copies_that_differ(trained(adapter, strategy))


CODED = [
    Strategy.zeropp(**TWO),
    Strategy.zeropp(weights=Int4Delta(), **TWO),
    Strategy("IIG", gradients=Int4(), error_feedback=LoCo(dtype=Int8(1024)), **TWO),
    Strategy("III", gradients=Int4(), error_feedback=LoCo(), **TWO),
    Strategy("NNG", weights=Int8(64), gradients=Int8(1024), intra_gradients=None, **TWO),
    Strategy("NNN", gradients=Int4(32), **TWO),
]


@pytest.mark.parametrize("strategy", CODED, ids=lambda each: f"{each.levels} {each.weights} {each.gradients}")
@over_adapters
def test_copies_stay_equal_bit_for_bit(pool: Callable[[int], Pool], adapter: Adapter, strategy: Strategy) -> None:
    if is_refused(adapter, strategy.levels):
        pytest.skip("refused")
    assert pool(8).run(differing, adapter, strategy) == [{}] * 8
