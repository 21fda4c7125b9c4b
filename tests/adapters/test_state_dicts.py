"""State dicts and checkpoints hold the full-precision weights, and pass between ours and torch's own sharding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import models
from harness.adapter import STOCK, Adapter, Case
from harness.covering import ADAPTERS, WITH_FLAT, over_adapters, over_adapters_and_flat, over_each
from harness.fsdp1 import Fsdp1
from harness.fsdp2 import Fsdp2
from harness.pool import Pool
from harness.training import logits, train
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from fsdp_zpp import Strategy

ZEROPP = Strategy.zeropp(gpus_per_node=2)
FULL = StateDictOptions(full_state_dict=True)

DIRECTIONS = {"ours to ours": (ZEROPP, ZEROPP), "ours to stock": (ZEROPP, STOCK), "stock to ours": (STOCK, ZEROPP)}


def true_at_every_moment(adapter: Adapter) -> None:
    """In a worker: what comes out are the true weights, whatever FSDP keeps unsharded at the time."""
    model = adapter.make(Case(), ZEROPP)
    truth = {name: p.detach().cpu().clone() for name, p in models.make_net().named_parameters()}
    moments = {"before any forward": adapter.full_weights(model)}
    loss = models.loss_of(model, models.batch(0, 0))
    moments["between forward and backward"] = adapter.full_weights(model)
    loss.backward()
    disturbed = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    logits(model)
    moments["after a forward without backward"] = adapter.full_weights(model)
    moments["gathered"] = {name: value.cpu() for name, value in get_model_state_dict(model, options=FULL).items()}
    for moment, weights in moments.items():
        for name, expected in truth.items():
            assert torch.equal(weights[name], expected), f"{name} {moment}"
    model.zero_grad()
    models.loss_of(model, models.batch(0, 0)).backward()
    undisturbed = [p.grad for p in model.parameters() if p.grad is not None]
    for ours, expected in zip(disturbed, undisturbed, strict=True):
        assert torch.equal(adapter.local(ours), adapter.local(expected))


@over_adapters_and_flat
def test_state_dicts_are_full_precision_at_every_moment(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    pool(4).run(true_at_every_moment, adapter)


def load(adapter: Adapter, kind: str, source: Strategy | None, target: Strategy | None) -> None:
    """In a worker: a trained model's state dict, loaded into another model that has trained already."""
    case = Case(steps=2)
    first, second = adapter.make(case, source), adapter.make(case, target)
    train(adapter, first, case)
    train(adapter, second, case, first_step=50)
    # So that there is a secondary shard to become stale. Stock FSDP keeps its root unsharded after a forward, and
    # does not notice that a local state dict is loaded.
    before = logits(second) if kind != "LOCAL_STATE_DICT" or target is not STOCK else None
    adapter.load_from(first, second, kind)
    assert models.distance(adapter.full_weights(second), adapter.full_weights(first)) == 0
    after = logits(second)
    assert before is None or not torch.equal(after, before)
    if source == target:
        assert torch.equal(after, logits(first))


KINDS = [
    (adapter, kind)
    for adapter in WITH_FLAT
    for kind in adapter.state_dict_kinds
    # torch can't load a local state dict with use_orig_params=True, with its own strategies either
    if (adapter, kind) != (Fsdp1(), "LOCAL_STATE_DICT")
]


@over_each(2, kind={f"{adapter}-{kind}": (adapter, kind) for adapter, kind in KINDS}, direction=DIRECTIONS)
def test_state_dicts_pass_between_ours_and_stock(
    pool: Callable[[int], Pool], kind: tuple[Adapter, str], direction: tuple[Strategy | None, Strategy | None]
) -> None:
    pool(4).run(load, *kind, *direction)


def checkpoint(adapter: Adapter, source: Strategy | None, target: Strategy | None, path: str) -> None:
    """In a worker: model and optimizer through torch.distributed.checkpoint."""
    case = Case(steps=2, optimizer="adamw-foreach")
    first, second = adapter.make(case, source), adapter.make(case, target)
    optimizers = [models.make_optimizer(case.optimizer, model.parameters()) for model in (first, second)]
    train(adapter, first, case, optimizer=optimizers[0])
    train(adapter, second, case, optimizer=optimizers[1], first_step=50)
    model_state, optimizer_state = get_state_dict(first, optimizers[0])
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    expected = adapter.full_weights(first)
    expected_losses = train(adapter, first, case, optimizer=optimizers[0], first_step=2)

    model_state, optimizer_state = get_state_dict(second, optimizers[1])
    loaded = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(loaded, checkpoint_id=path)
    set_state_dict(second, optimizers[1], model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    assert models.distance(adapter.full_weights(second), expected) == 0
    losses = train(adapter, second, case, optimizer=optimizers[1], first_step=2)
    if source == target:  # resuming is exact
        assert losses == expected_losses
        assert models.distance(adapter.full_weights(second), adapter.full_weights(first)) == 0


@over_each(adapter=ADAPTERS, direction=DIRECTIONS)
def test_distributed_checkpoints_pass_between_ours_and_stock(
    pool: Callable[[int], Pool],
    tmp_path: Path,
    adapter: Adapter,
    direction: tuple[Strategy | None, Strategy | None],
) -> None:
    pool(4).run(checkpoint, adapter, *direction, str(tmp_path / "checkpoint"))


BETWEEN_SCOPES = [
    ("III", "III"),
    ("III", None),
    (None, "III"),
    ("NNN", "NNN"),
    ("NNN", "III"),
    ("NNG", "NNG"),
    ("IIG", "NNI"),
]


@over_each(adapter=[Fsdp1(mesh=True), Fsdp2()], pair=BETWEEN_SCOPES)
def test_checkpoints_pass_between_scopes(
    pool: Callable[[int], Pool], tmp_path: Path, adapter: Adapter, pair: tuple[str | None, str | None]
) -> None:
    source, target = (STOCK if scopes is None else Strategy(scopes, gpus_per_node=2) for scopes in pair)
    pool(4).run(checkpoint, adapter, source, target, str(tmp_path / "checkpoint"))


def load_from_rank_0(adapter: Adapter, scopes: str, gpus_per_node: int) -> None:
    """In a worker: the full state of an optimizer, which rank 0 alone holds, loaded on all ranks."""
    case = Case(steps=2, optimizer="adamw-foreach")
    strategy = Strategy(scopes, gpus_per_node=gpus_per_node)
    first, second = adapter.make(case, strategy), adapter.make(case, strategy)
    optimizers = [models.make_optimizer(case.optimizer, model.parameters()) for model in (first, second)]
    train(adapter, first, case, optimizer=optimizers[0])
    train(adapter, second, case, optimizer=optimizers[1], first_step=50)
    # Copied: what is not sharded is shared with the optimizer, and both would train it.
    weights, state = copy.deepcopy(get_state_dict(first, optimizers[0], options=FULL))
    set_model_state_dict(second, weights, options=FULL)
    from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(second, optimizers[1], state if dist.get_rank() == 0 else {}, options=from_rank_0)
    losses = [
        train(adapter, model, case, optimizer=optimizer, first_step=2)
        for model, optimizer in zip((first, second), optimizers, strict=True)
    ]
    assert losses[0] == losses[1]
    assert models.distance(adapter.full_weights(second), adapter.full_weights(first)) == 0


@pytest.mark.parametrize(("scopes", "gpus_per_node"), [("GGG", 2), ("NNN", 2), ("III", 2), ("NII", 2), ("III", 1)])
@over_adapters_and_flat
def test_an_optimizer_state_that_rank_0_alone_has_loaded_reaches_all_nodes(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str, gpus_per_node: int
) -> None:
    pool(4).run(load_from_rank_0, adapter, scopes, gpus_per_node)


def save(adapter: Adapter, path: str) -> dict[str, Tensor]:
    """In a worker: save a trained model."""
    model = adapter.make(Case(), ZEROPP)
    train(adapter, model, Case(steps=2))
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path)
    return adapter.full_weights(model)


def load_elsewhere(adapter: Adapter, path: str, strategy: Strategy | None) -> dict[str, Tensor]:
    """In a worker of another world: load it."""
    model = adapter.make(Case(), strategy)
    train(adapter, model, Case(steps=1))
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=path)
    adapter.before_load(model)
    set_model_state_dict(model, state["model"])
    logits(model)
    return adapter.full_weights(model)


@pytest.mark.parametrize("strategy", [Strategy.zeropp(gpus_per_node=1), STOCK], ids=["ours", "stock"])
@over_adapters
def test_a_checkpoint_loads_at_another_world_size(
    pool: Callable[[int], Pool], tmp_path: Path, adapter: Adapter, strategy: Strategy | None
) -> None:
    path = str(tmp_path / "checkpoint")
    saved = pool(4).run(save, adapter, path)[0]
    for weights in pool(2).run(load_elsewhere, adapter, path, strategy):
        assert models.distance(weights, saved) == 0
