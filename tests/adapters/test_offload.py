"""Offloaded parameters train as others, whatever is kept from step to step, and their checkpoints resume."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import models
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, SCOPES, over_adapters, over_each
from harness.offload import group_for_scaling, offloading, scales_that_have_arrived, without_pinning
from harness.pool import Pool, device_type
from harness.training import load, save, train

from fsdp_zpp import CodecState, Int4, Int4Delta, Int8, LocalSteps, LoCo, Strategy

TWO: Any = {"gpus_per_node": 2}
CODECS: Any = {"weights": Int8(64), "gradients": Int4(64), **TWO}
STRATEGIES = {
    **{scopes: Strategy(scopes, **TWO) for scopes in SCOPES},
    "ZeRO++": Strategy("IGG", **CODECS),
    "errors": Strategy("IGG", error_feedback=LoCo(reset_every=3), **CODECS),
    "errors beside accumulated gradients": Strategy("IIG", error_feedback=LoCo(), **CODECS),
    "deltas": Strategy("IGG", **CODECS | {"weights": Int4Delta(64, Int8(64))}),
    "local steps": Strategy("III", local_steps=LocalSteps(2, codec=Int4(64), error_feedback=LoCo()), **TWO),
    "local steps whose state is on the CPU": Strategy("NNN", local_steps=LocalSteps(2, overlap=1, offload=True), **TWO),
}


def sgd(model: Any) -> torch.optim.Optimizer:
    """Return an optimizer whose steps are the same on CPUs and GPUs: products with a power of two are exact."""
    return torch.optim.SGD(model.parameters(), lr=0.125)


def distance_from_kept(adapter: Adapter, case: Case, strategy: Strategy) -> float:
    """In a worker: the distance of offloaded weights from others; both have trained alike."""
    weights, group = [], group_for_scaling() if case.scaler else None
    with without_pinning(), scales_that_have_arrived():
        for each in (adapter, offloading(adapter)):
            model = each.make(case, strategy, group)
            train(each, model, case, optimizer=sgd(model))
            weights.append(each.full_weights(model))
    return models.distance(*weights)


@over_each(adapter=ADAPTERS, strategy=STRATEGIES, micro_batches=[1, 3])
def test_offloaded_parameters_train_as_others(
    pool: Callable[[int], Pool], adapter: Adapter, strategy: Strategy, micro_batches: int
) -> None:
    case = Case(clip=None, steps=5, micro_batches=micro_batches)
    assert pool(4).run(distance_from_kept, adapter, case, strategy) == [0.0] * 4


PARTS = {
    "frozen": (Case(clip=None, frozen=True), STRATEGIES["deltas"]),
    "tied": (Case(clip=None, model=(("tied", True),)), STRATEGIES["deltas"]),
    "clipped": (Case(clip=0.01, micro_batches=2), STRATEGIES["ZeRO++"]),
    "scaled": (Case(clip=0.01, scaler=True, steps=5), STRATEGIES["errors"]),
    "quantized": (Case(clip=None, frozen=True), Strategy("IGG", frozen=Int8(64), gradients=Int4(64), **TWO)),
}


@over_adapters
@pytest.mark.parametrize("part", PARTS)
def test_parts_may_be_frozen_quantized_or_tied_and_gradients_clipped_or_scaled(
    pool: Callable[[int], Pool], adapter: Adapter, part: str
) -> None:
    # A GPU sums norms in another order than a CPU.
    bound = 1e-6 if device_type() != "cpu" and PARTS[part][0].clip is not None else 0.0
    with ExitStack() as stack:
        workers = pool(4)
        if PARTS[part][0].scaler:
            # In new processes: torch keeps what it knows of meshes by their ranks, and takes older ones' groups.
            workers = Pool(4)
            stack.callback(workers.stop, kill=True)
        assert max(workers.run(distance_from_kept, adapter, *PARTS[part])) <= bound


def resumed(adapter: Adapter, strategy: Strategy, path: str) -> None:
    """In a worker: an offloaded training goes on from its checkpoint as it would have gone on."""
    case, adapter = Case(clip=None, micro_batches=2), offloading(adapter)
    with without_pinning():
        first, second = adapter.make(case, strategy), adapter.make(case, strategy)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True) for model in (first, second)]
        train(adapter, first, case, optimizer=optimizers[0])
        save(first, optimizers[0], CodecState(first, optimizers[0]), path)
        expected = train(adapter, first, case, optimizer=optimizers[0], first_step=case.steps)
        load(second, optimizers[1], CodecState(second, optimizers[1]), path)
        assert train(adapter, second, case, optimizer=optimizers[1], first_step=case.steps) == expected
        assert models.distance(adapter.full_weights(second), adapter.full_weights(first)) == 0
        for parameter in second.parameters():
            assert adapter.local(parameter).device.type == "cpu"
            for state in optimizers[1].state[parameter].values():
                assert state.device.type == "cpu"


@over_each(adapter=ADAPTERS, strategy={name: STRATEGIES[name] for name in ("errors", "deltas", "local steps")})
def test_checkpoints_of_offloaded_parameters_resume(
    pool: Callable[[int], Pool], tmp_path: Path, adapter: Adapter, strategy: Strategy
) -> None:
    pool(4).run(resumed, adapter, strategy, str(tmp_path / "checkpoint"))
