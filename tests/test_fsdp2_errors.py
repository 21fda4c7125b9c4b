"""Bad input to fully_shard is an error on every rank before anything is sent."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import models, refusals
from harness.fully_sharded import Case, logits, make, train
from harness.pool import Pool, device_type
from harness.refusals import Refusal, Reply, assert_refused
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_zpp import Strategy, traffic
from fsdp_zpp.fsdp2 import fully_shard

TWO = Strategy(gpus_per_node=2)


def _integers() -> nn.Module:
    net = models.make_net()
    net.register_parameter("codes", nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False))
    return net


def _mesh(*names: str) -> Any:
    return init_device_mesh(device_type(), (2,) * len(names), mesh_dim_names=names)


CALLS: dict[str, Refusal] = {
    "indivisible": (
        lambda: fully_shard(models.make_net(), strategy=Strategy(gpus_per_node=3)),
        ValueError,
        "allowed are [1, 2, 4]",
    ),
    "not built": (
        lambda: fully_shard(models.make_net(), strategy=Strategy("IIG", gpus_per_node=2)),
        NotImplementedError,
        "not built yet under fully_shard: levels 'IIG'",
    ),
    "the class": (lambda: fully_shard(models.make_net(), strategy=Strategy), TypeError, "did you mean Strategy()"),
    "no strategy": (lambda: fully_shard(models.make_net(), strategy="IGG"), TypeError, "strategy must be a Strategy"),
    "integers": (lambda: fully_shard(_integers(), strategy=TWO), TypeError, "codes is torch.int8"),
    "doubles": (lambda: fully_shard(models.make_net().double(), strategy=TWO), TypeError, "is torch.float64"),
    "2-D mesh": (
        lambda: fully_shard(models.make_net(), strategy=TWO, mesh=_mesh("replicate", "shard")),
        ValueError,
        "takes the 1-D mesh",
    ),
    "reshard to a few": (
        lambda: fully_shard(models.make_net(), strategy=TWO, reshard_after_forward=2),
        ValueError,
        "use Strategy('IGG'",
    ),
    "dimensions of a mesh": (
        lambda: fully_shard(models.make_net(), strategy=TWO, mesh=_mesh("dp", "tp"), dp_mesh_dims=object()),
        NotImplementedError,
        'mesh=mesh["dp"]',
    ),
    "a mesh for a parameter": (
        lambda: fully_shard(models.make_net(), strategy=TWO, shard_placement_fn=lambda p: "elsewhere"),
        ValueError,
        "must return a Shard or None",
    ),
    "unknown argument": (lambda: fully_shard(models.make_net(), strategy=TWO, mesch=1), TypeError, "mesch"),
    "mixed dtypes": (
        lambda: logits(fully_shard(_half_frozen(), strategy=Strategy.zeropp(gpus_per_node=2))),
        TypeError,
        "several dtypes",
    ),
}


def _half_frozen() -> nn.Module:
    net = models.make_net()
    net.blocks[0].requires_grad_(False).bfloat16()
    return net


def attempt(name: str) -> Reply:
    """In a worker: how one call is refused."""
    return refusals.attempt(CALLS[name])


@pytest.mark.parametrize("name", CALLS)
def test_bad_input(pool: Callable[[int], Pool], name: str) -> None:
    assert_refused(pool(4).run(attempt, name), CALLS[name])


def pinned_offload() -> None:
    """In a worker: torch would only say that memory can't be pinned."""
    with pytest.raises(ValueError, match="pin_memory=False"):
        fully_shard(models.make_net(), strategy=TWO, offload_policy=CPUOffloadPolicy())


@pytest.mark.skipif(device_type() == "cuda", reason="there is an accelerator to pin memory for")
def test_pinned_offload_without_accelerator(pool: Callable[[int], Pool]) -> None:
    pool(4).run(pinned_offload)


def logged(strategy: Strategy) -> list[tuple[str, str]]:
    """In a worker: what a model's first two steps log."""
    records: list[tuple[str, str]] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append((record.levelname, record.getMessage()))

    logger = logging.getLogger("fsdp_zpp")
    handler, level = Collect(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    train(make(Case(), strategy), Case(steps=2))
    logger.removeHandler(handler)
    logger.setLevel(level)
    return records


def test_one_line_a_model(pool: Callable[[int], Pool]) -> None:
    first, *others = pool(4).run(logged, Strategy.zeropp(gpus_per_node=2))
    assert others == [[]] * 3
    [(level, line)] = first
    assert level == "INFO"
    assert line.startswith("Net: IGG on 2 nodes x 2, 4 units: weights gathered as int8(256)")
    [(level, line)] = pool(4).run(logged, Strategy("IGG", gpus_per_node=4))[0]
    assert level == "WARNING"
    assert "NOT active: secondary shard" in line


def module_without_parameters() -> int:
    """In a worker: a module that has nothing of its own to shard is left to torch."""
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    for layer in net:
        fully_shard(layer, strategy=TWO)
    assert fully_shard(net, strategy=TWO) is net
    net(torch.ones(2, 6, device=models.device())).sum().backward()
    assert fully_shard.state(net) is net._get_fsdp_state()
    return traffic(net)["gather"]["inter"]


def test_module_without_parameters(pool: Callable[[int], Pool]) -> None:
    assert min(pool(4).run(module_without_parameters)) > 0
