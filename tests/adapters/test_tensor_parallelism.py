"""Data parallelism over two nodes of two, beside tensor parallelism over two ranks that neither dimension knows of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter
from harness.covering import SCOPES, over_adapters
from harness.pool import Pool, device_type
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_zpp import Int4, Int4Delta, Int8, LoCo, Strategy

WIDTH, HIDDEN, STEPS, DATA_PARALLEL = 40, 80, 4, 4
TWO: dict[str, Any] = {"gpus_per_node": 2}


class Block(nn.Module):
    """Two linears that tensor parallelism splits, and beside them a norm and matrices of which each rank has a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.latent = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.mixer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + self.down(torch.relu(self.up(x))) + self.mixer(self.latent(x))


def make() -> Any:
    """Make the net that all trainings start from."""
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).to(models.device())


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer that amplifies no difference of gradients, as Adam does near zero."""
    return torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9, foreach=False)


def batch(step: int, rank: int) -> Tensor:
    """Make the batch of a data-parallel rank."""
    torch.manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH).to(models.device())


def trained(adapter: Adapter, strategy: Strategy) -> tuple[Any, DeviceMesh]:
    """Train a net under a strategy beside tensor parallelism; return it and the mesh of both."""
    mesh = init_device_mesh(device_type(), (DATA_PARALLEL, 2), mesh_dim_names=("dp", "tp"))
    net = make()
    for place, block in enumerate(net):
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        net[place] = adapter.wrap(block, strategy, **{adapter.mesh_argument: mesh["dp"]})
    model: Any = adapter.wrap(net, strategy, **{adapter.mesh_argument: mesh["dp"]})
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        model(batch(step, mesh["dp"].get_local_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, mesh


def trained_alone() -> dict[str, Tensor]:
    """Train a net on this rank alone, on the batches of all data-parallel ranks."""
    net = make()
    optimizer = optimizer_of(net)
    for step in range(STEPS):
        for rank in range(DATA_PARALLEL):
            (net(batch(step, rank)).square().mean() / DATA_PARALLEL).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


def whole(value: Any) -> Tensor:
    """Gather a tensor that may be sharded along one dimension of a mesh, and what it shards along another one."""
    while isinstance(value, DTensor):
        value = value.full_tensor()
    return value


def distance_to_one_rank(adapter: Adapter, strategy: Strategy) -> float:
    """In a worker: how far the trained weights are from those of a training on one rank."""
    model, _ = trained(adapter, strategy)
    weights = {name: whole(value) for name, value in get_model_state_dict(model).items()}
    return max(float((weights[name] - value).abs().max()) for name, value in trained_alone().items())


def is_refused(adapter: Adapter, levels: str) -> bool:
    """Return whether torch can't do it: its NO_SHARD has no place for what is sharded already."""
    return str(adapter) == "fsdp1" and levels == "NNN"


@pytest.mark.parametrize("levels", SCOPES)
@over_adapters
def test_all_scopes_train_as_one_rank(pool: Callable[[int], Pool], adapter: Adapter, levels: str) -> None:
    if is_refused(adapter, levels):
        with pytest.raises(Exception, match="NO_SHARD, which can't be combined with another parallelism"):
            pool(8).run(distance_to_one_rank, adapter, Strategy(levels, **TWO))
        return
    assert max(pool(8).run(distance_to_one_rank, adapter, Strategy(levels, **TWO))) <= 1e-6


def copies_that_differ(adapter: Adapter, strategy: Strategy) -> dict[str, float]:
    """In a worker: how far the copies are apart that the ranks of tensor parallelism have, if they differ, by name."""
    model, mesh = trained(adapter, strategy)
    differing = {}
    for name, value in get_model_state_dict(model).items():
        if ".up." in name or name.endswith("down.weight"):
            continue
        local: Any = value
        while isinstance(local, DTensor):
            local = local.to_local()
        ranks = [torch.empty_like(local) for _ in range(2)]
        dist.all_gather(ranks, local.contiguous(), group=mesh["tp"].get_group())
        if not torch.equal(*ranks):
            differing[name] = float((ranks[0] - ranks[1]).abs().max())
    return differing


CODED = [
    Strategy.zeropp(**TWO),
    Strategy.zeropp(weights=Int4Delta(), **TWO),
    Strategy("IIG", gradients=Int4(), error_feedback=LoCo(dtype=Int8(1024)), **TWO),
    Strategy("III", gradients=Int4(), error_feedback=LoCo(), **TWO),
    Strategy("NNG", weights=Int8(64), gradients=Int8(1024), intra_gradients=None, **TWO),
    Strategy("NNN", gradients=Int4(32), **TWO),
]


@pytest.mark.parametrize("strategy", CODED, ids=lambda each: f"{each.levels} {each.weights} {each.gradients}")
@over_adapters
def test_copies_stay_equal_bit_for_bit(pool: Callable[[int], Pool], adapter: Adapter, strategy: Strategy) -> None:
    if is_refused(adapter, strategy.levels):
        pytest.skip("refused")
    assert pool(8).run(copies_that_differ, adapter, strategy) == [{}] * 8
