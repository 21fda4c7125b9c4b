"""Error feedback in training: errors follow the optimizer's steps, whatever else goes on, and survive a restart."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import models
from harness.adapter import Adapter, Case
from harness.adapters import ADAPTERS, LEVELS, over_adapters
from harness.covering import over_each, over_pairs
from harness.fsdp1 import Fsdp1
from harness.logs import collected
from harness.pool import Pool, device_type
from harness.training import train, trained_weights
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from fsdp_zpp import CodecState, Int4, Int8, LoCo, QuantizedReduceState, Strategy, quantized_reduce_hook

COARSE = Strategy("IGG", gradients=Int4(32), gpus_per_node=2)
INTER, BOTH = LoCo(), LoCo(hops="both", dtype=Int8(32))
FEEDBACKS = {"inter": INTER, "both in int8": BOTH}


def with_and_without_resets(adapter: Adapter, case: Case, strategy: Strategy, hops: Any) -> list[dict[str, Tensor]]:
    """In a worker: weights trained without feedback, with errors reset at every step, and with feedback."""
    # Without feedback, as with it, the hop that compresses is to see the sum of the micro-batches.
    gradients = "N" if hops == "both" else "I"
    levels = strategy.levels[0] + min(gradients, strategy.levels[1], key="NIG".index) + strategy.levels[2]
    strategies = [
        replace(strategy, levels=levels),
        *(replace(strategy, error_feedback=LoCo(hops=hops, reset_every=every)) for every in (1, 0)),
    ]
    return [trained_weights(adapter, case, each) for each in strategies]


@over_each(adapter=ADAPTERS, levels=LEVELS, hops=["inter", "both"])
def test_resets_count_steps(pool: Callable[[int], Pool], adapter: Adapter, levels: str, hops: Any) -> None:
    """Errors that are forgotten after every step of several micro-batches have never been there."""
    strategy = replace(COARSE, levels=levels)
    case = Case(steps=3, micro_batches=2)
    for plain, reset, fed_back in pool(4).run(with_and_without_resets, adapter, case, strategy, hops):
        assert models.distance(reset, plain) == 0
        assert models.distance(fed_back, plain) > 1e-4


class QuietSgd(models.PlainSgd):
    """An optimizer that torch knows nothing of, but that its gradient scaler takes."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.param_groups = [{"params": self.parameters}]


def scaled_run(
    adapter: Adapter, strategy: Strategy, optimizer_name: str, overflow_at: int | None, scaled: bool, backwards: int = 1
) -> dict[str, Tensor]:
    """In a worker: weights after four steps, with a step that overflows in between, on a growing loss scale."""
    model = adapter.make(Case(), strategy)
    if optimizer_name == "quiet":
        optimizer: Any = QuietSgd(model)
    else:
        optimizer = models.make_optimizer(optimizer_name, model.parameters())
    steps = list(range(4))
    if overflow_at is not None:
        steps.insert(overflow_at, -1)
    scaled_steps(model, optimizer, make_scaler(scaled), steps, backwards)
    return adapter.full_weights(model)


def make_scaler(enabled: bool = True) -> ShardedGradScaler:
    """A scaler whose scale grows with every step."""
    return ShardedGradScaler(device=device_type(), init_scale=2.0**10, growth_interval=1, enabled=enabled)


def scaled_steps(
    model: Any, optimizer: Any, scaler: ShardedGradScaler, steps: Iterable[int], backwards: int = 1
) -> None:
    """Train with a scaler; the last backward of step -1 overflows."""
    for step in steps:
        for backward in range(backwards):
            loss = models.loss_of(model, models.batch(max(step, 0), backward))
            if step < 0 and dist.get_rank() == 0 and backward == backwards - 1:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@cache
def unscaled_run(adapter: Adapter, strategy: Strategy, optimizer_name: str, backwards: int) -> dict[str, Tensor]:
    """In a worker: the same without a scaler and without that step."""
    return scaled_run(adapter, strategy, optimizer_name, None, False, backwards)


def scaled_distance(
    adapter: Adapter, strategy: Strategy, optimizer_name: str, backwards: int, overflow_at: int | None
) -> float:
    """In a worker: the distance of the two."""
    scaled = scaled_run(adapter, strategy, optimizer_name, overflow_at, True, backwards)
    return models.distance(scaled, unscaled_run(adapter, strategy, optimizer_name, backwards))


@over_each(
    2,
    adapter=ADAPTERS,
    feedback=FEEDBACKS,
    optimizer=["sgd", "adamw-fused", "quiet"],
    backwards=[1, 2],
    overflow_at=[None, 0, 2],
)
def test_a_skipped_step_has_not_been(
    pool: Callable[[int], Pool],
    adapter: Adapter,
    feedback: LoCo,
    optimizer: str,
    backwards: int,
    overflow_at: int | None,
) -> None:
    """And errors follow the loss scale: powers of two change nothing, so weights are the same without a scaler."""
    strategy = replace(COARSE, error_feedback=feedback)
    assert pool(4).run(scaled_distance, adapter, strategy, optimizer, backwards, overflow_at) == [0] * 4


def beside_a_scaled_model(adapter: Adapter, beside: bool) -> dict[str, Tensor]:
    """In a worker: weights of a model without a scaler, with another model's scaler at work in between."""
    strategy = replace(COARSE, error_feedback=INTER)
    model, other = adapter.make(Case(), strategy), adapter.make(Case(), strategy)
    optimizers = [models.make_optimizer("sgd", each.parameters()) for each in (model, other)]
    scaler = make_scaler()
    for step in range(3):
        if beside:
            scaled_steps(other, optimizers[1], scaler, [step])
        scaled_steps(model, optimizers[0], make_scaler(False), [step])
    return adapter.full_weights(model)


@over_adapters
def test_a_scaler_of_another_model_is_not_listened_to(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    alone, beside = (pool(4).run(beside_a_scaled_model, adapter, which)[0] for which in (False, True))
    assert models.distance(beside, alone) == 0


def unknown_optimizer(adapter: Adapter, feedback: LoCo | None) -> dict[str, Tensor]:
    """In a worker: weights under an optimizer that announces no steps."""
    model = adapter.make(Case(), replace(COARSE, levels="IIG", error_feedback=feedback))
    train(adapter, model, Case(steps=3, clip=None), optimizer=models.PlainSgd(model))
    return adapter.full_weights(model)


@over_adapters
def test_optimizers_that_announce_nothing(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    plain, reset, fed_back = (
        pool(4).run(unknown_optimizer, adapter, feedback)[0]
        for feedback in (None, LoCo(reset_every=1), LoCo(reset_every=0))
    )
    assert models.distance(reset, plain) == 0
    assert models.distance(fed_back, plain) > 1e-4


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


def save(model: Any, optimizer: Any, codecs: CodecState, path: str) -> None:
    """Save all that a training needs to go on."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state, "codecs": codecs}, checkpoint_id=path)


def load(model: Any, optimizer: Any, codecs: CodecState | None, path: str) -> None:
    """Go on from there."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state} | ({} if codecs is None else {"codecs": codecs})
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


@over_pairs(adapter=ADAPTERS, feedback=FEEDBACKS, synced={"no_sync": False, "synced, untrained": True})
def test_resuming_is_exact(
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


class Scale(models.Block):
    """A unit so small that most ranks hold nothing of it."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.factor = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def steps_counted(adapter: Adapter) -> list[int]:
    """In a worker: the steps that each unit has counted, some of them with no element here, one left out at times."""
    strategy = replace(COARSE, error_feedback=INTER)
    net = models.make_net()
    net.blocks.append(Scale().to(models.device()))
    model = adapter.shard(net, Case(), strategy)
    optimizer = models.make_optimizer("sgd", model.parameters())
    scaler = make_scaler()
    for step in range(4):
        net.skipped = 1 if step == 2 else None
        scaled_steps(model, optimizer, scaler, [step])
    parts = [torch.load(io.BytesIO(part)) for name, part in CodecState(model).state_dict().items() if name != "layout"]
    return [part["steps"] for part in parts]


@over_adapters
def test_all_units_of_all_ranks_count_alike(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for counted in pool(4).run(steps_counted, adapter):
        assert counted == [4] * 5


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


def hooked_training(feedback: LoCo | None, path: str) -> dict[str, Tensor]:
    """In a worker: weights trained with the hook; with feedback, also saved and resumed."""
    adapter = Fsdp1()

    def hooked() -> Any:
        model = adapter.make(Case(), ShardingStrategy.FULL_SHARD)
        state = QuantizedReduceState(Int4(32), error_feedback=feedback, gpus_per_node=2)
        model.register_comm_hook(state, quantized_reduce_hook)
        return model, state, models.make_optimizer("sgd", model.parameters())

    case = Case(steps=2, micro_batches=2)
    model, state, optimizer = hooked()
    train(adapter, model, case, optimizer=optimizer)
    if feedback is not None:
        save(model, optimizer, CodecState(model), path)
        assert CodecState(model).state_dict().keys() > {"layout"}
        assert len(CodecState(model).state_dict()) == len(state.state_dict())
    expected = train(adapter, model, case, optimizer=optimizer, first_step=2)
    if feedback is not None:
        other, other_state, other_optimizer = hooked()
        train(adapter, other, case, optimizer=other_optimizer, first_step=50)
        load(other, other_optimizer, CodecState(other), path)
        with pytest.raises(ValueError, match="one for each model"):
            adapter.make(Case(), ShardingStrategy.FULL_SHARD).register_comm_hook(other_state, quantized_reduce_hook)
        assert train(adapter, other, case, optimizer=other_optimizer, first_step=2) == expected
        assert models.distance(adapter.full_weights(other), adapter.full_weights(model)) == 0
    return adapter.full_weights(model)


def test_comm_hook(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    """Each unit has its own errors, which follow steps and resume exactly; forgotten at each step, they are not there.

    A strategy whose gradients wait on the rank sees the same sum of micro-batches as the hook.
    """
    plain, reset, fed_back = (
        pool(4).run(hooked_training, feedback, str(tmp_path / str(i)))[0]
        for i, feedback in enumerate([None, LoCo(hops="both", reset_every=1), LoCo(hops="both")])
    )
    assert models.distance(reset, plain) == 0
    assert models.distance(fed_back, plain) > 1e-4
    strategy = replace(COARSE, levels="GNG", error_feedback=LoCo(hops="both"))
    ours = pool(4).run(trained_weights, Fsdp1(), Case(steps=4, micro_batches=2), strategy)[0]
    assert models.distance(ours, fed_back) < 1e-5


def wrapped_state() -> None:
    """In a worker: without the state itself, nothing tells units apart."""
    model = Fsdp1().make(Case(), ShardingStrategy.FULL_SHARD)
    state = QuantizedReduceState(Int4(32), error_feedback=LoCo(), gpus_per_node=2)
    model.register_comm_hook(None, lambda _, gradient, out: quantized_reduce_hook(state, gradient, out))
    with pytest.raises(RuntimeError, match="must be what is passed to"):
        models.loss_of(model, models.batch(0, 0)).backward()


def test_a_hook_around_the_hook_is_refused(pool: Callable[[int], Pool]) -> None:
    pool(4).run(wrapped_state)


def logged(adapter: Adapter, strategy: Strategy) -> list[tuple[str, str]]:
    """In a worker: what is logged of error feedback."""
    model = adapter.make(Case(), strategy)
    with collected() as records:
        train(adapter, model, Case(steps=1))
    return [record for record in records if "error feedback" in record[1]]


@over_adapters
def test_log_line(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    [(level, line)] = pool(4).run(logged, adapter, replace(COARSE, error_feedback=BOTH))[0]
    assert level == "INFO"
    assert "error feedback inside and between nodes (beta 0.8, reset every 1024 steps, kept in int8(32); " in line
    assert "KiB a rank)" in line
    [(level, line)] = pool(4).run(logged, adapter, replace(COARSE, error_feedback=INTER, gpus_per_node=4))[0]
    assert level == "WARNING"
    assert "error feedback between nodes (one node: no inter-node hop)" in line
