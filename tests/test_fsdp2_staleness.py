"""Every way to change weights that an event announces is seen by the next forward; any other is an error."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.fully_sharded import STOCK, Case, full_weights, logits, make, make_optimizer, shard, train
from harness.pool import Pool
from harness.wiretap import wiretap

from fsdp_zpp import Strategy, invalidate
from fsdp_zpp.fsdp2 import fully_shard
from fsdp_zpp.weight_gather import StaleSecondaryError

HPZ = Strategy("IGG", gpus_per_node=2)


def evaluate(model: Any) -> None:
    """A forward without backward."""
    logits(model)


def steps_of(kind: str, strategy: Strategy | None) -> dict[str, torch.Tensor]:
    """In a worker: the weights after a few steps of some unusual kind."""
    case = Case(steps=3)
    model = make(case, strategy)
    if kind == "not a torch optimizer":
        train(model, case, optimizer=models.PlainSgd(model))
    elif kind == "a torch optimizer, then another":
        train(model, case)
        train(model, case, optimizer=models.PlainSgd(model), first_step=3)
    elif kind == "optimizer of what this rank holds":
        held = [p for p in model.parameters() if p.to_local().numel()]
        train(model, Case(steps=3, micro_batches=2, sync_all=True), optimizer=torch.optim.SGD(held, lr=0.1))
    elif kind == "two steps for one backward":
        optimizer = make_optimizer("sgd", model)
        train(model, case, optimizer=optimizer, after_step=lambda step: optimizer.step())
    elif kind == "forwards between":
        optimizer = make_optimizer("sgd", model)
        train(model, case, optimizer=optimizer, after_step=lambda step: evaluate(model))
    elif kind == "two optimizers":
        parameters = list(model.parameters())
        optimizers = [torch.optim.SGD(part, lr=0.1) for part in (parameters[:4], parameters[4:])]
        for step in range(3):
            models.loss_of(model, models.batch(step, 0)).backward()
            optimizers[step % 2].step()
            model.zero_grad()
    return full_weights(model)


def distance_of(kind: str) -> float:
    """In a worker: the distance from torch's own."""
    return models.distance(steps_of(kind, HPZ), steps_of(kind, STOCK))


KINDS = [
    "not a torch optimizer",
    "a torch optimizer, then another",
    "optimizer of what this rank holds",
    "two steps for one backward",
    "forwards between",
    "two optimizers",
]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_never_stale(pool: Callable[[int], Pool], kind: str) -> None:
    assert max(pool(4).run(distance_of, kind)) <= 1e-6


def step_after_other_forwards() -> float:
    """In a worker: the distance from a net that is not sharded; the root is kept unsharded by a forward."""
    nets = [models.make_net(), make(Case(), HPZ)]
    for net in nets:
        optimizer = make_optimizer("sgd", net)
        for step in range(3):
            models.loss_of(net, models.batch(step, 0)).backward()
            if net is nets[0]:
                for p in net.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()
            models.loss_of(net, models.batch(step, 1))
            optimizer.step()
            optimizer.zero_grad()
    return models.distance(full_weights(nets[1]), {name: p.detach().cpu() for name, p in nets[0].named_parameters()})


def test_step_after_other_forwards(pool: Callable[[int], Pool]) -> None:
    assert max(pool(4).run(step_after_other_forwards)) <= 1e-6


def write_behind_its_back(announce: bool) -> str:
    """In a worker: change weights in place between forwards."""
    model = make(Case(), HPZ)
    parameters = list(model.parameters())
    before = logits(model)
    with torch.no_grad():
        for p in parameters:
            p.mul_(1.5)
    if announce:
        invalidate(model)
    try:
        after = logits(model)
    except StaleSecondaryError as error:
        return str(error)
    return "ignored" if torch.equal(after, before) else "used"


def test_unannounced_write_raises(pool: Callable[[int], Pool]) -> None:
    for message in pool(4).run(write_behind_its_back, False):
        assert "the weights of blocks.0 were changed" in message
        assert "call fsdp_zpp.invalidate(model) on every rank" in message


def test_announced_write_is_used(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(write_behind_its_back, True) == ["used"] * 4


def manual_unshard() -> None:
    """In a worker: unshard() by hand, before and after the first forward, gathers the weights of the moment."""
    model = make(Case(), HPZ)
    block = model.blocks[0]
    initial = {name: p.detach().clone() for name, p in models.make_net().blocks[0].named_parameters()}
    block.unshard()
    assert all(torch.equal(p, initial[name]) for name, p in block.named_parameters())
    block.reshard()
    train(model, Case(steps=2))
    expected = {name: p.full_tensor() for name, p in block.named_parameters()}
    block.unshard(async_op=True).wait()
    assert all(torch.equal(p, expected[name]) for name, p in block.named_parameters())
    assert not torch.equal(expected["up.weight"], initial["up.weight"])
    before = logits(model)
    model.blocks[1].unshard(async_op=True)  # of the weights of now, while the next forward needs the changed ones
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(2)
    invalidate(model)
    assert not torch.equal(logits(model), before)


def test_manual_unshard(pool: Callable[[int], Pool]) -> None:
    pool(4).run(manual_unshard)


def mixed_with_stock(optimizer: str) -> float:
    """In a worker: only the blocks have a strategy, and the root is torch's own."""
    case = Case(steps=3)

    def mixed() -> Any:
        net = models.make_net()
        for block in net.blocks[:2]:
            fully_shard(block, strategy=HPZ)
        shard(net, STOCK, Case(wrap_blocks=False))
        return net

    weights = []
    for model in (mixed(), make(Case(), STOCK)):
        train(model, case, optimizer=models.PlainSgd(model) if optimizer == "plain" else None)
        weights.append(full_weights(model))
    return models.distance(*weights)


@pytest.mark.parametrize("optimizer", ["torch", "plain"])
def test_part_of_a_model(pool: Callable[[int], Pool], optimizer: str) -> None:
    assert max(pool(4).run(mixed_with_stock, optimizer)) <= 1e-6


def two_models() -> None:
    """In a worker: a step of one model leaves the other's secondary shards as they are."""
    case = Case(steps=2)
    first, second = make(case, HPZ), make(case, Strategy.zeropp(gpus_per_node=1))
    for model in (first, second):
        train(model, case)
    logits(second)
    train(first, case, first_step=2)
    with wiretap(1) as tap:
        logits(second)
    assert tap.total("inter") == 0


def test_two_models_in_one_process(pool: Callable[[int], Pool]) -> None:
    pool(4).run(two_models)


def leftovers() -> int:
    """In a worker: optimizer hooks that outlive their models."""
    from torch.optim import optimizer

    before = len(optimizer._global_optimizer_post_hooks)
    for _ in range(3):
        model = make(Case(), HPZ)
        models.loss_of(model, models.batch(0, 0)).backward()
        del model
        gc.collect()
    return len(optimizer._global_optimizer_post_hooks) - before


def test_models_leave_no_hooks_behind(pool: Callable[[int], Pool]) -> None:
    assert max(pool(2).run(leftovers)) <= 1  # the last model may still be alive


def groups_made(blocks: int) -> int:
    """In a worker: process groups that a model adds."""
    import torch.distributed.distributed_c10d as c10d

    before = len(c10d._world.pg_map)
    net = models.make_net(blocks=blocks)
    for block in net.blocks:
        fully_shard(block, strategy=Strategy("IGG", gpus_per_node=2))
    fully_shard(net, strategy=Strategy("IGG", gpus_per_node=2))
    logits(net)
    return len(c10d._world.pg_map) - before


def test_process_groups_do_not_grow_with_layers() -> None:
    pool = Pool(4)
    try:
        first, second = pool.run(groups_made, 2), pool.run(groups_made, 6)
    finally:
        pool.stop()
    assert max(first) <= 4
    assert second == [0] * 4


def inference_between(strategy: Strategy | None) -> dict[str, torch.Tensor]:
    """In a worker: evaluation in inference mode, whose secondary shards the next training step starts from.

    torch has the first forward of all not be in inference mode.
    """
    case = Case(steps=2)
    model = make(case, strategy)
    optimizer = make_optimizer("sgd", model)
    for step in range(3):
        train(model, case, optimizer=optimizer, first_step=2 * step)
        with torch.inference_mode():
            models.loss_of(model, models.batch(step, 5))
    return full_weights(model)


@pytest.mark.parametrize("strategy", [HPZ, Strategy("IGG", gpus_per_node=1)], ids=["2x2", "4x1"])
def test_inference_mode_between(pool: Callable[[int], Pool], strategy: Strategy) -> None:
    ours, stock = pool(4).run(inference_between, strategy), pool(4).run(inference_between, STOCK)
    assert max(map(models.distance, ours, stock)) <= 1e-6


def inference_encoded() -> None:
    """In a worker: the same with codecs."""
    assert all(value.isfinite().all() for value in inference_between(Strategy.zeropp(gpus_per_node=2)).values())


def test_inference_mode_with_codecs(pool: Callable[[int], Pool]) -> None:
    pool(4).run(inference_encoded)
