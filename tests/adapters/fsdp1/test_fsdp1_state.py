"""summon_full_params and the state dicts of optimizers, which only FullyShardedDataParallel has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import STOCK, Case
from harness.fsdp1 import Fsdp1
from harness.pool import Pool
from harness.training import logits, train
from harness.wiretap import wiretap
from torch.distributed.fsdp import FullOptimStateDictConfig, FullyShardedDataParallel as FSDP, StateDictType

from fsdp_zpp import Strategy
from fsdp_zpp.collectives.secondary_shard import StaleSecondaryError

HPZ, ZEROPP = Strategy("IGG", gpus_per_node=2), Strategy.zeropp(gpus_per_node=2)
orig_and_flat = pytest.mark.parametrize("adapter", [Fsdp1(), Fsdp1(use_orig_params=False)], ids=str)


def writeback(adapter: Fsdp1, strategy: Strategy) -> None:
    """In a worker: what is written in summon_full_params is what the next forward computes with."""
    used, fresh, stock = (adapter.make(Case(), s) for s in (strategy, strategy, STOCK))
    before = logits(used)  # so that there is a secondary shard to become stale
    for model in (used, fresh, stock):
        with torch.no_grad(), FSDP.summon_full_params(model):
            model.head.weight.mul_(3)
            model.blocks[1].up.bias.fill_(0.5)
    assert models.distance(adapter.full_weights(used), adapter.full_weights(stock)) == 0
    after = logits(used)
    assert torch.equal(after, logits(fresh))
    assert not torch.equal(after, before)
    if strategy.weights is None:
        assert torch.equal(after, logits(stock))


@pytest.mark.parametrize("strategy", [HPZ, ZEROPP], ids=["hpZ", "zeropp"])
@orig_and_flat
def test_the_next_forward_sees_what_summon_full_params_wrote(
    pool: Callable[[int], Pool], adapter: Fsdp1, strategy: Strategy
) -> None:
    pool(4).run(writeback, adapter, strategy)


def edit_without_writeback(rank0_only: bool) -> None:
    """In a worker: edits of summoned parameters that are not written back are no change."""
    model = Fsdp1().make(Case(), HPZ)
    tokens = models.batch(0, 0, rank=0)
    before = models.loss_of(model, tokens).item()
    with torch.no_grad(), FSDP.summon_full_params(model, writeback=False, rank0_only=rank0_only):
        if not rank0_only or dist.get_rank() == 0:
            model.blocks[0].up.weight.mul_(2)
    with wiretap(2) as tap:
        assert models.loss_of(model, tokens).item() == before
    assert tap.total("inter", "all_gather") == 0


@pytest.mark.parametrize("rank0_only", [True, False])
def test_edits_without_writeback_are_discarded(pool: Callable[[int], Pool], rank0_only: bool) -> None:
    pool(4).run(edit_without_writeback, rank0_only)


def not_looked_at(model: FSDP) -> None:
    """Nothing."""


def summoned(model: FSDP) -> None:
    """Summoned, and nothing written."""
    with FSDP.summon_full_params(model, writeback=False):
        pass


def saved(model: FSDP) -> None:
    """Its state dict taken."""
    model.state_dict()


def written_then(look: Callable[[FSDP], None]) -> str:
    """In a worker: what a forward says after parameters were replaced unannounced, which FSDP itself sees later."""
    model = Fsdp1().make(Case(), HPZ)
    logits(model)
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5
    look(model)
    try:
        logits(model)
    except StaleSecondaryError:
        return "raises"
    return "old weights"


@pytest.mark.parametrize("look", [not_looked_at, summoned, saved], ids=lambda look: look.__name__)
def test_summoning_or_saving_does_not_hide_an_unannounced_write(
    pool: Callable[[int], Pool], look: Callable[[FSDP], None]
) -> None:
    assert pool(4).run(written_then, look) == ["raises"] * 4


def summon_alone() -> float:
    """In a worker: in a group of this rank alone, the distance that a summon moves the weights by."""
    adapter = Fsdp1()
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    model = adapter.make(Case(), Strategy.zeropp(), groups[dist.get_rank()])
    train(adapter, model, Case(steps=2))
    before = adapter.full_weights(model)
    with FSDP.summon_full_params(model):
        pass
    return models.distance(adapter.full_weights(model), before)


def test_summoning_in_a_world_of_one_changes_nothing(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(summon_alone) == [0, 0]


def resume(kind: StateDictType) -> None:
    """In a worker: training resumed from model and optimizer state equals the uninterrupted run, bit for bit."""
    adapter, case = Fsdp1(), Case(optimizer="adamw", steps=3)
    full = kind is StateDictType.FULL_STATE_DICT
    everywhere = (kind, None, FullOptimStateDictConfig(rank0_only=False, offload_to_cpu=False)) if full else (kind,)
    straight = adapter.make(case, ZEROPP)
    optimizer = models.make_optimizer(case.optimizer, straight.parameters())
    train(adapter, straight, case, optimizer=optimizer)
    with FSDP.state_dict_type(straight, *everywhere):
        model_state = {name: value.clone() for name, value in straight.state_dict().items()}
        optimizer_state = FSDP.optim_state_dict(straight, optimizer)
    expected = train(adapter, straight, case, optimizer=optimizer, first_step=case.steps)

    resumed = adapter.make(case, ZEROPP)
    fresh = models.make_optimizer(case.optimizer, resumed.parameters())
    with FSDP.state_dict_type(resumed, *everywhere):
        resumed.load_state_dict(model_state)
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(resumed, fresh, optimizer_state))
    assert train(adapter, resumed, case, optimizer=fresh, first_step=case.steps) == expected
    assert models.distance(adapter.full_weights(resumed), adapter.full_weights(straight)) == 0


@pytest.mark.parametrize(
    "kind", [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT], ids=lambda kind: kind.name
)
def test_resume_is_exact(pool: Callable[[int], Pool], kind: StateDictType) -> None:
    pool(4).run(resume, kind)
