"""What only FullyShardedDataParallel can do trains as stock FULL_SHARD does, to rounding."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import STOCK, Case
from harness.covering import SCOPES, over_each
from harness.fsdp1 import Fsdp1
from harness.pool import Pool, device_type
from harness.steps_in_backward import stepped
from harness.training import gradients, largest_distance, train
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel as FSDP, MixedPrecision

from fsdp_zpp import Strategy

FP32, BF16 = torch.float32, torch.bfloat16
FLAT = Fsdp1(use_orig_params=False)


def with_(**arguments: Any) -> Fsdp1:
    """FSDP called with some more arguments."""
    return Fsdp1(arguments=tuple(arguments.items()))


CASES = {
    "flat": (FLAT, Case()),
    "no_sync flat": (FLAT, Case(micro_batches=2)),
    "tied flat": (FLAT, Case(model=(("tied", True),))),
    "no limit": (with_(limit_all_gathers=False), Case()),
    "forward prefetch": (with_(forward_prefetch=True), Case()),
    "backward post": (with_(backward_prefetch=BackwardPrefetch.BACKWARD_POST), Case()),
    "no backward prefetch": (with_(backward_prefetch=None), Case()),
    "outside no_reentrant": (Fsdp1(), Case(checkpointing="outside no_reentrant")),
    "outside reentrant": (Fsdp1(), Case(checkpointing="outside reentrant")),
}


@over_each(2, trained=CASES, scopes=SCOPES)
def test_equals_full_shard(pool: Callable[[int], Pool], trained: tuple[Fsdp1, Case], scopes: str) -> None:
    adapter, case = trained
    distances = pool(4).run(largest_distance, adapter, case, Strategy(scopes, gpus_per_node=2))
    assert max(distances) <= 1e-6


def other_values(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """The same parameter has other memory."""
    parameter.data = parameter.data * 0.5


def other_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Another parameter stands in its place."""
    setattr(module, name, nn.Parameter(parameter.detach() * 0.5))


def other_shape(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """The same values have another shape."""
    parameter.data = parameter.data[None]


def masked_in_forwards(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """From now on, each forward computes with other values, which nobody is told of."""

    def mask(module: nn.Module, inputs: Any) -> None:
        weights = getattr(module, name)
        weights.data = weights.data * 0.5

    if not module._forward_pre_hooks:
        module.register_forward_pre_hook(mask)


def trained_with_replaced(replace: Callable[..., None], strategy: Any) -> dict[str, Tensor]:
    """In a worker: the weights of a model whose parameters were replaced between steps."""
    adapter, case = Fsdp1(), Case(steps=1, clip=None)
    model = adapter.make(case, strategy)
    for step in range(3):
        train(adapter, model, case, first_step=step)
        for module in list(model.modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                replace(module, name, parameter)
    train(adapter, model, case, first_step=3)
    return adapter.full_weights(model)


@cache
def trained_by_stock_with_replaced(replace: Callable[..., None]) -> dict[str, Tensor]:
    """In a worker: the weights of one that stock trains."""
    return trained_with_replaced(replace, STOCK)


def distance_with_replaced(replace: Callable[..., None], scopes: str) -> float:
    """In a worker: how far such a model is from one that stock trains."""
    of_strategy = trained_with_replaced(replace, Strategy(scopes, gpus_per_node=2))
    return models.distance(of_strategy, trained_by_stock_with_replaced(replace))


REPLACE = (other_values, other_parameter, other_shape, masked_in_forwards)


@pytest.mark.parametrize("replace", REPLACE, ids=lambda replace: replace.__name__)
@pytest.mark.parametrize("scopes", ["GGG", "IGG", "III"])
def test_parameters_replaced_between_steps_are_trained_on(
    pool: Callable[[int], Pool], scopes: str, replace: Callable[..., None]
) -> None:
    assert max(pool(4).run(distance_with_replaced, replace, scopes)) <= 1e-6


def give_and_take(model: FSDP) -> list[int]:
    """The sizes, after a step, of parameters of which this rank has nothing and which were given something."""
    absent = [parameter for parameter in model.parameters() if not parameter.numel()]
    for parameter in absent:
        parameter.data = parameter.new_ones(5)
    train(Fsdp1(), model, Case(steps=1, clip=None), first_step=1)
    return [parameter.numel() for parameter in absent]


def look_in_inference_mode(model: FSDP) -> list[int]:
    """Parameters become trainable again after a state dict was taken in inference mode."""
    with torch.inference_mode():
        model.state_dict()
    train(Fsdp1(), model, Case(steps=1, clip=None), first_step=1)
    for parameter in model.parameters():
        parameter.requires_grad_(False).requires_grad_(True)
    return []


def refused_on_the_way(model: FSDP) -> list[int]:
    """Training goes on after a parameter of the wrong shape was refused, and taken back."""
    for instance in FSDP.fsdp_modules(model):
        handle: Any = instance._handle  # the next forward would ask it, on all ranks, of which some do not refuse
        module, name = handle.flat_param._param_infos[0].module, handle.flat_param._param_infos[0].param_name
        right = getattr(module, name)
        setattr(module, name, nn.Parameter(torch.ones(3, device=right.device)))
        if right.numel():
            with pytest.raises(RuntimeError, match="Cannot writeback"):
                handle._writeback_orig_params()
        setattr(module, name, right)
    train(Fsdp1(), model, Case(steps=1, clip=None), first_step=1)
    return []


def after(event: Callable[[FSDP], list[int]], strategy: Any) -> tuple[list[int], float]:
    """In a worker: what an event between steps gives, and how far the weights are from those without it."""
    adapter, case = Fsdp1(), Case(steps=1, clip=None)
    model, undisturbed = adapter.make(case, strategy), adapter.make(case, strategy)
    for each in (model, undisturbed):
        train(adapter, each, case)
    found = event(model)
    train(adapter, undisturbed, case, first_step=1)
    return found, models.distance(adapter.full_weights(model), adapter.full_weights(undisturbed))


@pytest.mark.parametrize("strategy", [STOCK, Strategy("IGG", gpus_per_node=2)], ids=["stock", "IGG"])
@pytest.mark.parametrize(
    "event", [give_and_take, look_in_inference_mode, refused_on_the_way], ids=lambda event: event.__name__
)
def test_what_happens_to_parameters_between_steps_leaves_nothing(
    pool: Callable[[int], Pool], event: Callable[[FSDP], list[int]], strategy: Any
) -> None:
    for found, distance in pool(4).run(after, event, strategy):
        assert not any(found)
        assert distance == 0


def gradient_distance(adapter: Fsdp1, strategy: Strategy) -> float:
    """In a worker: the distance of the gradient from stock."""
    return models.distance(gradients(adapter, Case(), strategy), gradients(adapter, Case(), STOCK))


@pytest.mark.parametrize("scopes", SCOPES)
def test_gradients_with_cast_forward_inputs_equal_stock(pool: Callable[[int], Pool], scopes: str) -> None:
    adapter = with_(mixed_precision=MixedPrecision(BF16, FP32, BF16, cast_forward_inputs=True))
    assert max(pool(4).run(gradient_distance, adapter, Strategy(scopes, gpus_per_node=2))) <= 1e-6


def gradient_dtypes(strategy: Strategy | None) -> set[torch.dtype]:
    """In a worker: dtypes of the gradients after a backward that keeps them in low precision."""
    policy = MixedPrecision(BF16, BF16, BF16, keep_low_precision_grads=True)
    model = with_(mixed_precision=policy).make(Case(), strategy)
    models.loss_of(model, models.batch(0, 0)).backward()
    return {p.grad.dtype for p in model.parameters() if p.grad is not None and p.grad.numel()}


@pytest.mark.parametrize("strategy", [Strategy.zeropp(gpus_per_node=2), STOCK], ids=["zeropp", "stock"])
def test_low_precision_gradients_are_kept_as_under_stock(
    pool: Callable[[int], Pool], strategy: Strategy | None
) -> None:
    assert set().union(*pool(4).run(gradient_dtypes, strategy)) == {BF16}


def ignored_as_iterator(strategy: Strategy | None) -> list[str]:
    """In a worker: the parameters that FSDP leaves alone when they are given as an iterator."""
    net = models.make_net()
    shape = net.head.weight.shape
    model = Fsdp1().apply(net, strategy, ignored_states=net.head.parameters(), device_id=models.device())
    return [name for name, p in model.named_parameters() if p.shape == shape]


def test_ignored_states_may_be_an_iterator(pool: Callable[[int], Pool]) -> None:
    stock = pool(4).run(ignored_as_iterator, STOCK)
    ours = pool(4).run(ignored_as_iterator, Strategy(gpus_per_node=2))
    assert ours == stock == [["_fsdp_wrapped_module.head.weight"]] * 4


stock_stepped_in_backward = cache(partial(stepped, Fsdp1(), STOCK))


def distance_stepped_in_backward(strategy: Strategy, micro_batches: int) -> float:
    """In a worker: the distance from stock."""
    return models.distance(stepped(Fsdp1(), strategy, micro_batches), stock_stepped_in_backward(micro_batches))


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("scopes", [scopes for scopes in SCOPES if scopes != "NNN"])
def test_steps_in_the_backward_equal_stock(pool: Callable[[int], Pool], scopes: str, micro_batches: int) -> None:
    strategy = Strategy(scopes, gpus_per_node=2)
    assert max(pool(4).run(distance_stepped_in_backward, strategy, micro_batches)) <= 1e-6


def synchronized(scopes: str) -> float:
    """In a worker: the distance of weights that only rank 0 had, from rank 0's."""
    adapter = Fsdp1(arguments=(("sync_module_states", True),))
    strategy = Strategy(scopes, gpus_per_node=2)
    net = models.make_net(seed=dist.get_rank())
    weights = adapter.full_weights(adapter.shard(net, Case(), strategy))
    return models.distance(weights, {name: p.detach().cpu() for name, p in models.make_net().named_parameters()})


@pytest.mark.skipif(device_type() == "cpu", reason="torch synchronizes module states on accelerators only")
@pytest.mark.parametrize("scopes", ["NNN", "III", "GGG"])
def test_module_states_are_synchronized_over_all_nodes(pool: Callable[[int], Pool], scopes: str) -> None:
    assert pool(4).run(synchronized, scopes) == [0] * 4
