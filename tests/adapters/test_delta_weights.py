"""Weights sent between nodes as differences: half the bytes, the same training, exact resumption."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import models
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, over_adapters, over_pairs
from harness.pool import Pool
from harness.training import logits, loss_after, mean_loss, train
from harness.wiretap import Sent, sent_in
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fsdp_zpp import CodecState, Int4Delta, Int8, Strategy, invalidate

DELTAS = Int4Delta(64, whole=Int8(64))
STRATEGY = Strategy("IGG", weights=DELTAS, gpus_per_node=2)


def trained_bytes(adapter: Adapter, strategy: Strategy) -> Sent:
    """In a worker: what the third of three steps sends."""
    # Matrices make up most of it, as of real models: norms and biases are no deltas.
    model = adapter.make(Case(model=(("width", 64), ("hidden", 256))), strategy)
    optimizer = models.make_optimizer("sgd", model.parameters())
    train(adapter, model, Case(steps=2), optimizer=optimizer)
    return sent_in(partial(train, adapter, model, Case(steps=1), optimizer=optimizer, first_step=2), model, 2)


@over_adapters
def test_differences_send_half_as_many_bytes_between_nodes(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    """Counted on the collectives: half as many between nodes, as many inside."""
    whole = replace(STRATEGY, weights=DELTAS.whole)
    for (tap, own), (tap_whole, own_whole) in zip(
        *(pool(4).run(trained_bytes, adapter, strategy) for strategy in (STRATEGY, whole)), strict=True
    ):
        assert own["gather"]["inter"] == tap.total("inter", "all_gather")
        assert own["gather"]["intra"] == own_whole["gather"]["intra"]
        assert 0.4 < own["gather"]["inter"] / own_whole["gather"]["inter"] < 0.62
        assert tap.total("inter", "all_gather") < tap_whole.total("inter", "all_gather")


@over_adapters
def test_training_with_differences_ends_at_stocks_loss(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    ours, stock = (pool(4).run(loss_after, adapter, Case(steps=20), strategy)[0] for strategy in (STRATEGY, None))
    assert ours == pytest.approx(stock, rel=0.01)


def saved_before_a_forward(adapter: Adapter) -> int:
    """In a worker: how many entries the codecs of a model have that was wrapped a moment ago."""
    return len(CodecState(adapter.make(Case(), STRATEGY)).state_dict())


@over_adapters
def test_a_model_has_a_codec_state_before_its_first_forward(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    # torch.distributed.checkpoint asks for it before it loads.
    assert all(entries > 1 for entries in pool(4).run(saved_before_a_forward, adapter))


def resumed(adapter: Adapter, path: str, looked_at: bool, codecs_last: bool) -> None:
    """In a worker: a training that goes on, and one that goes on from its checkpoint, are the same."""
    case = Case(steps=3)
    first, second = adapter.make(case, STRATEGY), adapter.make(case, STRATEGY)
    optimizers = [models.make_optimizer("adamw-foreach", model.parameters()) for model in (first, second)]
    train(adapter, first, case, optimizer=optimizers[0])
    if looked_at:
        mean_loss(first, 0)  # an evaluation gathers what the last step changed
    model_state, optimizer_state = get_state_dict(first, optimizers[0])
    state = {"model": model_state, "optimizer": optimizer_state, "codecs": CodecState(first)}
    dcp.save(state, checkpoint_id=path)
    expected = train(adapter, first, case, optimizer=optimizers[0], first_step=3)

    if codecs_last:  # else it has had no step yet, and torch makes one to have states of the optimizer to load into
        train(adapter, second, case, optimizer=optimizers[1], first_step=50)
    model_state, optimizer_state = get_state_dict(second, optimizers[1])
    codecs = CodecState(second)
    state = {"model": model_state, "optimizer": optimizer_state, "codecs": codecs.state_dict()}
    dcp.load(state, checkpoint_id=path)
    if not codecs_last:
        codecs.load_state_dict(state["codecs"])
    set_state_dict(second, optimizers[1], model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if codecs_last:
        codecs.load_state_dict(state["codecs"])
    assert train(adapter, second, case, optimizer=optimizers[1], first_step=3) == expected
    assert models.distance(adapter.full_weights(second), adapter.full_weights(first)) == 0


@over_pairs(
    adapter=ADAPTERS,
    looked_at={"after a step": False, "after an evaluation": True},
    codecs_last={"codecs first": False, "codecs last": True},
)
def test_resuming_is_exact(
    pool: Callable[[int], Pool], tmp_path: Path, adapter: Adapter, looked_at: bool, codecs_last: bool
) -> None:
    pool(4).run(resumed, adapter, str(tmp_path / "checkpoint"), looked_at, codecs_last)


def loaded(adapter: Adapter, model: Any, resumed: Any) -> None:
    """Another model's weights."""
    adapter.load_from(adapter.make(Case(), STRATEGY), resumed, adapter.state_dict_kinds[0])


def written(adapter: Adapter, model: Any, resumed: Any) -> None:
    """Weights that are written to, and the write announced."""
    for parameter in resumed.parameters():
        adapter.local(parameter).data.mul_(1.5)
    invalidate(resumed)


def written_on_one_rank(adapter: Adapter, model: Any, resumed: Any) -> None:
    """Only one rank's part of them changes, but all have to know."""
    if dist.get_rank() == 1:
        for parameter in resumed.parameters():
            adapter.local(parameter).data.mul_(1.5)
    invalidate(resumed)


def stepped(adapter: Adapter, model: Any, resumed: Any) -> None:
    """A step that no forward precedes."""
    for parameter in resumed.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(resumed.parameters(), lr=0.1).step()


def unchanged(adapter: Adapter, model: Any, resumed: Any) -> None:
    """The weights that were saved, loaded once more."""
    adapter.load_from(model, resumed, adapter.state_dict_kinds[0])


def in_place(adapter: Adapter) -> str:
    """The kind of state dict that a checkpoint is loaded into in place, where state dicts show the shards."""
    kinds = adapter.state_dict_kinds
    return "in place" if "in place" in kinds else kinds[0]


def loaded_in_place(adapter: Adapter, model: Any, resumed: Any) -> None:
    """Another model's weights, which are not set on this one."""
    adapter.load_from(adapter.make(Case(), STRATEGY), resumed, in_place(adapter))


def unchanged_in_place(adapter: Adapter, model: Any, resumed: Any) -> None:
    """The weights that were saved, loaded once more."""
    adapter.load_from(model, resumed, in_place(adapter))


def changed_after_resuming(adapter: Adapter, change: Callable[[Adapter, Any, Any], None]) -> bool:
    """In a worker: whether a model that has resumed, and was changed then, computes with the weights that it has.

    That is, as one that was given these and has no history; if they are those of before, as the one that was saved.
    """
    model, resumed, fresh = (adapter.make(Case(), STRATEGY) for _ in range(3))
    train(adapter, model, Case(steps=2))
    if change is written_on_one_rank:
        invalidate(model)  # so that what other ranks go on with is what they would send whole
    expected = logits(model)
    adapter.load_from(model, resumed, adapter.state_dict_kinds[0])
    CodecState(resumed).load_state_dict(CodecState(model).state_dict())
    change(adapter, model, resumed)
    if change not in (unchanged, unchanged_in_place):
        adapter.load_from(resumed, fresh, adapter.state_dict_kinds[0])
        expected = logits(fresh)
    return torch.equal(logits(resumed), expected)


@pytest.mark.parametrize(
    "change",
    [loaded, loaded_in_place, written, written_on_one_rank, stepped, unchanged, unchanged_in_place],
    ids=lambda change: change.__name__,
)
@over_adapters
def test_a_resumed_model_computes_with_weights_that_changed_since(
    pool: Callable[[int], Pool], adapter: Adapter, change: Callable[[Adapter, Any, Any], None]
) -> None:
    assert pool(4).run(changed_after_resuming, adapter, change) == [True] * 4
