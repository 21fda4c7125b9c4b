"""What is trained may change at any time, and forwards go on to compute with the weights that there are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import models
from harness.adapter import STOCK, Adapter, Case
from harness.covering import ADAPTERS, SCOPES, over_adapters, over_each, over_pairs
from harness.messages import collected
from harness.pool import Pool
from harness.training import logits
from torch import nn

from fsdp_zpp import Int8, Strategy, invalidate

EVERY_SCOPE = (*SCOPES, "NGG", "NII")
OPTIMIZERS = ("adamw", "adamw-fused")


def adapters_off_around_a_reference(model: Any, optimizer: str) -> Iterator[None]:
    """As PEFT's ``disable_adapter()``, which sets ``requires_grad`` of what modules show."""
    model.requires_grad_(False)
    adapters = [module for module in model.modules() if isinstance(module, nn.Linear)]
    trains = models.make_optimizer(optimizer, (p for module in adapters for p in module.parameters()))
    for step in range(3):
        for module in adapters:
            module.requires_grad_(False)
        logits(model)
        for module in adapters:
            module.requires_grad_(True)
        models.loss_of(model, models.batch(step, 0)).backward()
        trains.step()
        trains.zero_grad()
        yield


def adapters_off_before_the_step(model: Any, optimizer: str) -> Iterator[None]:
    """Nothing requires a gradient when the optimizer steps."""
    trains = models.make_optimizer(optimizer, model.parameters())
    for step in range(3):
        models.loss_of(model, models.batch(step, 0)).backward()
        model.requires_grad_(False)
        trains.step()
        trains.zero_grad()
        yield
        model.requires_grad_(True)


def frozen_but_stepped(model: Any, optimizer: str) -> Iterator[None]:
    """Gradients of zero, so weight decay and momentum go on."""
    trains = models.make_optimizer(optimizer, model.parameters())
    for step in range(4):
        if step == 2:
            block(model, 0).requires_grad_(False)
        models.loss_of(model, models.batch(step, 0)).backward()
        trains.step()
        trains.zero_grad(set_to_none=False)
        yield


def frozen_and_given_gradients(model: Any, optimizer: str) -> Iterator[None]:
    """Nothing is ever trained, as with evolution strategies; only the step says that weights change.

    Not the root, which stock FSDP keeps unsharded after an evaluation, old weights and all.
    """
    model.requires_grad_(False)
    held = list(block(model, 0).parameters())
    trains = models.make_optimizer(optimizer, held)
    logits(model)
    for _ in range(2):
        with torch.no_grad():
            for p in held:
                p.grad = p.detach() * 0.1
        trains.step()
        yield


def unfrozen_into_a_new_group(model: Any, optimizer: str) -> Iterator[None]:
    """The optimizer gets it when it is unfrozen."""
    block(model, 0).requires_grad_(False)
    trains = models.make_optimizer(optimizer, (p for p in model.parameters() if p.requires_grad))
    for step in range(4):
        if step == 2:
            logits(model)
            block(model, 0).requires_grad_(True)
            trains.add_param_group({"params": list(block(model, 0).parameters())})
        models.loss_of(model, models.batch(step, 0)).backward()
        trains.step()
        trains.zero_grad()
        yield


def optimizer_made_after_an_evaluation(model: Any, optimizer: str) -> Iterator[None]:
    """Of blocks, whose units are resharded by then."""
    logits(model)
    trains = models.make_optimizer(optimizer, block(model, 0).parameters())
    for step in range(2):
        models.loss_of(model, models.batch(step, 0)).backward()
        trains.step()
        trains.zero_grad()
        yield


def frozen_after_an_evaluation(model: Any, optimizer: str) -> Iterator[None]:
    """Its optimizer was made before."""
    trains = models.make_optimizer(optimizer, model.parameters())
    for step in range(3):
        logits(model)
        if step == 1:
            block(model, 1).requires_grad_(False)
        models.loss_of(model, models.batch(step, 0)).backward()
        trains.step()
        trains.zero_grad()
        yield


def two_optimizers_and_a_frozen_part(model: Any, optimizer: str) -> Iterator[None]:
    """One of them holds it, and steps in its turn."""
    parts = [list(block(model, i).parameters()) for i in (0, 1)]
    trains = [models.make_optimizer(optimizer, part) for part in parts]
    for step in range(4):
        block(model, 0).requires_grad_(step < 2)
        models.loss_of(model, models.batch(step, 0)).backward()
        trains[step % 2].step()
        model.zero_grad(set_to_none=False)
        yield


def perturbed_within_the_step(model: Any, optimizer: str) -> Iterator[None]:
    """As SAM does: weights are written between two backwards, and written back before the step."""
    held = list(model.parameters())
    trains = models.make_optimizer(optimizer, held)
    for step in range(2):
        models.loss_of(model, models.batch(step, 0)).backward()
        with torch.no_grad():
            moved = [0.1 * p.grad if p.grad is not None else None for p in held]
            for p, by in zip(held, moved, strict=True):
                if by is not None:
                    p.add_(by)
            trains.zero_grad()
            with torch.enable_grad():
                models.loss_of(model, models.batch(step, 0)).backward()
            for p, by in zip(held, moved, strict=True):
                if by is not None:
                    p.sub_(by)
        trains.step()
        trains.zero_grad()
        yield


WAYS = [
    adapters_off_around_a_reference,
    adapters_off_before_the_step,
    frozen_but_stepped,
    frozen_and_given_gradients,
    unfrozen_into_a_new_group,
    optimizer_made_after_an_evaluation,
    frozen_after_an_evaluation,
    two_optimizers_and_a_frozen_part,
    perturbed_within_the_step,
]
Way = Callable[[Any, str], Iterator[None]]


def block(model: Any, index: int) -> Any:
    """A block of a sharded net, wrapped if it is."""
    return getattr(model, "module", model).blocks[index]


def weights_after(way: Way, optimizer: str, adapter: Adapter, strategy: Strategy | None) -> list[dict[str, Any]]:
    """In a worker: the weights after each step; each forward computes with those that there are."""
    model = adapter.make(Case(), strategy)
    weights = [adapter.full_weights(model)]
    for _ in way(model, optimizer):
        if strategy is not STOCK:
            used = logits(model)
            invalidate(model)
            assert torch.equal(used, logits(model))
        weights.append(adapter.full_weights(model))
    assert models.distance(weights[-1], weights[0]) > 1e-3  # or there was nothing to become stale
    return weights


@functools.cache
def stock_weights_after(way: Way, optimizer: str, adapter: Adapter) -> list[dict[str, Any]]:
    return weights_after(way, optimizer, adapter, STOCK)


def distance_after(way: Way, optimizer: str, adapter: Adapter, strategy: Strategy) -> float:
    """In a worker: the largest distance from stock after any step."""
    ours = weights_after(way, optimizer, adapter, strategy)
    return max(map(models.distance, ours, stock_weights_after(way, optimizer, adapter)))


@over_pairs(
    use={f"{adapter}-{way.__name__}": (adapter, way) for adapter in ADAPTERS for way in WAYS},
    scopes=("IGG", "NGG"),  # of which each keeps weights in its own way
    optimizer=OPTIMIZERS,
)
def test_weights_equal_stock(
    pool: Callable[[int], Pool], use: tuple[Adapter, Way], scopes: str, optimizer: str
) -> None:
    adapter, way = use
    strategy = Strategy(scopes, gpus_per_node=2)
    # AdamW divides by gradients' magnitudes, which multiplies the rounding of small ones.
    assert max(pool(4).run(distance_after, way, optimizer, adapter, strategy)) <= 1e-4


@over_each(2, adapter=ADAPTERS, way=WAYS, scopes=EVERY_SCOPE, optimizer=OPTIMIZERS, gpus_per_node=[1, 2])
def test_weights_equal_stock_under_every_scope(
    pool: Callable[[int], Pool], adapter: Adapter, way: Way, scopes: str, optimizer: str, gpus_per_node: int
) -> None:
    strategy = Strategy(scopes, gpus_per_node=gpus_per_node)
    assert max(pool(4).run(distance_after, way, optimizer, adapter, strategy)) <= 1e-4


def trains_encoded(way: Way, optimizer: str, adapter: Adapter, strategy: Strategy) -> None:
    weights_after(way, optimizer, adapter, strategy)


@over_each(adapter=ADAPTERS, way=WAYS, scopes=[s for s in EVERY_SCOPE if s[2] == "G"], optimizer=OPTIMIZERS)
def test_forwards_use_the_weights_that_there_are_encoded(
    pool: Callable[[int], Pool], adapter: Adapter, way: Way, scopes: str, optimizer: str
) -> None:
    strategy = Strategy(scopes, weights=Int8(64), gradients=Int8(64), gpus_per_node=2)
    pool(4).run(trains_encoded, way, optimizer, adapter, strategy)


def told_of_frozen_units(adapter: Adapter, only_trained: bool, scopes: str) -> list[str]:
    """In a worker: what is logged in steps of which an optimizer holds a frozen block, or only what is trained."""
    net = models.make_net()
    net.blocks[0].requires_grad_(False)
    model = adapter.shard(net, Case(), Strategy(scopes, gpus_per_node=2))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad or not only_trained], lr=0.1)
    with collected() as records:
        for step in range(2):
            models.loss_of(model, models.batch(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [text for _, text in records if "frozen unit" in text]


@over_adapters
def test_frozen_units_that_are_sent_in_vain_are_named_once(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    first, *others = pool(4).run(told_of_frozen_units, adapter, False, "IGG")
    assert [text.split(",")[0] for text in first] == ["an optimizer was given parameters of 1 frozen unit (blocks.0)"]
    assert others == [[]] * 3
    assert pool(4).run(told_of_frozen_units, adapter, True, "IGG") == [[]] * 4
    assert pool(4).run(told_of_frozen_units, adapter, False, "GGG") == [[]] * 4
