"""State dicts and checkpoints hold the full-precision weights, and pass between ours and torch's own fully_shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import models
from harness.fully_sharded import STOCK, Case, full_weights, logits, make, make_optimizer, train
from harness.pool import Pool
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from fsdp_zpp import Strategy
from fsdp_zpp.fsdp2 import fully_shard

ZEROPP = Strategy.zeropp(gpus_per_node=2)
FULL = StateDictOptions(full_state_dict=True)
PAIRS = [(ZEROPP, ZEROPP), (ZEROPP, STOCK), (STOCK, ZEROPP)]
PAIR_IDS = ["ours to ours", "ours to stock", "stock to ours"]


def true_at_every_moment() -> None:
    """In a worker: a state dict holds the true weights, whatever FSDP keeps unsharded at the time."""
    model = make(Case(), ZEROPP)
    truth = {name: p.detach().cpu().clone() for name, p in models.make_net().named_parameters()}
    moments = {"before any forward": full_weights(model)}
    loss = models.loss_of(model, models.batch(0, 0))
    moments["between forward and backward"] = full_weights(model)
    loss.backward()
    logits(model)
    moments["after a forward without backward"] = full_weights(model)
    moments["gathered"] = {name: value.cpu() for name, value in get_model_state_dict(model, options=FULL).items()}
    for moment, weights in moments.items():
        for name, expected in truth.items():
            assert torch.equal(weights[name], expected), f"{name} {moment}"


def test_state_dicts_are_full_precision(pool: Callable[[int], Pool]) -> None:
    pool(4).run(true_at_every_moment)


def load(how: str, source: Strategy | None, target: Strategy | None) -> None:
    """In a worker: a trained model's state dict, loaded into another model that has trained already."""
    case = Case(steps=2)
    first, second = make(case, source), make(case, target)
    train(first, case)
    train(second, case, first_step=50)
    before = logits(second)  # so that there is a secondary shard to become stale
    if how == "load_state_dict":
        second.load_state_dict(first.state_dict())
    elif how == "full":
        second.reshard()  # a forward leaves the root unsharded, and torch then takes its parameters for plain ones
        set_model_state_dict(second, get_model_state_dict(first, options=FULL), options=FULL)
    elif how == "modules":
        for name, module in first.named_children():
            getattr(second, name).load_state_dict(module.state_dict())
    assert models.distance(full_weights(second), full_weights(first)) == 0
    after = logits(second)
    assert not torch.equal(after, before)
    if source == target:
        assert torch.equal(after, logits(first))


@pytest.mark.parametrize("how", ["load_state_dict", "full", "modules"])
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=PAIR_IDS)
def test_state_dicts(pool: Callable[[int], Pool], how: str, source: Any, target: Any) -> None:
    pool(4).run(load, how, source, target)


def checkpoint(source: Strategy | None, target: Strategy | None, path: str) -> None:
    """In a worker: model and optimizer through torch.distributed.checkpoint."""
    case = Case(steps=2, optimizer="adamw-foreach")
    first, second = make(case, source), make(case, target)
    optimizers = [make_optimizer(case.optimizer, model) for model in (first, second)]
    train(first, case, optimizer=optimizers[0])
    train(second, case, optimizer=optimizers[1], first_step=50)
    model_state, optimizer_state = get_state_dict(first, optimizers[0])
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    expected = full_weights(first)
    expected_losses = train(first, case, optimizer=optimizers[0], first_step=2)

    model_state, optimizer_state = get_state_dict(second, optimizers[1])
    loaded = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(loaded, checkpoint_id=path)
    set_state_dict(second, optimizers[1], model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    assert models.distance(full_weights(second), expected) == 0
    losses = train(second, case, optimizer=optimizers[1], first_step=2)
    if source == target:  # resuming is exact
        assert losses == expected_losses
        assert models.distance(full_weights(second), full_weights(first)) == 0


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=PAIR_IDS)
def test_distributed_checkpoint(pool: Callable[[int], Pool], tmp_path: Any, source: Any, target: Any) -> None:
    pool(4).run(checkpoint, source, target, str(tmp_path / "checkpoint"))


def save(path: str) -> dict[str, torch.Tensor]:
    """In a worker: save a trained model."""
    model = make(Case(), ZEROPP)
    train(model, Case(steps=2))
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    return full_weights(model)


def load_elsewhere(path: str, strategy: Strategy | None) -> dict[str, torch.Tensor]:
    """In a worker of another world: load it."""
    model = make(Case(), strategy)
    train(model, Case(steps=1))
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    logits(model)
    return full_weights(model)


@pytest.mark.parametrize("strategy", [Strategy.zeropp(gpus_per_node=1), STOCK], ids=["ours", "stock"])
def test_another_world_size(pool: Callable[[int], Pool], tmp_path: Any, strategy: Any) -> None:
    path = str(tmp_path / "checkpoint")
    saved = pool(4).run(save, path)[0]
    for weights in pool(2).run(load_elsewhere, path, strategy):
        assert models.distance(weights, saved) == 0


def meta_init(strategy: Strategy) -> None:
    """In a worker: a model that is built on the meta device, materialized sharded, then loaded."""
    full = models.make_net()
    with torch.device("meta"):
        net = models.Net()
    for block in net.blocks:
        fully_shard(block, strategy=strategy)
    fully_shard(net, strategy=strategy)
    net.to_empty(device=models.device())
    for module in net.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for block in net.blocks:
        block.shift.fill_(0.1)
    set_model_state_dict(net, full.state_dict(), options=FULL)
    reference = make(Case(), strategy)
    for model in (net, reference):
        train(model, Case(steps=2))
    assert models.distance(full_weights(net), full_weights(reference)) == 0


@pytest.mark.parametrize("strategy", [Strategy("IGG", gpus_per_node=2), ZEROPP], ids=["hpZ", "zeropp"])
def test_meta_init(pool: Callable[[int], Pool], strategy: Strategy) -> None:
    pool(4).run(meta_init, strategy)
