"""Bad input is an error on every rank before any collective; a dead rank is an error on the others."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models, refusals
from harness.models import Case
from harness.pool import Pool, WorkerError, device_type
from harness.refusals import Refusal, Reply, assert_refused
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel as FSDP, ShardingStrategy

from fsdp_zpp import (
    Int4,
    Int8,
    QuantizedReduceState,
    Strategy,
    invalidate,
    quantized_reduce_hook,
    traffic,
)

TWO = {"gpus_per_node": 2}


def _integers() -> nn.Module:
    net = models.make_net()
    net.register_parameter("codes", nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False))
    return net


def _doubles() -> nn.Module:
    return models.make_net().double()


def _groups() -> Any:
    return dist.new_group([0, 1]), dist.new_group([2, 3])


CONSTRUCTIONS: dict[str, Refusal] = {
    "indivisible": (
        lambda: FSDP(models.make_net(), sharding_strategy=Strategy(gpus_per_node=3)),
        ValueError,
        "allowed are",
    ),
    "not built": (
        lambda: FSDP(models.make_net(), sharding_strategy=Strategy("IIG", **TWO)),
        NotImplementedError,
        "not built yet under FullyShardedDataParallel: levels 'IIG'",
    ),
    "feedback": (
        lambda: FSDP(models.make_net(), sharding_strategy=Strategy.loco(**TWO)),
        NotImplementedError,
        "error_feedback=LoCo",
    ),
    "frozen codec": (
        lambda: FSDP(models.make_net(), sharding_strategy=Strategy.mixzpp(**TWO)),
        NotImplementedError,
        "frozen=",
    ),
    "the class": (
        lambda: FSDP(models.make_net(), sharding_strategy=Strategy),
        TypeError,
        "did you mean Strategy()",
    ),
    "integers": (
        lambda: FSDP(_integers(), sharding_strategy=Strategy(**TWO)),
        TypeError,
        "codes is torch.int8",
    ),
    "doubles": (lambda: FSDP(_doubles(), sharding_strategy=Strategy(**TWO)), TypeError, "is torch.float64"),
    "pair of groups": (
        lambda: FSDP(models.make_net(), process_group=_groups(), sharding_strategy=Strategy(**TWO)),
        ValueError,
        "pair of groups",
    ),
    "2-D mesh": (
        lambda: FSDP(
            models.make_net(),
            device_mesh=init_device_mesh(device_type(), (2, 2), mesh_dim_names=("a", "b")),
            sharding_strategy=Strategy(**TWO),
        ),
        ValueError,
        "1-D device_mesh",
    ),
    "no codec": (lambda: QuantizedReduceState(4), TypeError, "codec must be a codec"),
    "state layout": (lambda: QuantizedReduceState(Int4(128), gpus_per_node=3), ValueError, "allowed are"),
    "traffic of what": (lambda: traffic(models.make_net()), ValueError, "no part of this Net"),
    "invalidate what": (lambda: invalidate(models.make_net()), ValueError, "no part of this Net"),
    "hook without state": (
        lambda: quantized_reduce_hook(None, torch.ones(4), torch.ones(1)),
        TypeError,
        "needs a QuantizedReduceState",
    ),
    "hook on replicas": (
        lambda: quantized_reduce_hook(QuantizedReduceState(Int4(128), **TWO), torch.ones(4)),
        ValueError,
        "NO_SHARD",
    ),
}


def attempt(name: str) -> Reply:
    """In a worker: how one call is refused."""
    return refusals.attempt(CONSTRUCTIONS[name])


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_bad_input(pool: Callable[[int], Pool], name: str) -> None:
    assert_refused(pool(4).run(attempt, name), CONSTRUCTIONS[name])


def state_of_another_group() -> str:
    """In a worker: a hook state made for two ranks, on a model sharded over four."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    state = QuantizedReduceState(Int4(128), gpus_per_node=1, process_group=pairs[dist.get_rank() // 2])
    model = models.wrap(Case(), ShardingStrategy.FULL_SHARD)
    with pytest.raises(ValueError, match="made for the ranks") as caught:
        model.register_comm_hook(state, quantized_reduce_hook)
    with pytest.raises(ValueError, match="another process group"):
        quantized_reduce_hook(state, torch.ones(8), torch.ones(2))
    return str(caught.value)


def test_state_of_another_group(pool: Callable[[int], Pool]) -> None:
    messages = pool(4).run(state_of_another_group)
    assert all("this model is sharded over [0, 1, 2, 3]" in message for message in messages)


def second_hook() -> None:
    """In a worker: a strategy owns the reduction, so another hook is refused, not ignored."""
    model = models.wrap(Case(), Strategy.zeropp(**TWO))
    with pytest.raises(AssertionError, match="already registered"):
        model.register_comm_hook(QuantizedReduceState(Int4(128), **TWO), quantized_reduce_hook)


def test_a_strategy_and_a_hook_do_not_mix(pool: Callable[[int], Pool]) -> None:
    pool(4).run(second_hook)


def offload() -> str:
    """In a worker: parameters offloaded to the CPU train as with stock, or are refused at construction."""
    case = Case(fsdp=(("use_orig_params", True), ("cpu_offload", CPUOffload(offload_params=True))), clip=None)
    if device_type() == "cpu":
        with pytest.raises(ValueError, match="needs an accelerator") as caught:
            models.wrap(case, Strategy(**TWO))
        return str(caught.value)
    weights = []
    for strategy in (Strategy("IGG", **TWO), ShardingStrategy.FULL_SHARD):
        model = models.wrap(case, strategy)
        models.train(model, case)
        weights.append(models.full_weights(model))
    assert models.distance(*weights) <= 1e-6
    models.train(models.wrap(case, Strategy.zeropp(**TWO)), case)
    return ""


def test_cpu_offload(pool: Callable[[int], Pool]) -> None:
    pool(4).run(offload)


@contextmanager
def collected() -> Iterator[list[tuple[str, str]]]:
    """What fsdp_zpp logs while in the context: levels and messages."""
    records: list[tuple[str, str]] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append((record.levelname, record.getMessage()))

    logger = logging.getLogger("fsdp_zpp")
    handler, level = Collect(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(level)


def logged(strategy: Strategy) -> list[tuple[str, str]]:
    """In a worker: what a model's first two steps log."""
    with collected() as records:
        models.train(models.wrap(Case(), strategy), Case(steps=2))
    return records


def test_one_line_a_model(pool: Callable[[int], Pool]) -> None:
    first, *others = pool(4).run(logged, Strategy.zeropp(**TWO))
    assert others == [[]] * 3
    [(level, line)] = first
    assert level == "INFO"
    assert line.startswith("Net: IGG on 2 nodes x 2, 4 units: weights gathered as int8(256)")
    [(level, line)] = pool(4).run(logged, Strategy.zeropp(gpus_per_node=4, gradients=Int8(64)))[0]
    assert level == "WARNING"
    assert "NOT active" in line


def hook_logged(gpus_per_node: int) -> list[tuple[str, str]]:
    """In a worker: what the hook alone logs when it is registered."""
    with collected() as records:
        model = models.wrap(Case(), ShardingStrategy.FULL_SHARD)
        model.register_comm_hook(QuantizedReduceState(Int4(128), gpus_per_node=gpus_per_node), quantized_reduce_hook)
    return records


def test_the_hook_alone_logs_too(pool: Callable[[int], Pool]) -> None:
    [(level, line)] = pool(4).run(hook_logged, 2)[0]
    assert level == "INFO"
    assert line.startswith("Net: quantized_reduce_hook on 2 nodes x 2, 4 units: gradients reduced as int8(128) inside")
    [(level, line)] = pool(4).run(hook_logged, 4)[0]
    assert level == "WARNING"
    assert "NOT active: gradients reduced as int4(128) between nodes (one node" in line


def ignored_as_iterator(strategy: Strategy | ShardingStrategy) -> list[str]:
    """In a worker: the parameters that FSDP leaves alone when they are given as an iterator."""
    net = models.make_net()
    shape = net.head.weight.shape
    model = FSDP(net, sharding_strategy=strategy, ignored_states=net.head.parameters(), device_id=models.device())
    return [name for name, p in model.named_parameters() if p.shape == shape]


def test_ignored_states_may_be_an_iterator(pool: Callable[[int], Pool]) -> None:
    stock = pool(4).run(ignored_as_iterator, ShardingStrategy.FULL_SHARD)
    assert pool(4).run(ignored_as_iterator, Strategy(**TWO)) == stock == [["_fsdp_wrapped_module.head.weight"]] * 4


def leave_in_step(dies: bool) -> str:
    """In a worker: the last rank dies, or stays away, between two steps of two nodes of two."""
    group = dist.new_group(timeout=timedelta(seconds=5))
    case = Case(steps=1, clip=None)
    model = models.wrap(case, Strategy.zeropp(**TWO), process_group=group)
    models.train(model, case)
    if dist.get_rank() == dist.get_world_size() - 1:
        if dies:
            os._exit(1)
        return "stayed away"
    with pytest.raises(RuntimeError) as caught:
        models.train(model, case)
    return type(caught.value).__name__


@pytest.mark.skipif(device_type() == "cuda", reason="NCCL's watchdog ends the process instead of raising")
def test_a_dead_rank_is_an_error_on_the_others() -> None:
    pool = Pool(4)
    with pytest.raises(WorkerError, match=r"failed on ranks \[3\] of 4; rank 3:\nthe process died"):
        pool.run(leave_in_step, True)


@pytest.mark.skipif(device_type() == "cuda", reason="NCCL's watchdog ends the process instead of raising")
def test_an_absent_rank_is_an_error_within_the_timeout() -> None:
    pool = Pool(4)
    assert pool.run(leave_in_step, False) == ["RuntimeError"] * 3 + ["stayed away"]
    pool.stop(kill=True)
