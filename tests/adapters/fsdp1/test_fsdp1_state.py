"""Features of FullyShardedDataParallel alone: full parameters, states of optimizers, offloading, and its refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import messages, models
from harness.adapter import STOCK, Case
from harness.covering import over_each
from harness.fsdp1 import Fsdp1
from harness.messages import Refusal, Reply, assert_refused
from harness.pool import Pool, device_type
from harness.training import logits, train
from harness.wiretap import wiretap
from torch.distributed.fsdp import CPUOffload, FullOptimStateDictConfig, FullyShardedDataParallel as FSDP, StateDictType

from fsdp_zpp import Strategy
from fsdp_zpp.collectives.secondary_shard import StaleSecondaryError

FSDP1, FLAT = Fsdp1(), Fsdp1(use_orig_params=False)
TWO: Any = {"gpus_per_node": 2}
HPZ, ZEROPP = Strategy("IGG", **TWO), Strategy.zeropp(**TWO)


# ---- summon_full_params


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


@over_each(adapter=[FSDP1, FLAT], strategy={"hpZ": HPZ, "zeropp": ZEROPP})
def test_the_next_forward_sees_what_summon_full_params_wrote(
    pool: Callable[[int], Pool], adapter: Fsdp1, strategy: Strategy
) -> None:
    pool(4).run(writeback, adapter, strategy)


def edit_without_writeback() -> None:
    """In a worker: edits of summoned parameters that are not written back are no change."""
    model = FSDP1.make(Case(), HPZ)
    tokens = models.batch(0, 0, rank=0)
    before = models.loss_of(model, tokens).item()
    for rank0_only in (True, False):
        with torch.no_grad(), FSDP.summon_full_params(model, writeback=False, rank0_only=rank0_only):
            if not rank0_only or dist.get_rank() == 0:
                model.blocks[0].up.weight.mul_(2)
        with wiretap(2) as tap:
            assert models.loss_of(model, tokens).item() == before
        assert tap.total("inter", "all_gather") == 0


def test_edits_without_writeback_are_discarded(pool: Callable[[int], Pool]) -> None:
    pool(4).run(edit_without_writeback)


def summoned(model: FSDP) -> None:
    """Summoned, and nothing written."""
    with FSDP.summon_full_params(model, writeback=False):
        pass


def written_then(look: Callable[[FSDP], object]) -> str:
    """In a worker: what a forward says after parameters were replaced unannounced, which FSDP itself sees later."""
    model = FSDP1.make(Case(), HPZ)
    logits(model)
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5
    look(model)
    try:
        logits(model)
    except StaleSecondaryError:
        return "raises"
    return "old weights"


def all_written_then() -> list[str]:
    """In a worker: the same for a model that nothing looks at, and by each way to look at it."""
    return [written_then(look) for look in (lambda model: None, summoned, lambda model: model.state_dict())]


def test_summoning_or_saving_does_not_hide_an_unannounced_write(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(all_written_then) == [["raises"] * 3] * 4


def summon_alone() -> float:
    """In a worker: in a group of this rank alone, the distance that a summon moves the weights by."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    model = FSDP1.make(Case(), Strategy.zeropp(), groups[dist.get_rank()])
    train(FSDP1, model, Case(steps=2))
    before = FSDP1.full_weights(model)
    with FSDP.summon_full_params(model):
        pass
    return models.distance(FSDP1.full_weights(model), before)


def test_summoning_in_a_world_of_one_changes_nothing(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(summon_alone) == [0, 0]


# ---- states of optimizers


def resume(kind: StateDictType) -> None:
    """In a worker: training resumed from model and optimizer state equals the uninterrupted run, bit for bit."""
    case = Case(optimizer="adamw", steps=3)
    full = kind is StateDictType.FULL_STATE_DICT
    everywhere = (kind, None, FullOptimStateDictConfig(rank0_only=False, offload_to_cpu=False)) if full else (kind,)
    straight = FSDP1.make(case, ZEROPP)
    optimizer = models.make_optimizer(case.optimizer, straight.parameters())
    train(FSDP1, straight, case, optimizer=optimizer)
    with FSDP.state_dict_type(straight, *everywhere):
        model_state = {name: value.clone() for name, value in straight.state_dict().items()}
        optimizer_state = FSDP.optim_state_dict(straight, optimizer)
    expected = train(FSDP1, straight, case, optimizer=optimizer, first_step=case.steps)

    resumed = FSDP1.make(case, ZEROPP)
    fresh = models.make_optimizer(case.optimizer, resumed.parameters())
    with FSDP.state_dict_type(resumed, *everywhere):
        resumed.load_state_dict(model_state)
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(resumed, fresh, optimizer_state))
    assert train(FSDP1, resumed, case, optimizer=fresh, first_step=case.steps) == expected
    assert models.distance(FSDP1.full_weights(resumed), FSDP1.full_weights(straight)) == 0


@pytest.mark.parametrize(
    "kind", [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT], ids=lambda kind: kind.name
)
def test_resume_is_exact(pool: Callable[[int], Pool], kind: StateDictType) -> None:
    pool(4).run(resume, kind)


# ---- offloading by hand


def offloaded_by_hand() -> tuple[bool, bool]:
    """In a worker: flat parameters moved by their handles, as some trainers for reinforcement learning do it.

    Returns:
        Whether the weights are used that were there after that, once as they were, once changed meanwhile.
    """
    model = FSDP1.make(Case(), HPZ)
    found = [logits(model)]
    for factor in (1.0, 1.5):
        for module in FSDP.fsdp_modules(model):
            flat: Any = module._handle.flat_param  # torch's own, which those trainers reach for
            module._handle.flat_param_to(dtype=torch.float64)  # stands for the CPU
            flat.data.mul_(factor)
            module._handle.flat_param_to(dtype=torch.float32)
            flat._local_shard = flat.data
        found.append(logits(model))
    return torch.equal(found[0], found[1]), not torch.equal(found[1], found[2])


def test_weights_moved_by_their_handles_are_the_ones_that_are_used(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(offloaded_by_hand) == [(True, True)] * 4


# ---- bad input


def pair_of_groups() -> None:
    groups = dist.new_group([0, 1]), dist.new_group([2, 3])
    FSDP(models.make_net(), process_group=groups, sharding_strategy=HPZ)


def name_of_a_strategy() -> None:
    FSDP(models.make_net(), sharding_strategy="IGG", device_id=models.device())  # type: ignore[arg-type]


def local_state_dict() -> None:
    """Take one that torch fails to make on some ranks."""
    model = FLAT.make(Case(), Strategy("NII", **TWO))
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        model.state_dict()


REFUSALS: dict[str, Refusal] = {
    "HYBRID_SHARD's groups": (pair_of_groups, ValueError, "pair of groups"),
    "a string": (name_of_a_strategy, TypeError, "must be a Strategy such as Strategy.zeropp()"),
    "a local state dict": (local_state_dict, ValueError, "use SHARDED_STATE_DICT or FULL_STATE_DICT"),
}


if device_type() == "cpu":
    offloading = Fsdp1(arguments=(("cpu_offload", CPUOffload(offload_params=True)),))
    REFUSALS["offloading on a CPU"] = (lambda: offloading.make(Case(), HPZ), ValueError, "needs an accelerator")


def attempts() -> dict[str, Reply]:
    """In a worker: how each call is refused."""
    return {name: messages.attempt(refusal) for name, refusal in REFUSALS.items()}


def test_bad_input_is_refused_on_every_rank(pool: Callable[[int], Pool]) -> None:
    replies = pool(4).run(attempts)
    for name, refusal in REFUSALS.items():
        assert_refused([of_rank[name] for of_rank in replies], refusal)


def third_letters_mixed(others: str) -> None:
    """In a worker: the first forward of a block that is sharded inside of nodes, the rest otherwise."""
    net = models.make_net()
    net.blocks[0] = FSDP(net.blocks[0], sharding_strategy=Strategy("III", **TWO), device_id=models.device())
    model = FSDP(net, sharding_strategy=Strategy(others, **TWO), device_id=models.device())
    with pytest.raises(ValueError, match=r"blocks\.0 is sharded inside nodes"):
        models.loss_of(model, models.batch(0, 0))


@pytest.mark.parametrize("others", ["GGG", "NNN"])
def test_all_units_must_shard_over_one_group(pool: Callable[[int], Pool], others: str) -> None:
    pool(4).run(third_letters_mixed, others)
