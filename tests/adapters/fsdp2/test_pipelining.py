"""Stages of a pipeline, two of which train on four data-parallel ranks each, under torch's schedules."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from harness import models
from harness.adapter import STOCK
from harness.covering import over_each
from harness.fsdp2 import Fsdp2
from harness.pool import Pool, device_type
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor

from fsdp_zpp import Int4, Int4Delta, LoCo, Strategy, traffic

WIDTH, LAYERS, STEPS, DATA_PARALLEL, ROWS, BYTES = 12, 4, 3, 4, 8, 4
STAGES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zbv": 2}
"""Schedules, and the stages that each rank has."""
TWO: dict[str, Any] = {"gpus_per_node": 2}


class Layer(nn.Module):
    """A residual MLP of an odd width."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def make_layers() -> list[Layer]:
    """Make the layers that all trainings start from."""
    torch.manual_seed(0)
    return [Layer().to(models.device()) for _ in range(LAYERS)]


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """Make an optimizer; its eps keeps a rounding error of a gradient near zero from becoming a whole step."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Make inputs and targets of a data-parallel rank."""
    torch.manual_seed(100 * step + rank)
    return torch.randn(ROWS, WIDTH).to(models.device()), torch.randn(ROWS, WIDTH).to(models.device())


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@cache
def mesh_of_two() -> DeviceMesh:
    """In a worker: the mesh of stages x data parallelism, whose groups all trainings share."""
    return init_device_mesh(device_type(), (2, DATA_PARALLEL), mesh_dim_names=("pp", "dp"))


class Pipeline:
    """In a worker: this rank's stages, and the schedule that runs them.

    Args:
        kind: A key of ``STAGES``.
        strategy: Of each layer and of what is around them.
        micro_batches: A step's.
    """

    def __init__(self, kind: str, strategy: Any, micro_batches: int) -> None:
        mesh, device = mesh_of_two(), models.device()
        rank, self.rank = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
        stages = 2 * STAGES[kind]
        indices = [rank, stages - 1 - rank] if kind == "zbv" else [*range(rank, stages, 2)]
        self.first, self.last = 0 in indices, stages - 1 in indices
        self.parts = {index: nn.Sequential(*_layers_of(index, stages)) for index in indices}
        for part in self.parts.values():
            # Of layers that are units of their own, torch 2.13 gets wrong gradients in zero-bubble schedules.
            for module in (part,) if kind == "zbv" else (*part, part):
                Fsdp2().apply(module, strategy, mesh=mesh["dp"])
        group = mesh["pp"].get_group()
        pieces: Any = [PipelineStage(part, index, stages, device, group=group) for index, part in self.parts.items()]
        if STAGES[kind] == 1:
            single = ScheduleGPipe if kind == "gpipe" else Schedule1F1B
            self.schedule: Any = single(pieces[0], micro_batches, loss_fn=loss_of)
        else:
            looped = ScheduleZBVZeroBubble if kind == "zbv" else ScheduleInterleaved1F1B
            self.schedule = looped(pieces, micro_batches, loss_fn=loss_of)
        self.optimizer = optimizer_of([p for part in self.parts.values() for p in part.parameters()])

    def step(self, index: int) -> list[float]:
        """Make a step; return the losses of its micro-batches on ranks of the last stage."""
        inputs, target = batch(index, self.rank)
        losses: list[Tensor] = []
        arguments = {"target": target, "losses": losses} if self.last else {}
        self.schedule.step(*([inputs] if self.first else []), **arguments)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [loss.item() for loss in losses]

    def weights(self) -> dict[str, Tensor]:
        """Return this rank's part of the model, by names in the list of all layers. Collective."""
        found = {}
        for index, part in self.parts.items():
            for name, parameter in part.named_parameters():
                assert isinstance(parameter, DTensor)
                place, _, own = name.partition(".")
                found[f"{index * len(part) + int(place)}.{own}"] = parameter.full_tensor()
        return found

    def sent(self) -> dict[str, int]:
        """Return the bytes that this rank has sent between nodes so far, by kind."""
        each = [traffic(part) for part in self.parts.values()]
        return {kind: sum(sent[kind]["inter"] for sent in each) for kind in ("gather", "reduce")}


def _layers_of(index: int, stages: int) -> list[Layer]:
    size = LAYERS // stages
    return make_layers()[index * size : (index + 1) * size]


@cache
def trained_alone() -> dict[str, Tensor]:
    """Train all layers on this rank alone, on the batches of all data-parallel ranks."""
    layers = nn.Sequential(*make_layers())
    optimizer = optimizer_of(layers.parameters())
    for step in range(STEPS):
        for rank in range(DATA_PARALLEL):
            inputs, target = batch(step, rank)
            (loss_of(layers(inputs), target) / DATA_PARALLEL).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in layers.named_parameters()}


def distance_to_one_rank(kind: str, strategy: Any) -> float:
    """In a worker: how far the weights of this rank's stages are from those of a training on one rank."""
    pipeline = Pipeline(kind, strategy, micro_batches=4)
    for step in range(STEPS):
        pipeline.step(step)
    return max(float((value - trained_alone()[name]).abs().max()) for name, value in pipeline.weights().items())


@over_each(times=2, kind=list(STAGES), levels=["GGG", "IGG", "IIG", "III", "NNG", "stock"])
def test_stages_train_as_one_rank(pool: Callable[[int], Pool], kind: str, levels: str) -> None:
    strategy = STOCK if levels == "stock" else Strategy(levels, **TWO)
    assert max(pool(8).run(distance_to_one_rank, kind, strategy)) <= 1e-6  # of weights of 0.3, after steps of 0.01


def sent_in_a_step(kind: str, strategy: Strategy, micro_batches: int) -> dict[str, int]:
    """In a worker: what this rank sends between nodes in a step, after the first, in which torch runs stages twice."""
    pipeline = Pipeline(kind, strategy, micro_batches)
    pipeline.step(0)
    before = pipeline.sent()
    pipeline.step(1)
    return {kind: sent - before[kind] for kind, sent in pipeline.sent().items()}


@over_each(kind=list(STAGES), levels=["IIG", "III", "NNG"])
def test_nodes_send_once_a_step(pool: Callable[[int], Pool], kind: str, levels: str) -> None:
    strategy = Strategy(levels, **TWO)
    few = pool(8).run(sent_in_a_step, kind, strategy, 2 * STAGES[kind])
    assert pool(8).run(sent_in_a_step, kind, strategy, ROWS) == few
    if levels == "III":  # of its half of a layer, a rank sends half to the other node, and then half of the sums
        half = -(-sharded_numel(2) // 2)
        assert few == [{"gather": 0, "reduce": LAYERS // 2 * 2 * half * BYTES}] * 8
    else:
        assert few == [dict.fromkeys(("gather", "reduce"), LAYERS // 2 * sharded_numel(4) * BYTES)] * 8


def sharded_numel(ranks: int) -> int:
    """Count the values of a layer that one of ``ranks`` ranks holds, rows being rounded up."""
    return sum(-(-p.shape[0] // ranks) * p.shape[1:].numel() for p in Layer().parameters())


def test_gradient_scope_g_sends_each_micro_batch_and_what_the_schedule_reduces(pool: Callable[[int], Pool]) -> None:
    once = pool(8).run(sent_in_a_step, "1f1b", Strategy("IIG", **TWO), 4)
    each = pool(8).run(sent_in_a_step, "1f1b", Strategy("IGG", **TWO), 4)
    assert [sent["reduce"] for sent in each] == [5 * sent["reduce"] for sent in once]
    assert [sent["gather"] for sent in each] == [sent["gather"] for sent in once]


def losses_of(kind: str, strategy: Any) -> list[list[float]]:
    """In a worker: the losses of all micro-batches, of each step; empty on ranks without the last stage."""
    pipeline = Pipeline(kind, strategy, micro_batches=4)
    return [pipeline.step(step) for step in range(STEPS)]


CODED = {
    "zeropp": Strategy.zeropp(**TWO),
    "delta": Strategy.zeropp(levels="IIG", weights=Int4Delta(), **TWO),
    "loco": Strategy.loco(**TWO),
    "loco within nodes": Strategy("III", gradients=Int4(32), error_feedback=LoCo(), **TWO),
}


@over_each(kind=list(STAGES), codecs=list(CODED))
def test_codecs_keep_the_loss(pool: Callable[[int], Pool], kind: str, codecs: str) -> None:
    def means(replies: list[list[list[float]]]) -> list[float]:
        of_last_stage = [reply for reply in replies if reply[0]]
        assert len(of_last_stage) == DATA_PARALLEL
        return [sum(map(sum, step)) / sum(map(len, step)) for step in zip(*of_last_stage, strict=True)]

    stock = means(pool(8).run(losses_of, kind, STOCK))
    assert stock[-1] < stock[0]
    assert means(pool(8).run(losses_of, kind, CODED[codecs])) == pytest.approx(stock, rel=0.02)
