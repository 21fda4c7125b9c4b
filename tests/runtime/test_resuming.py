"""A training that is saved, loaded and goes on is the one that never stopped; what does not fit is dropped."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import lora, models
from harness.adapter import STOCK, Adapter, Case, Fsdp1, Fsdp2
from harness.covering import ADAPTERS, over_adapters, over_each
from harness.local_nodes import LAYOUTS, ONE_BLOCK, TRAINED, set_trained, train_parts
from harness.messages import collected
from harness.offload import offloading, without_pinning
from harness.pool import Pools
from harness.strategies import BOTH, COARSE, INTER
from harness.training import differing_tensors, load, logits, save, train
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from fsdp_zpp import CodecState, Int4, Int4Delta, Int8, LocalSteps, LoCo, Strategy, agreed_weights, exchange_weights

KEPT = {
    "errors between nodes": replace(COARSE, error_feedback=replace(INTER, reset_every=4)),
    "errors on both hops": replace(COARSE, error_feedback=replace(BOTH, reset_every=4)),
    "errors and deltas": replace(COARSE, weights=Int4Delta(64, Int8(64)), error_feedback=INTER),
}
"""Strategies with codecs that keep something from step to step."""
SMALL = Case(model=(("blocks", 1),), optimizer="adamw")
LONG = replace(SMALL, steps=4, optimizer="adamw-foreach")
CASES = {"no_sync": replace(LONG, micro_batches=2), "synced": replace(LONG, micro_batches=2, synced=True)}

LOCAL = {
    "int4": LocalSteps(3),
    "on its way": LocalSteps(4, overlap=3, mix=0.5, spread=False),
    "with errors": LocalSteps(2, error_feedback=LoCo(dtype=Int8(32)), overlap=1),
    "on the CPU": LocalSteps(2, offload=True),
    "momentum that fits": LocalSteps(1, outer_momentum="auto", outer_lr=1),
    "in the start": LocalSteps(3, start=7, spread=False, offload=True),
    "after its last step": LocalSteps(3, start=4, overlap=1),
    "after the start": LocalSteps(3, start=3, overlap=2, mix=0.5),
    "with errors after the start": LocalSteps(2, start=1, error_feedback=LoCo()),
}
"""By what they keep, and by where they are after four steps of eight, when a training is saved."""
WAYS = ("codecs last", "trained before, codecs last", "saved again")
"""How a model takes over, beside at once."""
WAYS_OF_CODECS = ("at once", *WAYS, "offloaded", "after an evaluation, saved again", "a rank without rows")
LOCAL_WAYS = (
    "agreed weights, codecs last",
    "trained before on the same batches, codecs last",  # so nodes hold equal weights, but not the agreed ones
    *WAYS,
    "agreed weights shown at the save",
    "offloaded",
    "frozen, codecs last",
    "at once",
)


def made(adapter: Adapter, case: Case, strategy: Strategy | None, way: str = "") -> tuple[Any, Any]:
    """A model and its optimizer."""
    if way == "a rank without rows":
        model = adapter.shard(lora.make_net(blocks=1), case, strategy)
    else:
        model = adapter.make(case, strategy)
    return model, models.make_optimizer(case.optimizer, (p for p in model.parameters() if p.requires_grad))


def take_over(adapter: Adapter, model: Any, optimizer: Any, path: str, way: str) -> None:
    """In a worker: load what was saved."""
    if "trained before" in way:
        train(adapter, model, Case(steps=1), optimizer=optimizer, first_step=50)
    codecs = CodecState(model, [optimizer])
    load(model, optimizer, None if "codecs last" in way else codecs, path)
    if "codecs last" in way:
        model.requires_grad_("frozen" not in way)
        dcp.load({"codecs": codecs}, checkpoint_id=path + "-codecs")
        model.requires_grad_(True)
    if "saved again" in way:  # before any forward, by objects of its own
        for move in (save, load):
            move(model, optimizer, CodecState(model, optimizer), path + "-again")


def check_resumed(adapter: Adapter, strategy: Strategy, case: Case, way: str, path: str) -> None:
    """In a worker: a training that is saved and goes on, and one that goes on from there, are the same on each node."""
    adapter = offloading(adapter) if way == "offloaded" else adapter
    same = partial(models.batch, rank=0) if "same batches" in way else models.batch
    with without_pinning(), mock.patch.object(models, "batch", same):
        (first, optimizer), (second, its_optimizer) = (made(adapter, case, strategy, way) for _ in range(2))
        train(adapter, first, case, optimizer=optimizer)
        if "after an evaluation" in way:  # which gathers what the last step changed
            logits(first)
        with agreed_weights(first) if "agreed" in way else nullcontext():
            save(first, optimizer, CodecState(first, optimizer), path)
            if "agreed" in way:
                models.loss_of(first, models.batch(9, 0))  # an evaluation that records gradients
        dcp.save({"codecs": CodecState(first, optimizer)}, checkpoint_id=path + "-codecs")
        losses, weights = rest_of(adapter, first, strategy, case, optimizer)
        take_over(adapter, second, its_optimizer, path, way)
        its_losses, its_weights = rest_of(adapter, second, strategy, case, its_optimizer)
        assert its_losses == losses
        assert [models.distance(*each) for each in zip(its_weights, weights, strict=True)] == [0] * len(weights)


def rest_of(
    adapter: Adapter, model: Any, strategy: Strategy, case: Case, optimizer: Any
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """In a worker: the losses of the steps that are left, and the weights after them and after a last exchange."""
    losses = train(adapter, model, case, optimizer=optimizer, first_step=4)
    weights = [adapter.full_weights(model)]
    if strategy.local_steps is not None:
        exchange_weights(model)
        weights.append(adapter.full_weights(model))
    return losses, weights


# Without a mesh, FullyShardedDataParallel, stock too, can't load its checkpoint where a rank has no row of a weight.
@over_each(rest=False, adapter=[Fsdp1(mesh=True), Fsdp2()], strategy=KEPT, case=CASES, way=WAYS_OF_CODECS)
def test_a_training_resumes_with_what_codecs_keep(
    pool: Pools, tmp_path: Path, adapter: Adapter, strategy: Strategy, case: Case, way: str
) -> None:
    pool(4).run(check_resumed, adapter, strategy, case, way, str(tmp_path / "checkpoint"))


@over_each(rest=False, adapter=ADAPTERS, config=LOCAL, layout=LAYOUTS[1:], way=LOCAL_WAYS)
def test_a_training_resumes_bit_for_bit_on_every_node(
    pool: Pools, tmp_path: Path, adapter: Adapter, config: LocalSteps, layout: tuple[str, int], way: str
) -> None:
    codecs: Any = {"gradients": Int4(32), "error_feedback": LoCo()} if config.start else {}
    strategy = Strategy(layout[0], local_steps=config, gpus_per_node=layout[1], **codecs)
    pool(4).run(check_resumed, adapter, strategy, LONG, way, str(tmp_path / "checkpoint"))


def resumed_in_parts(adapter: Adapter, trained: str) -> float:
    """In a worker: how far a training whose trained parameters change is from one that was loaded, in the end."""
    config = LocalSteps(3, codec=Int4(32), error_feedback=LoCo(beta=0.0), overlap=1)
    strategy = Strategy("III", gpus_per_node=2, local_steps=config)
    (model, optimizer), (again, its_optimizer) = (made(adapter, ONE_BLOCK, strategy) for _ in range(2))
    train_parts(adapter, model, optimizer, TRAINED[trained][:5])
    set_trained(again, TRAINED[trained][4])
    CodecState(again, its_optimizer).load_state_dict(CodecState(model, optimizer).state_dict())
    set_model_state_dict(again, get_model_state_dict(model))
    for each, its in ((model, optimizer), (again, its_optimizer)):
        train_parts(adapter, each, its, TRAINED[trained][5:8], first_step=5)
        exchange_weights(each)
    return models.distance(adapter.full_weights(again), adapter.full_weights(model))


@over_each(rest=False, adapter=ADAPTERS, trained=["a, then b", "a and again", "turns"])
def test_a_training_of_ever_other_parameters_resumes(pool: Pools, adapter: Adapter, trained: str) -> None:
    assert pool(4).run(resumed_in_parts, adapter, trained) == [0] * 4


# ---- in another schedule


def rescheduled(adapter: Adapter, strategy: Strategy, config: LocalSteps, path: str) -> list[bool]:
    """In a worker: whether nodes differ when a training is saved, one step after it goes on, and in the end.

    It goes on in another schedule, in a new model as in one that has trained before, of which nothing is taken over.
    """
    model, optimizer = made(adapter, LONG, strategy)
    train(adapter, model, LONG, optimizer=optimizer)
    differ = [differing_tensors(adapter, model) > 0]
    save(model, optimizer, CodecState(model, optimizer), path)
    new, used = (made(adapter, LONG, replace(strategy, local_steps=config)) for _ in range(2))
    train(adapter, used[0], replace(LONG, steps=1), optimizer=used[1], first_step=50)
    for each, its_optimizer in (used, new):
        load(each, its_optimizer, CodecState(each, its_optimizer), path)
    for steps, first in ((1, 4), (4, 5)):
        for each, its_optimizer in (used, new):
            train(adapter, each, replace(LONG, steps=steps), optimizer=its_optimizer, first_step=first)
        differ.append(differing_tensors(adapter, new[0]) > 0)
    for each, _ in (used, new):
        exchange_weights(each)
    assert models.distance(adapter.full_weights(used[0]), adapter.full_weights(new[0])) == 0
    return differ


Change = tuple[LocalSteps, LocalSteps, list[bool]]
CHANGES: dict[str, Change] = {
    "exchanged more often": (LocalSteps(3), LocalSteps(2), [True, True, True]),
    "started no more": (LocalSteps(3, start=6), LocalSteps(3), [False, True, True]),
}


@over_each(rest=False, adapter=ADAPTERS, layout=[("III", 2), ("NNI", 2), ("III", 1)], change=CHANGES)
def test_a_training_goes_on_in_another_schedule(
    pool: Pools, tmp_path: Path, adapter: Adapter, layout: tuple[str, int], change: Change
) -> None:
    before, after, differ = change
    strategy = Strategy(layout[0], gpus_per_node=layout[1], local_steps=before)
    assert pool(4).run(rescheduled, adapter, strategy, after, str(tmp_path / "checkpoint")) == [differ] * 4


def put_off(adapter: Adapter, strategy: Strategy, config: LocalSteps, path: str) -> None:
    """In a worker: go on in a start that ends later, after nodes have trained on their own."""
    model, optimizer = made(adapter, LONG, strategy)
    train(adapter, model, LONG, optimizer=optimizer)
    save(model, optimizer, CodecState(model, optimizer), path)
    model, optimizer = made(adapter, LONG, replace(strategy, local_steps=config))
    load(model, optimizer, CodecState(model, optimizer), path)
    with pytest.raises(ValueError, match="for 4 steps in the loaded state, but start=6 has them make the next step"):
        train(adapter, model, replace(LONG, steps=1), optimizer=optimizer, first_step=4)


@over_adapters
def test_nodes_that_are_apart_make_no_synchronous_step(pool: Pools, tmp_path: Path, adapter: Adapter) -> None:
    strategy = Strategy("III", gpus_per_node=2, local_steps=LocalSteps(3))
    pool(4).run(put_off, adapter, strategy, LocalSteps(3, start=6), str(tmp_path / "checkpoint"))


# ---- on other ranks


def saved_here(adapter: Adapter, strategy: Strategy, path: str) -> dict[str, Tensor]:
    """In a worker: save after some steps, the agreed weights if there are any; return them."""
    model, optimizer = made(adapter, SMALL, strategy)
    train(adapter, model, replace(SMALL, steps=2), optimizer=optimizer)
    with agreed_weights(model) if strategy.local_steps is not None else nullcontext():
        save(model, optimizer, CodecState(model, optimizer), path)
        return adapter.full_weights(model)


def loaded_elsewhere(
    adapter: Adapter, strategy: Strategy | None, path: str
) -> tuple[dict[str, Tensor], list[str], int]:
    """In a worker of another world: the weights, warnings, and how many tensors differ between nodes after steps."""
    model, optimizer = made(adapter, SMALL, strategy)
    train(adapter, model, replace(SMALL, steps=1), optimizer=optimizer)
    load(model, optimizer, None, path)
    with collected() as records:
        if strategy is not STOCK:
            state = {"codecs": CodecState(model, optimizer)}
            dcp.load(state, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=True))
    weights = adapter.full_weights(model)
    train(adapter, model, replace(SMALL, steps=2), optimizer=optimizer, first_step=2)
    if strategy is not STOCK and strategy.local_steps is not None:
        exchange_weights(model)
    return weights, [text for level, text in records if level == "WARNING"], differing_tensors(adapter, model)


Layout = tuple[int, int]
"""Ranks, and how many of them a node has."""
TWO_OF_TWO = (4, 2)
STARTS_OVER: dict[str, tuple[Layout, Layout, Strategy, tuple[str, ...]]] = {
    "errors and deltas, on more ranks": (
        (2, 1),
        TWO_OF_TWO,
        KEPT["errors and deltas"],
        ("start from zero", "weights are sent whole"),
    ),
    "errors, on one node": (TWO_OF_TWO, (2, 2), replace(COARSE, error_feedback=INTER), ("not used",)),
    "local steps": (TWO_OF_TWO, (4, 1), Strategy("III", local_steps=LocalSteps(2)), ("start over from the loaded",)),
    "nothing": (TWO_OF_TWO, (2, 1), Strategy.zeropp(), ()),
}
"""The layouts before and after, a strategy, and what is said."""


@over_each(rest=False, adapter=ADAPTERS, kept=STARTS_OVER)
def test_another_layout_starts_over_from_the_saved_weights_and_says_so(
    pool: Pools, tmp_path: Path, adapter: Adapter, kept: tuple[Layout, Layout, Strategy, tuple[str, ...]]
) -> None:
    (ranks, per_node), (world, gpus_per_node), strategy, said = kept
    path = str(tmp_path / "checkpoint")
    saved = pool(ranks).run(saved_here, adapter, replace(strategy, gpus_per_node=per_node), path)[0]
    found = pool(world).run(loaded_elsewhere, adapter, replace(strategy, gpus_per_node=gpus_per_node), path)
    for rank, (weights, warnings, differing) in enumerate(found):
        assert models.distance(weights, saved) == 0
        assert differing == 0
        assert len(warnings) == (rank == 0 and bool(said))
        for part in (*said, f"{ranks} ranks as 2 nodes x {per_node}"):
            assert all(part in text for text in warnings)
    if not said:
        for weights, _, _ in pool(2).run(loaded_elsewhere, adapter, STOCK, path):
            assert models.distance(weights, saved) == 0


# ---- beside other weights

BESIDE = {
    "errors": replace(COARSE, error_feedback=INTER),
    "errors and deltas": KEPT["errors and deltas"],
    "local steps": Strategy("III", local_steps=LocalSteps(3, codec=Int4(64)), gpus_per_node=2),
}
NOTHING: dict[str, Any] = {"layout": "nothing"}


def resumed_with(
    adapter: Adapter, strategy: Strategy, path: str, state: dict[str, Any], codecs_first: bool
) -> tuple[dict[str, Tensor], list[str]]:
    """Weights after steps from the saved weights with this codec state, and the warnings about it."""
    model, optimizer = made(adapter, SMALL, strategy)
    codecs = CodecState(model, optimizer)
    with collected() as records:
        if codecs_first:
            codecs.load_state_dict(state)
        load(model, optimizer, None, path)
        if not codecs_first:
            codecs.load_state_dict(state)
        if state is not NOTHING:  # saved again before it is used, it is of the same weights still
            codecs.load_state_dict(CodecState(model, optimizer).state_dict())
        train(adapter, model, replace(SMALL, steps=2), optimizer=optimizer, first_step=4)
    return adapter.full_weights(model), [text for level, text in records if level == "WARNING" and "codec" in text]


def lacking(key: Callable[[dict[str, Any]], str], state: dict[str, Any]) -> dict[str, Any]:
    """Codec state as another version might have saved it: each part lacks an entry."""
    changed = dict(state)
    for name in state.keys() - {"layout"}:
        part = torch.load(io.BytesIO(state[name]), weights_only=True)
        part.pop(key(part), None)
        torch.save(part, buffer := io.BytesIO())
        changed[name] = buffer.getvalue()
    return changed


def mixed(adapter: Adapter, strategy: Strategy, path: str, codecs_first: bool) -> list[str]:
    """In a worker: the warnings about codec state that is older than the saved weights, on all ranks or on one."""
    model, optimizer = made(adapter, SMALL, strategy)
    states = []
    for first_step in (0, 2):
        train(adapter, model, replace(SMALL, steps=2), optimizer=optimizer, first_step=first_step)
        states.append(CodecState(model, optimizer).state_dict())
    save(model, optimizer, CodecState(model, optimizer), path)
    older, newer = states
    # Local steps of one rank alone can't be older: ranks would be told that they have made other steps.
    on_one_rank = older if dist.get_rank() == 1 or strategy.local_steps is not None else newer
    (matching, silent), (without, _), (dropped, warnings), (dropped_on_all, _) = (
        resumed_with(adapter, strategy, path, state, codecs_first) for state in (newer, NOTHING, older, on_one_rank)
    )
    for key, said in (
        (lambda part: "saved_with", "checksums of its weights"),
        (lambda part: next(iter(part)), "entry as expected"),
    ):
        with pytest.raises(ValueError, match=f"{said}.*another version of fsdp_zpp.*leave it out of what you load"):
            CodecState(model, optimizer).load_state_dict(lacking(key, older))
    assert silent == [], silent
    assert models.distance(dropped, without) == 0
    assert models.distance(dropped_on_all, without) == 0
    assert models.distance(matching, without) > 0
    return warnings


@over_each(rest=False, adapter=ADAPTERS, strategy=BESIDE, codecs_first={"codecs first": True, "weights first": False})
def test_codec_state_of_an_older_save_is_dropped_on_all_ranks_and_one_says_so(
    pool: Pools, tmp_path: Path, adapter: Adapter, strategy: Strategy, codecs_first: bool
) -> None:
    first, *others = pool(4).run(mixed, adapter, strategy, str(tmp_path), codecs_first)
    assert len(first) == 1
    assert "was not saved with the weights that were loaded" in first[0]
    assert "start" in first[0]
    assert others == [[]] * 3


def on_halves(strategy: Strategy, folder: Path) -> list[str]:
    """In a worker: resume a half's training; then the warnings about codec state that is older than its weights."""
    groups, half = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])], dist.get_rank() // 2
    where: Any = {"checkpoint_id": folder / str(half), "process_group": groups[half]}
    trainings = []
    for _ in range(2):
        model = Fsdp2().make(SMALL, strategy, groups[half])
        trainings.append((model, models.make_optimizer("adamw", model.parameters())))
    (model, optimizer), (again, its_optimizer) = trainings
    train(Fsdp2(), model, Case(steps=1 + half), optimizer=optimizer)
    older = CodecState(model, optimizer).state_dict()
    train(Fsdp2(), model, Case(steps=3), optimizer=optimizer, first_step=2)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states, "codecs": CodecState(model, optimizer)}, **where)
    expected = train(Fsdp2(), model, Case(steps=4), optimizer=optimizer, first_step=5)
    weights, states = get_state_dict(again, its_optimizer)
    codecs = CodecState(again, its_optimizer)
    dcp.load({"model": weights, "optimizer": states, "codecs": codecs}, **where)
    set_state_dict(again, its_optimizer, model_state_dict=weights, optim_state_dict=states)
    assert train(Fsdp2(), again, Case(steps=4), optimizer=its_optimizer, first_step=5) == expected
    with collected() as records:
        codecs.load_state_dict(older)
        train(Fsdp2(), again, Case(steps=1), optimizer=its_optimizer, first_step=9)
    return [text for level, text in records if level == "WARNING" and "codec state" in text]


@pytest.mark.parametrize("name", ["local steps", "errors and deltas"])
def test_each_half_of_a_job_resumes_its_own_and_its_first_rank_warns(pool: Pools, tmp_path: Path, name: str) -> None:
    warnings = pool(4).run(on_halves, replace(BESIDE[name], gpus_per_node=1), tmp_path)
    assert list(map(len, warnings)) == [1, 0, 1, 0]
