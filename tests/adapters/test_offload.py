"""Offloaded parameters train as others; optimizers in the backward send and train what a step after it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter, Case, Fsdp1
from harness.covering import ADAPTERS, over_adapters, over_each
from harness.offload import offloading, without_pinning
from harness.pool import Pool, Pools, device_type
from harness.training import train
from harness.wiretap import sent_in
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.sharded_grad_scaler import _GeneralMultiDeviceReplicator
from torch.distributed.optim import _apply_optimizer_in_backward

from fsdp_zpp import Int2Delta, Int4, Int4Delta, Int8, LocalSteps, LoCo, Strategy

TWO: Any = {"gpus_per_node": 2}
CODECS: Any = {"weights": Int8(64), "gradients": Int4(64), **TWO}


@contextmanager
def scales_that_have_arrived() -> Iterator[None]:
    """Return a context in which torch's scaler waits for what it copies from a GPU and then multiplies by."""
    get = _GeneralMultiDeviceReplicator.get

    def get_and_wait(self: _GeneralMultiDeviceReplicator, device: torch.device) -> Tensor:
        copy = get(self, device)
        if device.type == "cpu" and self.master.device.type != "cpu":
            torch.accelerator.synchronize()
        return copy

    with mock.patch.object(_GeneralMultiDeviceReplicator, "get", get_and_wait):
        yield


def distance_from_kept(adapter: Adapter, case: Case, strategy: Strategy) -> float:
    """In a worker: the distance of offloaded weights from others; both have trained alike."""
    weights, group = [], None
    if case.scaler and device_type() == "cuda":  # a scaler of FSDP2's offloaded gradients communicates on CPUs, too
        group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    with without_pinning(), scales_that_have_arrived():
        for each in (adapter, offloading(adapter)):
            model = each.make(case, strategy, group)
            # Products with a power of two are exact, so that steps are the same on CPUs and GPUs.
            train(each, model, case, optimizer=torch.optim.SGD(model.parameters(), lr=0.125))
            weights.append(each.full_weights(model))
    return models.distance(*weights)


LONG = Case(clip=None, steps=4, micro_batches=2)
TRAININGS = {
    "tied": (replace(LONG, model=(("tied", True),)), Strategy("IGG", **CODECS | {"weights": Int4Delta(64, Int8(64))})),
    "clipped": (replace(LONG, clip=0.01), Strategy("IIG", error_feedback=LoCo(), **CODECS)),
    "scaled": (Case(clip=0.01, scaler=True, steps=4), Strategy("IGG", **CODECS)),
    "quantized": (Case(clip=None, frozen=True), Strategy("IGG", frozen=Int8(64), gradients=Int4(64), **TWO)),
    "local steps": (LONG, Strategy("III", local_steps=LocalSteps(2, codec=Int4(64), error_feedback=LoCo()), **TWO)),
    "local steps on the CPU": (LONG, Strategy("NNI", local_steps=LocalSteps(2, overlap=1, offload=True), **TWO)),
}


@over_each(rest=False, adapter=ADAPTERS, training=TRAININGS)
def test_offloaded_parameters_train_as_others(pool: Pools, adapter: Adapter, training: tuple[Case, Strategy]) -> None:
    case, strategy = training
    # A GPU sums norms in another order than a CPU.
    bound = 1e-6 if device_type() != "cpu" and case.clip is not None else 0.0
    with ExitStack() as stack:
        workers = pool(4)
        if case.scaler:
            # In new processes: torch keeps what it knows of meshes by their ranks, and takes older ones' groups.
            workers = Pool(4)
            stack.callback(workers.stop, kill=True)
        assert max(workers.run(distance_from_kept, adapter, case, strategy)) <= bound


# ---- optimizers in the backward


def stepping_in_backward(adapter: Adapter, strategy: Strategy | None, optimizer: Callable[..., Any], lr: float) -> Any:
    """In a worker: a model whose parameters have an optimizer each, which steps in the backward."""
    if isinstance(adapter, Fsdp1):
        net = models.make_net()
        _apply_optimizer_in_backward(optimizer, net.parameters(), {"lr": lr})
        return adapter.shard(net, Case(), strategy)
    model = adapter.make(Case(), strategy)
    optimizers = {parameter: optimizer([parameter], lr=lr) for parameter in model.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    return model


class Counting(torch.optim.SGD):
    """An optimizer that notes its steps."""

    notes: ClassVar[list[str]] = []

    def step(self, closure: Any = None) -> Any:
        self.notes.append("step")
        return super().step(closure)


def trained(
    adapter: Adapter, strategy: Strategy, in_backward: bool, micro_batches: int
) -> tuple[list[Any], dict[str, Tensor], list[str]]:
    """Return what steps send, the weights, and in which order the last one stepped and went on with the backward."""
    made = stepping_in_backward(adapter, strategy, Counting, lr=0.125) if in_backward else None
    model = made or adapter.make(Case(), strategy)
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

    sent = [sent_in(lambda number=number: step(number), model, gpus_per_node=2)[0].sent for number in range(3)]
    return sent, adapter.full_weights(model), list(Counting.notes)


def compared(adapter: Adapter, strategy: Strategy, offloads: bool, micro_batches: int) -> None:
    """In a worker: steps in the backward and those after it."""
    with without_pinning():
        used = offloading(adapter) if offloads else adapter
        sent, weights, order = trained(used, strategy, True, micro_batches)
        expected, after, _ = trained(used, strategy, False, micro_batches)
    assert sent == expected
    assert models.distance(weights, after) == 0
    if offloads:
        # The net has two blocks and the root, which comes last: both blocks are launched before the first step.
        assert order[: 2 * micro_batches] == ["block"] * 2 * micro_batches
        assert set(order[2 * micro_batches :]) == {"step"}


IN_BACKWARD = {
    "IIG": Strategy("IIG", **TWO),
    "deltas": Strategy("IGG", weights=Int2Delta(), **TWO),
    "errors": Strategy.loco(**TWO),
    "local steps": Strategy("III", local_steps=LocalSteps(2, codec=Int4(64)), **TWO),
    "overlapped local steps": Strategy("NNI", local_steps=LocalSteps(2, overlap=1), **TWO),
    "NNG": Strategy("NNG", **TWO),
}
# In this order, accumulation meets both adapters, and offloading meets both with it and without it.
USES = {
    f"{ADAPTERS[i]}{', offloaded' * offloads}": (ADAPTERS[i], offloads)
    for i, offloads in ((0, False), (0, True), (1, True), (1, False))
}


@over_each(rest=False, use=USES, strategy=IN_BACKWARD, micro_batches=[1, 2])
def test_steps_in_the_backward_send_and_train_what_others_do(
    pool: Pools, use: tuple[Adapter, bool], strategy: Strategy, micro_batches: int
) -> None:
    pool(4).run(compared, use[0], strategy, use[1], micro_batches)


def after_an_exception(adapter: Adapter) -> float:
    """In a worker: the distance from a training without the step whose backward has failed in the last block."""
    weights = []

    def fail(module: nn.Module, gradients: Any) -> None:
        raise FloatingPointError

    with without_pinning():
        for failing in (False, True):
            model = stepping_in_backward(offloading(adapter), Strategy("IGG", **TWO), Counting, lr=0.125)
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
    """A unit waits for its step when the next one fails, so the backward has made none."""
    if adapter.torch_name == "fully_shard" and not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("torch's fully_shard recovers from exceptions since 2.13")
    assert pool(4).run(after_an_exception, adapter) == [0.0] * 4
