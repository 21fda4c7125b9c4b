"""State dicts hold the full-precision weights, and pass between ours and torch's own sharding; models may move."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import models
from harness.adapter import STOCK, Adapter, Case, Fsdp1, Fsdp2
from harness.covering import WITH_FLAT, over_adapters_and_flat, over_each
from harness.messages import attempt
from harness.pool import Pools
from harness.training import logits, train
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from fsdp_zpp import Strategy

ZEROPP, HPZ = Strategy.zeropp(gpus_per_node=2), Strategy("IGG", gpus_per_node=2)
FULL = StateDictOptions(full_state_dict=True)

NNN, III = (Strategy(scopes, gpus_per_node=2) for scopes in ("NNN", "III"))
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
def test_state_dicts_are_full_precision_at_every_moment(pool: Pools, adapter: Adapter) -> None:
    pool(4).run(true_at_every_moment, adapter)


CASE = Case(steps=1, optimizer="adamw-foreach")


def two_trained(adapter: Adapter, source: Strategy | None, target: Strategy | None) -> list[tuple[Any, Any]]:
    """In a worker: two models and their optimizers, which have trained on other batches."""
    found = []
    for strategy, first_step in ((source, 0), (target, 50)):
        model = adapter.make(CASE, strategy)
        optimizer = models.make_optimizer(CASE.optimizer, model.parameters())
        train(adapter, model, CASE, optimizer=optimizer, first_step=first_step)
        found.append((model, optimizer))
    return found


def load(adapter: Adapter, kind: str, source: Strategy | None, target: Strategy | None) -> None:
    """In a worker: a trained model's state dict, loaded into another model that has trained already."""
    (first, _), (second, _) = two_trained(adapter, source, target)
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


@over_each(rest=False, kind={f"{adapter}-{kind}": (adapter, kind) for adapter, kind in KINDS}, direction=DIRECTIONS)
def test_state_dicts_pass_between_ours_and_stock(
    pool: Pools, kind: tuple[Adapter, str], direction: tuple[Strategy | None, Strategy | None]
) -> None:
    pool(4).run(load, *kind, *direction)


def assert_train_alike(adapter: Adapter, trainings: list[tuple[Any, Any]]) -> None:
    losses = [train(adapter, model, CASE, optimizer=optimizer, first_step=1) for model, optimizer in trainings]
    assert losses[0] == losses[1]
    assert models.distance(*(adapter.full_weights(model) for model, _ in trainings)) == 0


def checkpoint(adapter: Adapter, source: Strategy | None, target: Strategy | None, path: str) -> None:
    """In a worker: model and optimizer through torch.distributed.checkpoint."""
    trainings = two_trained(adapter, source, target)
    weights, state = get_state_dict(*trainings[0])
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    weights, state = get_state_dict(*trainings[1])
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=path)
    set_state_dict(*trainings[1], model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    assert models.distance(*(adapter.full_weights(model) for model, _ in trainings)) == 0
    if source == target:  # resuming is exact
        assert_train_alike(adapter, trainings)


BETWEEN_SCOPES = {
    "NNN to NNN": (NNN, NNN),
    "NNN to III": (NNN, III),
    "III to stock": (III, STOCK),
    "IIG to NNI": (Strategy("IIG", gpus_per_node=2), Strategy("NNI", gpus_per_node=2)),
}


@over_each(rest=False, adapter=[Fsdp1(mesh=True), Fsdp2()], direction=DIRECTIONS | BETWEEN_SCOPES)
def test_distributed_checkpoints_pass_between_strategies_and_stock(
    pool: Pools, tmp_path: Path, adapter: Adapter, direction: tuple[Strategy | None, Strategy | None]
) -> None:
    pool(4).run(checkpoint, adapter, *direction, str(tmp_path / "checkpoint"))


def load_from_rank_0(adapter: Adapter, scopes: str, gpus_per_node: int) -> None:
    """In a worker: the full state of an optimizer, which rank 0 alone holds, loaded on all ranks."""
    strategy = Strategy(scopes, gpus_per_node=gpus_per_node)
    trainings = two_trained(adapter, strategy, strategy)
    second, its_optimizer = trainings[1]
    # Copied: what is not sharded is shared with the optimizer, and both would train it.
    weights, state = copy.deepcopy(get_state_dict(*trainings[0], options=FULL))
    set_model_state_dict(second, weights, options=FULL)
    from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(second, its_optimizer, state if dist.get_rank() == 0 else {}, options=from_rank_0)
    assert_train_alike(adapter, trainings)


@over_each(rest=False, adapter=WITH_FLAT, layout=[("III", 1), ("NNN", 2), ("NII", 2)])
def test_an_optimizer_state_that_rank_0_alone_has_loaded_reaches_all_nodes(
    pool: Pools, adapter: Adapter, layout: tuple[str, int]
) -> None:
    pool(4).run(load_from_rank_0, adapter, *layout)


# ---- moved and cast models


def copied(adapter: Adapter, model: Any) -> None:
    """To other memory and back, as for an offload to the CPU between steps."""
    model._apply(torch.clone)
    model._apply(torch.clone)


def written_elsewhere(adapter: Adapter, model: Any) -> None:
    """Weights change while they are somewhere else."""
    model._apply(torch.clone)
    with torch.no_grad():
        for parameter in model.parameters():
            adapter.local(parameter).mul_(1.5)
    model._apply(torch.clone)


def scaled(adapter: Adapter, model: Any) -> None:
    """The move itself changes the weights."""
    model._apply(lambda value: value * 1.5)


def replaced(adapter: Adapter, model: Any) -> None:
    """Weights are given other memory, which FullyShardedDataParallel allows, before the model moves."""
    if isinstance(adapter, Fsdp2):
        return written_elsewhere(adapter, model)
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5
    model._apply(torch.clone)


def rounded(adapter: Adapter, model: Any) -> None:
    """Through 16 bits and back."""
    model.half()
    model.float()


def after_each_move(adapter: Adapter, strategy: Strategy) -> None:
    """In a worker: what is computed after a move, and after a step there, is what a net that is not sharded computes.

    Stock FullyShardedDataParallel is no oracle: it goes back to the memory of before the move.
    """
    model = adapter.make(Case(), strategy)
    train(adapter, model, Case(steps=1))
    model._apply(torch.clone)
    for module in model.modules():
        # Cleared gradients did not move, though torch drops those of flat parameters only in the next forward.
        assert getattr(getattr(module, "_flat_param", None), "grad", None) is None
    for i, move in enumerate((copied, written_elsewhere, scaled, replaced, rounded)):
        before = adapter.full_weights(model)
        logits(model)
        move(adapter, model)
        if move is copied:  # a step at the new place, which no forward precedes
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter).add_(parameter.detach())
            torch.optim.SGD(model.parameters(), lr=0.5).step()
            model.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        expected = {
            name: value.half().float() if move is rounded else value * (0.5 if move is copied else 1.5)
            for name, value in before.items()
        }
        whole = models.make_net()
        whole.load_state_dict(expected, strict=False)
        for ours, theirs in zip(whole.buffers(), model.buffers(), strict=True):
            ours.copy_(theirs)
        found = logits(model)
        torch.testing.assert_close(found, logits(whole), rtol=1e-6, atol=1e-6)  # another order of sums
        assert models.distance(adapter.full_weights(model), expected) <= 1e-7, move.__name__
        train(adapter, model, Case(steps=1), first_step=i)
        assert models.distance(adapter.full_weights(model), expected) > 0.01


@over_each(rest=False, adapter=WITH_FLAT, scopes=["IGG", "III", "NNN"])
def test_a_moved_model_computes_and_trains_with_the_weights_that_it_has_then(
    pool: Pools, adapter: Adapter, scopes: str
) -> None:
    pool(4).run(after_each_move, adapter, Strategy(scopes, gpus_per_node=2))


def cast(adapter: Adapter, strategy: Strategy | None) -> tuple[str, str]:
    """In a worker: what a forward raises of a model that was cast after its first one, and what that says."""
    model = adapter.make(Case(), strategy)
    logits(model)
    model.half()
    return attempt((partial(logits, model), Exception, ""))[:2]


@over_each(rest=False, adapter=WITH_FLAT, strategy={"hpZ": HPZ, "zeropp": ZEROPP})
def test_casts_that_stock_refuses_are_refused(pool: Pools, adapter: Adapter, strategy: Strategy) -> None:
    for (ours, message), (stock, _) in zip(
        *(pool(4).run(cast, adapter, each) for each in (strategy, STOCK)), strict=True
    ):
        assert stock != "no error"
        if isinstance(adapter, Fsdp1):  # torch leaves it to the backend, and each raises an error of its own
            assert ours == "ValueError"
            assert "were cast from torch.float32 to torch.float16 after their first forward" in message
        else:
            assert ours == stock
