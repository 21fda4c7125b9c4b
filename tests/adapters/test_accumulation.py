"""Gradients of several micro-batches are summed in fp32 and shown once complete, whatever the last one uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter, Case, Precision
from harness.covering import ADAPTERS, SCOPES, over_each
from harness.fsdp1 import Fsdp1
from harness.pool import Pool
from harness.training import logits
from heads import Heads, average, inputs
from torch import Tensor

from fsdp_zpp import Strategy
from fsdp_zpp.config.levels import LEGAL_LEVELS


def shown_before_the_last(adapter: Adapter, scopes: str) -> list[bool]:
    """In a worker: whether a parameter has a gradient after a first micro-batch, and after the last."""
    model = adapter.make(Case(), Strategy(scopes, gpus_per_node=2))
    shown = []
    for last in (False, True):
        with adapter.micro_batch(model, last, False):
            models.loss_of(model, models.batch(0, int(last))).backward()
        shown.append(any(p.grad is not None for p in model.parameters()))
    return shown


@pytest.mark.parametrize("scopes", [scopes for scopes in LEGAL_LEVELS if scopes != "NNN"])
def test_accumulated_gradients_are_shown_after_the_last_micro_batch(pool: Callable[[int], Pool], scopes: str) -> None:
    """FSDP1 would take them for a user's own and copy them, while another stream may still be at them."""
    for before, after in pool(4).run(shown_before_the_last, Fsdp1(), scopes):
        assert not before
        assert after


def sometimes_skipped(adapter: Adapter, scopes: str) -> float:
    """In a worker: the distance from a net that is not sharded, when the last micro-batch leaves out a block."""
    model, net = adapter.make(Case(), Strategy(scopes, gpus_per_node=2)), models.make_net()
    inner = next(module for module in model.modules() if isinstance(module, models.Net))
    optimizers = [models.make_optimizer("sgd", m.parameters()) for m in (model, net)]
    for step in range(2):
        for micro_batch in range(2):
            inner.skipped = net.skipped = 1 if micro_batch == 1 else None
            with adapter.micro_batch(model, micro_batch == 1, False):
                models.loss_of(model, models.batch(step, micro_batch)).backward()
            models.loss_of(net, models.batch(step, micro_batch)).backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return models.distance(adapter.full_weights(model), {name: p.detach().cpu() for name, p in net.named_parameters()})


@over_each(adapter=ADAPTERS, scopes=LEGAL_LEVELS)
def test_the_last_micro_batch_may_leave_out_a_unit(pool: Callable[[int], Pool], adapter: Adapter, scopes: str) -> None:
    assert max(pool(4).run(sometimes_skipped, adapter, scopes)) <= 1e-6


def left_out_after_a_reduction(adapter: Adapter, scopes: str) -> float:
    """In a worker: as :func:`sometimes_skipped`, when a block is used by a first, synchronized micro-batch alone.

    Stock FSDP1 is no oracle: it forgets that gradient if another micro-batch runs the block before the last.
    """
    model, net = adapter.make(Case(), Strategy(scopes, gpus_per_node=2)), models.make_net()
    inner = next(module for module in model.modules() if isinstance(module, models.Net))
    for micro_batch in range(3):
        inner.skipped = net.skipped = None if micro_batch == 0 else 1
        with adapter.micro_batch(model, micro_batch != 1, False):
            models.loss_of(model, models.batch(0, micro_batch)).backward()
        models.loss_of(net, models.batch(0, micro_batch)).backward()
        if micro_batch == 0:
            logits(model)  # gathers the block
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    exact = {name: p.grad.cpu() for name, p in net.named_parameters()}
    return models.distance(adapter.full_gradients(model), exact)


@over_each(adapter=ADAPTERS, scopes=SCOPES)
def test_gradients_of_a_synchronized_micro_batch_stay(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str
) -> None:
    assert max(pool(4).run(left_out_after_a_reduction, adapter, scopes)) <= 1e-6


def accumulated_in_bf16(adapter: Adapter, scopes: str) -> tuple[float, float]:
    """In a worker: the distance of gradients of four bf16 micro-batches from the sum of each alone, and of one."""
    case = Case(precision=Precision(torch.bfloat16, torch.float32))
    singles = [gradient_of(adapter, case, scopes, [micro_batch]) for micro_batch in range(4)]
    exact = {name: sum(single[name] for single in singles) for name in singles[0]}
    together = gradient_of(adapter, case, scopes, list(range(4)))
    return models.distance(together, exact), models.distance(singles[0], exact)


def gradient_of(adapter: Adapter, case: Case, scopes: str, micro_batches: list[int]) -> dict[str, Tensor]:
    """In a worker: full gradients of some micro-batches."""
    model = adapter.make(case, Strategy(scopes, gpus_per_node=2))
    for micro_batch in micro_batches:
        with adapter.micro_batch(model, micro_batch == micro_batches[-1], False):
            models.loss_of(model, models.batch(0, micro_batch)).backward()
    return adapter.full_gradients(model)


@over_each(adapter=ADAPTERS, scopes=[scopes for scopes in SCOPES if scopes != "NNN"])
def test_micro_batches_are_summed_in_fp32(pool: Callable[[int], Pool], adapter: Adapter, scopes: str) -> None:
    for together, one in pool(4).run(accumulated_in_bf16, adapter, scopes):
        assert together <= 1e-6
        assert one > 0.1


def gradient_of_accumulation(adapter: Adapter, strategy: Any, micro_batches: int) -> Tensor:
    """In a worker: the trunk's full gradient of many micro-batches, in bf16, or in fp64 for None."""
    net = Heads().to(models.device())
    if strategy is None:
        net = net.to(torch.bfloat16).double()
        for micro_batch in range(micro_batches):
            net(inputs(0, micro_batch).bfloat16().double()).backward()
        average(net.parameters())
        return net.trunk.weight.grad.cpu()
    net = net.to(torch.bfloat16)
    model = adapter.wrap(net, strategy)
    for micro_batch in range(micro_batches):
        with adapter.micro_batch(model, micro_batch == micro_batches - 1, False):
            model(inputs(0, micro_batch).bfloat16()).backward()
    return next(g for name, g in adapter.full_gradients(model).items() if name.endswith("trunk.weight")).double()


@over_each(adapter=ADAPTERS, scopes=["GGG", "IGG", "IIG"], gpus_per_node=[2, 4])
def test_many_bf16_micro_batches_are_summed_in_fp32(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str, gpus_per_node: int
) -> None:
    if gpus_per_node == 4:
        scopes = scopes.replace("GGG", "IGG")  # GGG on one node is torch's own
    exact = pool(4).once(gradient_of_accumulation, adapter, None, 96)[0]
    ours = pool(4).run(gradient_of_accumulation, adapter, Strategy(scopes, gpus_per_node=gpus_per_node), 96)[0]
    # A sum in bf16, which has 8 bits, is 0.005 to 0.01 off; one in fp32 of as many rounded gradients far less.
    assert (ours - exact).norm() / exact.norm() <= 0.003
