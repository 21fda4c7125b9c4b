"""Checkpoints of errors: a training that goes on from one is the same as one that was never interrupted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch.distributed.checkpoint as dcp
from harness import models
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, over_each, over_pairs
from harness.messages import collected
from harness.pool import Pool
from harness.strategies import COARSE, FEEDBACKS, INTER
from harness.training import load, make_scaler, save, scaled_steps, train
from torch.distributed.checkpoint import DefaultLoadPlanner

from fsdp_zpp import CodecState, LoCo, Strategy


def resumed(adapter: Adapter, strategy: Strategy, case: Case, path: str, trained: bool) -> None:
    """In a worker: a training that is saved and goes on, and one that goes on from there, are the same.

    ``trained`` says whether the model that takes over has trained before.
    """
    first, second = adapter.make(case, strategy), adapter.make(case, strategy)
    optimizers = [models.make_optimizer(case.optimizer, model.parameters()) for model in (first, second)]
    train(adapter, first, case, optimizer=optimizers[0])
    save(first, optimizers[0], CodecState(first), path)
    expected = train(adapter, first, case, optimizer=optimizers[0], first_step=case.steps)
    if trained:
        train(adapter, second, case, optimizer=optimizers[1], first_step=50)
    load(second, optimizers[1], CodecState(second), path)
    assert train(adapter, second, case, optimizer=optimizers[1], first_step=case.steps) == expected
    assert models.distance(adapter.full_weights(second), adapter.full_weights(first)) == 0


@over_pairs(adapter=ADAPTERS, feedback=FEEDBACKS, synced={"no_sync": False, "synced, untrained": True})
def test_resuming_with_errors_is_exact(
    pool: Callable[[int], Pool], tmp_path: Path, adapter: Adapter, feedback: LoCo, synced: bool
) -> None:
    case = Case(steps=3, micro_batches=2, synced=synced, optimizer="adamw-foreach")
    strategy = replace(COARSE, error_feedback=replace(feedback, reset_every=4))
    pool(4).run(resumed, adapter, strategy, case, str(tmp_path / "checkpoint"), not synced)


def resumed_with_scaler(adapter: Adapter, strategy: Strategy, path: str, goes_on_scaled: bool) -> None:
    """In a worker: as :func:`resumed`, with a loss scale that changes just before saving, or is given up then."""
    trained = []
    for which in range(2):
        model, scaler = adapter.make(Case(), strategy), make_scaler()
        optimizer = models.make_optimizer("sgd", model.parameters())
        if which == 0:
            scaled_steps(model, optimizer, scaler, range(2))
            save(model, optimizer, CodecState(model), path)
            scale = scaler.state_dict()
        else:
            load(model, optimizer, CodecState(model), path)
            scaler.load_state_dict(scale)
        scaler = scaler if goes_on_scaled else make_scaler(False)
        scaled_steps(model, optimizer, scaler, [2, -1, 3] if goes_on_scaled else [2, 3])
        trained.append(adapter.full_weights(model))
    assert models.distance(*trained) == 0


@over_pairs(adapter=ADAPTERS, feedback=FEEDBACKS, goes_on_scaled={"scaled": True, "unscaled from then on": False})
def test_resuming_with_a_loss_scale_is_exact(
    pool: Callable[[int], Pool], tmp_path: Path, adapter: Adapter, feedback: LoCo, goes_on_scaled: bool
) -> None:
    strategy = replace(COARSE, error_feedback=feedback)
    pool(4).run(resumed_with_scaler, adapter, strategy, str(tmp_path / "checkpoint"), goes_on_scaled)


def saved(adapter: Adapter, strategy: Strategy, path: str) -> None:
    """In a worker: save after two steps."""
    model = adapter.make(Case(), strategy)
    optimizer = models.make_optimizer("sgd", model.parameters())
    train(adapter, model, Case(steps=2), optimizer=optimizer)
    save(model, optimizer, CodecState(model), path)


def loaded_elsewhere(adapter: Adapter, strategy: Strategy, path: str) -> list[tuple[str, str]]:
    """In a worker of another world: what is logged; training goes on."""
    model = adapter.make(Case(), strategy)
    optimizer = models.make_optimizer("sgd", model.parameters())
    train(adapter, model, Case(steps=1), optimizer=optimizer)
    errors = CodecState(model)
    load(model, optimizer, None, path)
    with collected() as records:
        dcp.load({"codecs": errors}, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=True))
    train(adapter, model, Case(steps=2), optimizer=optimizer, first_step=2)
    return records


@over_each(adapter=ADAPTERS, layout=[(2, 1), (4, 1), (8, 2)])
def test_another_layout_starts_without_errors_and_says_so(
    pool: Callable[[int], Pool], tmp_path: Path, adapter: Adapter, layout: tuple[int, int]
) -> None:
    (world, gpus_per_node), strategy = layout, replace(COARSE, error_feedback=INTER)
    path = str(tmp_path / "checkpoint")
    pool(4).run(saved, adapter, strategy, path)
    records = pool(world).run(loaded_elsewhere, adapter, replace(strategy, gpus_per_node=gpus_per_node), path)[0]
    warned = [text for level, text in records if level == "WARNING" and "start from zero" in text]
    assert len(warned) == 1
    assert "4 ranks as 2 nodes x 2" in warned[0]


@over_each(adapter=ADAPTERS)
def test_where_error_feedback_is_inactive_the_saved_errors_are_not_ignored_silently(
    pool: Callable[[int], Pool], tmp_path: Path, adapter: Adapter
) -> None:
    paths = {strategy: str(tmp_path / name) for strategy, name in ((INTER, "with"), (None, "without"))}
    for feedback, path in paths.items():
        pool(4).run(saved, adapter, replace(COARSE, error_feedback=feedback), path)
    on_one_node = replace(COARSE, error_feedback=INTER, gpus_per_node=2)
    for feedback, path in paths.items():
        records = pool(2).run(loaded_elsewhere, adapter, on_one_node, path)
        warned = [text for of_rank in records for _, text in of_rank if "codec state" in text]
        assert len(warned) == (feedback is not None)
        assert all("saved on 4 ranks as 2 nodes x 2" in text and "not used" in text for text in warned)
