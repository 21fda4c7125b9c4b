"""Checkpoints of data parallelism beside tensor parallelism: on the same mesh, on another one, or on one axis alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter, Fsdp1
from harness.covering import ADAPTERS, over_each
from harness.pool import Pools, device_type
from harness.training import load, save
from harness.two_axes import TWO, WIDTH, Block
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_zpp import CodecState, Int4, Int4Delta, LoCo, Strategy, invalidate

STEPS, ROWS = 2, 8
Shape = tuple[int, int]
"""Ranks of data parallelism and of tensor parallelism."""


class Training:
    """In a worker: a net on a mesh of two axes, and its optimizer; what it learns depends on no mesh."""

    def __init__(self, adapter: Adapter, strategy: Strategy, shape: Shape, seed: int) -> None:
        self.mesh = init_device_mesh(device_type(), shape, mesh_dim_names=("dp", "tp"))
        torch.manual_seed(seed)
        net: Any = nn.Sequential(Block(), Block()).to(models.device())
        where = {adapter.mesh_argument: self.mesh["dp"]}
        for place, block in enumerate(net):
            if shape[1] > 1:
                parallelize_module(block, self.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            net[place] = adapter.wrap(block, strategy, **where)
        self.model: Any = adapter.wrap(net, strategy, **where)
        if isinstance(adapter, Fsdp1):  # torch loses moments of split parameters, under FULL_SHARD, too
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-4, foreach=False)

    def losses(self, first_step: int) -> list[float]:
        """Make steps; return the mean loss of each over all rows of its batch."""
        found = []
        group, ranks = self.mesh["dp"].get_group(), self.mesh["dp"].size()
        for step in range(first_step, first_step + STEPS):
            torch.manual_seed(step)
            rows = torch.randn(ROWS, WIDTH).to(models.device()).chunk(ranks)[self.mesh["dp"].get_local_rank()]
            loss = self.model(rows).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            dist.all_reduce(loss.detach_(), group=group)
            found.append(loss.item() / ranks)
        return found

    def state(self) -> dict[str, Tensor]:
        """Return whole weights, and moments if there are any, on the CPU, by name. Collective."""
        weights, states = get_state_dict(self.model, self.optimizer)
        moments: Any = states["state"]
        of_kinds = {f"{name} {kind}": each for name, kinds in moments.items() for kind, each in kinds.items()}
        return {name: _whole(each) for name, each in (weights | of_kinds).items()}


def _whole(value: Any) -> Tensor:
    while isinstance(value, DTensor):  # one along each dimension of the mesh
        value = value.full_tensor()
    return value.detach().cpu().clone()


def saved(adapter: Adapter, strategy: Strategy, shape: Shape, path: str) -> list[float]:
    """In a worker: train, save, and train on; return the losses after that."""
    training = Training(adapter, strategy, shape, seed=0)
    training.losses(0)
    save(training.model, training.optimizer, CodecState(training.model), path)
    state = training.state()
    if dist.get_rank() == 0:
        torch.save(state, f"{path}/whole.pt")
    return training.losses(STEPS)


def loaded(adapter: Adapter, strategy: Strategy, shape: Shape, path: str) -> tuple[list[str], list[float]]:
    """In a worker: what of a loaded checkpoint differs from what was saved; losses of the steps after that."""
    training = Training(adapter, strategy, shape, seed=1)
    load(training.model, training.optimizer, None, path)
    expected, found = torch.load(f"{path}/whole.pt"), training.state()
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(found[name], value)], training.losses(STEPS)


@over_each(
    rest=False,
    adapter=ADAPTERS,
    levels=[("III", "IGG"), ("IGG", "III")],
    shapes=[((4, 2), (2, 2)), ((4, 2), (4, 1)), ((4, 1), (4, 2))],
)
def test_a_checkpoint_is_loaded_on_another_mesh(
    pool: Pools, tmp_path: Path, adapter: Adapter, levels: tuple[str, str], shapes: tuple[Shape, Shape]
) -> None:
    path, (before, after) = str(tmp_path / "checkpoint"), shapes
    went_on = pool(before[0] * before[1]).run(saved, adapter, Strategy(levels[0], **TWO), before, path)
    for differing, losses in pool(after[0] * after[1]).run(loaded, adapter, Strategy(levels[1], **TWO), after, path):
        assert differing == []
        assert losses == pytest.approx(went_on[0], rel=1e-5)


CODED = {
    "delta and loco": Strategy("IIG", weights=Int4Delta(64), gradients=Int4(64), error_feedback=LoCo(), **TWO),
    "loco within nodes": Strategy("III", gradients=Int4(32), error_feedback=LoCo(hops="both"), **TWO),
}


def resumed(adapter: Adapter, strategy: Strategy, path: str) -> None:
    """In a worker: a training and one that resumes from its checkpoint go on alike."""
    first = Training(adapter, strategy, (4, 2), seed=0)
    first.losses(0)
    save(first.model, first.optimizer, CodecState(first.model), path)
    expected_losses, expected = first.losses(STEPS), first.state()
    second = Training(adapter, strategy, (4, 2), seed=1)
    load(second.model, second.optimizer, CodecState(second.model), path)
    assert second.losses(STEPS) == expected_losses
    found = second.state()
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []
    load(second.model, second.optimizer, CodecState(second.model), path)
    assert_copies_equal_after_a_write_to_one_part(second)


def assert_copies_equal_after_a_write_to_one_part(training: Training) -> None:
    """All parts drop the codec state if the weights of one are not those that it was saved with."""
    tp = training.mesh["tp"]
    with torch.no_grad():
        for name, parameter in training.model.named_parameters():
            if "up." in name and tp.get_local_rank() == 1:
                local_part(parameter).mul_(2)
    invalidate(training.model)
    training.losses(STEPS)
    parts = {name: local_part(parameter) for name, parameter in training.model.named_parameters()}
    for name, part in parts.items():
        if "up." not in name and "down." not in name:
            copies = [torch.empty_like(part) for _ in range(2)]
            dist.all_gather(copies, part.detach().clone(), group=tp.get_group())
            assert torch.equal(*copies), name


def local_part(parameter: Tensor) -> Tensor:
    while isinstance(parameter, DTensor):
        parameter = parameter.to_local()
    return parameter


@over_each(adapter=ADAPTERS, strategy=CODED)
def test_codec_state_resumes_bit_for_bit_or_is_dropped_by_all(
    pool: Pools, tmp_path: Path, adapter: Adapter, strategy: Strategy
) -> None:
    pool(8).run(resumed, adapter, strategy, str(tmp_path / "checkpoint"))
