"""Offloaded parameters train as others, also where optimizers step in the backward, and their checkpoints resume.

Optimizers in the backward send what a step after it sends; on offloaded parameters they step behind it.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from harness import models
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, over_adapters, over_each
from harness.offload import group_for_scaling, offloading, scales_that_have_arrived, without_pinning
from harness.pool import Pool, Pools, device_type
from harness.steps_in_backward import make
from harness.training import load, save, train
from harness.wiretap import sent_in
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_zpp import CodecState, Int4, Int4Delta, Int8, LocalSteps, LoCo, Strategy
from fsdp_zpp.collectives.arriving_gradients import UNITS_BEHIND, ArrivingGradients

TWO: Any = {"gpus_per_node": 2}
CODECS: Any = {"weights": Int8(64), "gradients": Int4(64), **TWO}
STRATEGIES = {
    **{scopes: Strategy(scopes, **TWO) for scopes in ("GGG", "III", "NNN")},
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


@over_each(adapter=ADAPTERS, strategy=STRATEGIES)
def test_offloaded_parameters_train_as_others(pool: Pools, adapter: Adapter, strategy: Strategy) -> None:
    case = Case(clip=None, steps=5, micro_batches=2)
    assert pool(4).run(distance_from_kept, adapter, case, strategy) == [0.0] * 4


PARTS = {
    "frozen": (Case(clip=None, frozen=True), STRATEGIES["deltas"]),
    "tied": (Case(clip=None, model=(("tied", True),)), STRATEGIES["deltas"]),
    "clipped": (Case(clip=0.01, micro_batches=2), STRATEGIES["ZeRO++"]),
    "scaled": (Case(clip=0.01, scaler=True, steps=5), STRATEGIES["errors"]),
    "quantized": (Case(clip=None, frozen=True), Strategy("IGG", frozen=Int8(64), gradients=Int4(64), **TWO)),
}


@over_each(adapter=ADAPTERS, part=list(PARTS))
def test_parts_may_be_frozen_quantized_or_tied_and_gradients_clipped_or_scaled(
    pool: Pools, adapter: Adapter, part: str
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
    case, adapter = Case(clip=None, steps=2, micro_batches=2), offloading(adapter)
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
            for state in (adapter.local(parameter), *optimizers[1].state[parameter].values()):
                assert state.device.type == "cpu"


@over_each(adapter=ADAPTERS, strategy={name: STRATEGIES[name] for name in ("errors", "deltas", "local steps")})
def test_checkpoints_of_offloaded_parameters_resume(
    pool: Pools, tmp_path: Path, adapter: Adapter, strategy: Strategy
) -> None:
    pool(4).run(resumed, adapter, strategy, str(tmp_path / "checkpoint"))


# ---- optimizers in the backward


class Counting(torch.optim.SGD):
    """An optimizer that notes its steps."""

    notes: ClassVar[list[str]] = []

    def step(self, closure: Any = None) -> Any:
        self.notes.append("step")
        return super().step(closure)


def trained(
    adapter: Adapter, strategy: Strategy, in_backward: bool, micro_batches: int = 1
) -> tuple[list[Any], dict[str, Tensor], list[str]]:
    """Return what steps send, the weights, and in which order the last one stepped and went on with the backward."""
    model = make(adapter, strategy, Counting, lr=0.125) if in_backward else adapter.make(Case(), strategy)
    optimizer = None if in_backward else Counting(model.parameters(), lr=0.125)
    for block in model.modules():
        if isinstance(block, models.Block):
            block.up.register_full_backward_pre_hook(lambda *unused: Counting.notes.append("block"))

    def step(number: int) -> None:
        Counting.notes.clear()
        for micro_batch in range(micro_batches):
            with adapter.micro_batch(model, micro_batch == micro_batches - 1, False):
                models.loss_of(model, models.batch(number, micro_batch)).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    sent = [sent_in(lambda number=number: step(number), model, gpus_per_node=2)[0].sent for number in range(4)]
    order = list(Counting.notes)
    return sent, adapter.full_weights(model), order


def compared(adapter: Adapter, strategy: Strategy, offloads: bool, micro_batches: int) -> None:
    """In a worker: steps in the backward and those after it."""
    with without_pinning():
        used = offloading(adapter) if offloads else adapter
        sent, weights, order = trained(used, strategy, True, micro_batches)
        expected, after, _ = trained(used, strategy, False, micro_batches)
    assert sent == expected
    assert models.distance(weights, after) == 0
    if offloads:
        # The net has three blocks and the root, which comes last: all blocks are launched before the first step.
        assert order[: 3 * micro_batches] == ["block"] * 3 * micro_batches
        assert set(order[3 * micro_batches :]) == {"step"}


IN_BACKWARD = {
    **{scopes: Strategy(scopes, **TWO) for scopes in ("IIG", "NNG", "III")},
    "zeropp": Strategy.zeropp(**TWO),
    "deltas": Strategy("IGG", weights=Int4Delta(), **TWO),
    "errors": Strategy.loco(**TWO),
    "local steps": Strategy("III", local_steps=LocalSteps(2, codec=Int4(64)), **TWO),
    "overlapped local steps": Strategy("NNN", local_steps=LocalSteps(2, overlap=1), **TWO),
}
# In this order, accumulation meets both adapters, and offloading meets both with it and without it.
USES = {
    f"{ADAPTERS[i]}{', offloaded' * offloads}": (ADAPTERS[i], offloads)
    for i, offloads in ((0, False), (0, True), (1, True), (1, False))
}


@over_each(use=USES, strategy=IN_BACKWARD, micro_batches=[1, 2])
def test_steps_in_the_backward_send_and_train_what_others_do(
    pool: Pools, use: tuple[Adapter, bool], strategy: Strategy, micro_batches: int
) -> None:
    # Without shards, each micro-batch leaves a gradient that an optimizer steps on, under stock, too.
    pool(4).run(compared, use[0], strategy, use[1], 1 if strategy.levels == "NNN" else micro_batches)


def after_an_exception(adapter: Adapter) -> float:
    """In a worker: the distance from a training without the step whose backward has failed in the last block."""
    strategy, weights = Strategy("IGG", **TWO), []

    def fail(module: nn.Module, gradients: Any) -> None:
        raise FloatingPointError

    with without_pinning():
        for failing in (False, True):
            model = make(offloading(adapter), strategy, Counting, lr=0.125)
            for step in range(3):
                if failing and step == 1:
                    handle = model.blocks[0].up.register_full_backward_pre_hook(fail)
                    with pytest.raises(FloatingPointError):
                        models.loss_of(model, models.batch(9, 9)).backward()
                    handle.remove()
                    model.zero_grad()
                    if isinstance(model, FSDPModule):
                        model.reset_iter_state()
                models.loss_of(model, models.batch(step, 0)).backward()
            weights.append(adapter.full_weights(model))
    return models.distance(*weights)


@over_adapters
def test_an_exception_in_a_backward_drops_the_steps_that_waited(pool: Pools, adapter: Adapter) -> None:
    """Two units wait for their steps when the third fails, so the backward has made none."""
    if adapter.torch_name == "fully_shard" and not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("torch's fully_shard recovers from exceptions since 2.13")
    assert pool(4).run(after_an_exception, adapter) == [0.0] * 4


def test_steps_are_made_in_order_and_once() -> None:
    arriving, made = ArrivingGradients(), list[int]()
    for unit in range(5):
        arriving.step_on_arrival(None, lambda unit=unit: made.append(unit))
        assert made == list(range(max(unit + 1 - UNITS_BEHIND, 0)))
    arriving.step_all()
    arriving.step_all()
    assert made == list(range(5))
    arriving.step_on_arrival(None, lambda: made.append(5))
    arriving.drop()
    arriving.step_all()
    assert made == list(range(5))
