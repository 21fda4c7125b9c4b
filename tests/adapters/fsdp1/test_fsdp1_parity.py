"""Whatever only FullyShardedDataParallel can do is as under stock FULL_SHARD, to rounding.

adapters/test_training_laws.py trains with its other arguments.
"""

from __future__ import annotations

from collections.abc import Callable
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
from harness.training import train
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision

from fsdp_zpp import Strategy

FP32, BF16 = torch.float32, torch.bfloat16


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


@over_each(replace=[other_values, other_parameter, other_shape, masked_in_forwards], scopes=["IGG", "GGG", "III"])
def test_parameters_replaced_between_steps_are_trained_on(
    pool: Callable[[int], Pool], replace: Callable[..., None], scopes: str
) -> None:
    ours = pool(4).run(trained_with_replaced, replace, Strategy(scopes, gpus_per_node=2))
    assert max(map(models.distance, ours, pool(4).once(trained_with_replaced, replace, STOCK))) <= 1e-6


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


def after(event: Callable[[FSDP], list[int]]) -> tuple[list[int], float]:
    """In a worker: what an event between steps gives, and how far the weights are from those without it."""
    adapter, case = Fsdp1(), Case(steps=1, clip=None)
    model, undisturbed = (adapter.make(case, Strategy("IGG", gpus_per_node=2)) for _ in range(2))
    for each in (model, undisturbed):
        train(adapter, each, case)
    found = event(model)
    train(adapter, undisturbed, case, first_step=1)
    return found, models.distance(adapter.full_weights(model), adapter.full_weights(undisturbed))


@over_each(event=[give_and_take, look_in_inference_mode, refused_on_the_way])
def test_what_happens_to_parameters_between_steps_leaves_nothing(
    pool: Callable[[int], Pool], event: Callable[[FSDP], list[int]]
) -> None:
    for found, distance in pool(4).run(after, event):
        assert not any(found)
        assert distance == 0


def low_precision_gradients(keeps: bool, strategy: Strategy | None) -> tuple[set[torch.dtype], dict[str, Tensor]]:
    """In a worker: dtypes of gradients of a backward in bf16, which may stay in it, and the gradients."""
    policy = MixedPrecision(BF16, BF16 if keeps else FP32, BF16, keeps, cast_forward_inputs=True)
    adapter = Fsdp1(arguments=(("mixed_precision", policy),))
    model = adapter.make(Case(), strategy)
    models.loss_of(model, models.batch(0, 0)).backward()
    dtypes = {p.grad.dtype for p in model.parameters() if p.grad is not None and p.grad.numel()}
    return dtypes, {} if keeps else adapter.full_gradients(model)


@over_each(keeps=[True, False], strategy=[Strategy("IGG", gpus_per_node=2), Strategy("NNN", gpus_per_node=2)])
def test_gradients_of_inputs_that_are_cast_and_those_kept_in_low_precision_are_as_under_stock(
    pool: Callable[[int], Pool], keeps: bool, strategy: Strategy
) -> None:
    ours, stock = (pool(4).once(low_precision_gradients, keeps, each) for each in (strategy, STOCK))
    for (dtypes, gradients), (expected_dtypes, expected) in zip(ours, stock, strict=True):
        assert dtypes == expected_dtypes == {BF16 if keeps else FP32}
        assert keeps or models.distance(gradients, expected) <= 1e-6


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


@over_each(scopes=[scopes for scopes in SCOPES if scopes != "NNN"], micro_batches=[1, 2])
def test_steps_in_the_backward_equal_stock(pool: Callable[[int], Pool], scopes: str, micro_batches: int) -> None:
    ours = pool(4).run(stepped, Fsdp1(), Strategy(scopes, gpus_per_node=2), micro_batches)
    stock = pool(4).once(stepped, Fsdp1(), STOCK, micro_batches)
    assert max(map(models.distance, ours, stock)) <= 1e-6


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
