"""Every way to change weights that an event announces is seen by the next forward; any other is an error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fuzz.optimizers import ScheduleFree
from harness import models
from harness.adapter import STOCK, Adapter, Case
from harness.covering import ADAPTERS, SCOPES, over_adapters, over_each
from harness.pool import Pool, shared_folder
from harness.training import logits, train
from harness.wiretap import wiretap
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from fsdp_zpp import Strategy, invalidate
from fsdp_zpp.collectives.secondary_shard import StaleSecondaryError

HPZ = Strategy("IGG", gpus_per_node=2)


def not_a_torch_optimizer(adapter: Adapter, model: Any) -> None:
    """An optimizer that announces no steps."""
    train(adapter, model, Case(steps=3), optimizer=models.PlainSgd(model))


def a_torch_optimizer_then_another(adapter: Adapter, model: Any) -> None:
    """The second one announces no steps."""
    train(adapter, model, Case(steps=3))
    train(adapter, model, Case(steps=3), optimizer=models.PlainSgd(model), first_step=3)


def optimizer_of_what_this_rank_holds(adapter: Adapter, model: Any) -> None:
    """Some ranks' optimizers hold nothing of some units."""
    held = [p for p in model.parameters() if adapter.local(p).numel()]
    case = Case(steps=3, micro_batches=2, synced=True)
    train(adapter, model, case, optimizer=torch.optim.SGD(held, lr=0.1))


def two_steps_for_one_backward(adapter: Adapter, model: Any) -> None:
    """No backward precedes the second step."""
    train(adapter, model, Case(steps=3), after_step=lambda step, optimizer: optimizer.step())


def forwards_between(adapter: Adapter, model: Any) -> None:
    """An evaluation after each step, before its gradients are gone."""
    train(adapter, model, Case(steps=3), after_step=lambda step, optimizer: logits(model))


def two_optimizers(adapter: Adapter, model: Any) -> None:
    """Each steps in its turn."""
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in (parameters[:4], parameters[4:])]
    for step in range(3):
        models.loss_of(model, models.batch(step, 0)).backward()
        optimizers[step % 2].step()
        model.zero_grad()


def inference_mode_between(adapter: Adapter, model: Any) -> None:
    """Its secondary shards are what the next training step starts from.

    torch has the first forward of all not be in inference mode.
    """
    optimizer = models.make_optimizer("sgd", model.parameters())
    for step in range(3):
        train(adapter, model, Case(steps=2), optimizer=optimizer, first_step=2 * step)
        with torch.inference_mode():
            models.loss_of(model, models.batch(step, 5))


def checkpoint_loaded_in_place(adapter: Adapter, model: Any) -> None:
    """A checkpoint is loaded, and its result is not set on the model."""
    optimizer = models.make_optimizer("sgd", model.parameters())
    train(adapter, model, Case(steps=2), optimizer=optimizer)
    with shared_folder() as folder:
        dcp.save(get_model_state_dict(model), checkpoint_id=folder)
        train(adapter, model, Case(steps=2), optimizer=optimizer, first_step=2)
        logits(model)
        dcp.load(get_model_state_dict(model), checkpoint_id=folder)
    train(adapter, model, Case(steps=2), optimizer=optimizer, first_step=4)


WAYS = [
    not_a_torch_optimizer,
    a_torch_optimizer_then_another,
    optimizer_of_what_this_rank_holds,
    two_steps_for_one_backward,
    forwards_between,
    two_optimizers,
    inference_mode_between,
    checkpoint_loaded_in_place,
]


def weights_after(way: Callable[[Adapter, Any], None], adapter: Adapter, strategy: Strategy | None) -> Any:
    """In a worker: the weights after steps of some unusual kind."""
    model = adapter.make(Case(), strategy)
    before = adapter.full_weights(model)
    way(adapter, model)
    after = adapter.full_weights(model)
    assert models.distance(after, before) > 0.01  # or there was nothing to become stale
    return after


@functools.cache
def stock_weights_after(way: Callable[[Adapter, Any], None], adapter: Adapter) -> Any:
    """In a worker: what torch's own full sharding makes of it."""
    return weights_after(way, adapter, STOCK)


def distance_after(way: Callable[[Adapter, Any], None], adapter: Adapter, strategy: Strategy) -> float:
    """In a worker: the distance from stock."""
    return models.distance(weights_after(way, adapter, strategy), stock_weights_after(way, adapter))


@over_each(2, adapter=ADAPTERS, way=WAYS, scopes=SCOPES, gpus_per_node=[1, 2])
def test_weights_are_never_stale(
    pool: Callable[[int], Pool], adapter: Adapter, way: Callable[[Adapter, Any], None], scopes: str, gpus_per_node: int
) -> None:
    strategy = Strategy(scopes, gpus_per_node=gpus_per_node)
    assert max(pool(4).run(distance_after, way, adapter, strategy)) <= 1e-6


def inference_encoded(adapter: Adapter) -> bool:
    """In a worker: inference mode with codecs."""
    weights = weights_after(inference_mode_between, adapter, Strategy.zeropp(gpus_per_node=2))
    return all(value.isfinite().all() for value in weights.values())


@over_adapters
def test_training_goes_on_after_inference_mode_with_codecs(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    assert pool(4).run(inference_encoded, adapter) == [True] * 4


def step_after_other_forwards(adapter: Adapter, strategy: Strategy) -> float:
    """In a worker: the distance from a net that is not sharded.

    Stock FSDP is no oracle: its root is kept unsharded by the forward, so it runs the next one with old weights.
    """
    nets = [models.make_net(), adapter.make(Case(), strategy)]
    for net in nets:
        optimizer = models.make_optimizer("sgd", net.parameters())
        for step in range(3):
            models.loss_of(net, models.batch(step, 0)).backward()
            if net is nets[0]:
                for p in net.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()
            models.loss_of(net, models.batch(step, 1))
            optimizer.step()
            optimizer.zero_grad()
    exact = {name: p.detach().cpu() for name, p in nets[0].named_parameters()}
    return models.distance(adapter.full_weights(nets[1]), exact)


@over_adapters
def test_a_step_may_follow_other_forwards(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    assert max(pool(4).run(step_after_other_forwards, adapter, HPZ)) <= 1e-6


def evaluated_by_average(adapter: Adapter, strategy: Strategy) -> float:
    """In a worker: the distance of logits from those of a net that is not sharded, as above."""
    logits_by_net = []
    for net in (models.make_net(), adapter.make(Case(), strategy)):
        found = []
        optimizer = ScheduleFree(net.parameters())
        for step in range(3):
            for micro_batch in range(2):
                optimizer.train()  # as Trainer calls it
                (models.loss_of(net, models.batch(step, micro_batch)) / 2).backward()
            for p in net.parameters() if not logits_by_net else ():
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.eval()
            found.append(logits(net))
            optimizer.train()
            found.append(logits(net))
        logits_by_net.append(torch.stack(found).cpu())
    assert not torch.allclose(found[-1], found[-2], atol=1e-3)  # or nothing would become stale
    return float((logits_by_net[1] - logits_by_net[0]).abs().max())


@over_each(1, adapter=ADAPTERS, scopes=SCOPES)
def test_optimizers_may_evaluate_other_weights_than_they_train(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str
) -> None:
    assert max(pool(4).run(evaluated_by_average, adapter, Strategy(scopes, gpus_per_node=2))) <= 1e-5


def write_behind_its_back(adapter: Adapter, announce: bool) -> str:
    """In a worker: change weights in place between forwards."""
    model = adapter.make(Case(), HPZ)
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


@over_adapters
def test_an_unannounced_write_raises(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for message in pool(4).run(write_behind_its_back, adapter, False):
        assert "the weights of blocks.0 were changed" in message
        assert "call fsdp_zpp.invalidate(model) on every rank" in message


@over_adapters
def test_an_announced_write_is_used(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    assert pool(4).run(write_behind_its_back, adapter, True) == ["used"] * 4


def two_models(adapter: Adapter) -> None:
    """In a worker: a step of one model leaves the other's secondary shards as they are, and both train right."""
    case = Case(steps=2)
    first, second = adapter.make(case, HPZ), adapter.make(case, Strategy.zeropp(gpus_per_node=1))
    optimizers = [models.make_optimizer("sgd", model.parameters()) for model in (first, second)]
    for model, optimizer in zip((first, second), optimizers, strict=True):
        train(adapter, model, case, optimizer=optimizer)
    logits(second)
    train(adapter, first, case, optimizer=optimizers[0], first_step=2)
    with wiretap(1) as tap:
        logits(second)
    assert tap.total("inter") == 0
    alone = adapter.make(case, STOCK)
    train(adapter, alone, Case(steps=4))
    assert models.distance(adapter.full_weights(first), adapter.full_weights(alone)) <= 1e-6


@over_adapters
def test_a_step_of_one_model_leaves_another_fresh(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    pool(4).run(two_models, adapter)
