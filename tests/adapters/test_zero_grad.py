"""zero_grad drops accumulated gradients, too: those of what it is called on, and no others."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from harness import models
from harness.adapter import Adapter, Case, on_cpu
from harness.covering import ADAPTERS, over_adapters, over_pairs
from harness.pool import Pool
from harness.training import logits, train
from heads import WIDTH, average, inputs, shard_heads
from torch import Tensor, nn

from fsdp_zpp import Strategy


def discarded(adapter: Adapter, scopes: str, clear: str) -> float:
    """In a worker: the distance that a micro-batch makes whose gradients are cleared before the last."""
    weights = []
    for with_it in (True, False):
        model = adapter.make(Case(), Strategy(scopes, gpus_per_node=2))
        optimizer = models.make_optimizer("sgd", model.parameters())
        if with_it:
            with adapter.micro_batch(model, False, False):
                models.loss_of(model, models.batch(5, 0)).backward()
            (optimizer if clear == "optimizer" else model).zero_grad()
        train(adapter, model, Case(steps=1, micro_batches=2), optimizer=optimizer)
        weights.append(adapter.full_weights(model))
    return models.distance(*weights)


@over_pairs(adapter=ADAPTERS, scopes=["NNN", "NII", "III", "NNG", "IIG", "GGG"], clear=["optimizer", "model"])
def test_zero_grad_drops_accumulated_gradients(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str, clear: str
) -> None:
    assert max(pool(4).run(discarded, adapter, scopes, clear)) == 0


def left_after_an_evaluation(adapter: Adapter, scopes: str, set_to_none: bool) -> list[float]:
    """In a worker: the gradients that an optimizer reads once the model has cleared them while it is unsharded."""
    model = adapter.make(Case(), Strategy(scopes, gpus_per_node=2))
    held = list(model.parameters())
    models.loss_of(model, models.batch(0, 0)).backward()
    assert any(p.grad is not None for p in held)
    logits(model)
    model.zero_grad(set_to_none=set_to_none)
    return [adapter.local(p.grad).norm().item() for p in held if p.grad is not None]


@over_pairs(adapter=ADAPTERS, scopes=["GGG", "NGG", "NII", "NNG"], set_to_none=[True, False])
def test_zero_grad_of_an_unsharded_model_reaches_what_the_optimizer_reads(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str, set_to_none: bool
) -> None:
    for left in pool(4).run(left_after_an_evaluation, adapter, scopes, set_to_none):
        assert not any(left)


def cleared(adapter: Adapter, scopes: str, how: str) -> float:
    """In a worker: the distance that a first micro-batch makes whose gradients are cleared before the last."""
    results = []
    for with_it in (True, False):
        model, _ = shard_heads(adapter, Strategy(scopes, gpus_per_node=2), apart=False)
        if with_it:
            with adapter.micro_batch(model, False, False):
                model(inputs(0, 0)).backward()
            inner = getattr(model, "module", model)
            {"the model": model, "what is wrapped": inner}[how].zero_grad()
        with adapter.micro_batch(model, True, False):
            model(inputs(0, 1)).backward()
        results.append(adapter.full_gradients(model))
    return models.distance(*results)


@over_pairs(adapter=ADAPTERS, scopes=["GGG", "IIG", "NNG", "III"], how=["the model", "what is wrapped"])
def test_zero_grad_of_the_wrapped_module_drops_accumulated_gradients(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str, how: str
) -> None:
    assert max(pool(4).run(cleared, adapter, scopes, how)) == 0


class Scale(nn.Module):
    """One number, of which three of four ranks hold no element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def of_another_optimizer(adapter: Adapter, scopes: str, moved: bool) -> list[float]:
    """In a worker: gradients of a number and of the rest, each over the exact one, after the other's was cleared."""
    torch.manual_seed(0)
    net = nn.Sequential(Scale(), nn.Linear(WIDTH, WIDTH, bias=False)).to(models.device())
    plain = copy.deepcopy(net)
    strategy = Strategy(scopes, gpus_per_node=2)
    net[0], net[1] = (adapter.wrap(part, strategy) for part in net)
    model = adapter.wrap(net, strategy)
    own, rest = (torch.optim.SGD(part.parameters(), lr=0.1) for part in net)
    if moved:
        model._apply(torch.clone)
    with adapter.micro_batch(model, False, False):
        model(inputs(0, 0)).square().sum().backward()
    rest.zero_grad()
    with adapter.micro_batch(model, True, False):
        model(inputs(0, 1)).square().sum().backward()
    del own
    plain(inputs(0, 0)).square().sum().backward()
    plain[1].weight.grad = None
    plain(inputs(0, 1)).square().sum().backward()
    average(plain.parameters())
    exact = on_cpu({name: p.grad for name, p in plain.named_parameters()})
    ours = adapter.full_gradients(model)
    return [models.distance({name: ours[name]}, {name: exact[name]}) for name in exact]


@pytest.mark.parametrize(
    ("scopes", "moved"), [("GGG", False), ("IIG", False), ("NNG", False), ("NNG", True)], ids=lambda value: str(value)
)
@over_adapters
def test_an_optimizer_drops_only_gradients_of_its_own_parameters(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str, moved: bool
) -> None:
    for distances in pool(4).run(of_another_optimizer, adapter, scopes, moved):
        assert max(distances) <= 1e-6
