"""Parameters may be frozen and trained at any time; forwards compute with the weights that there are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from harness import lora, models
from harness.adapter import STOCK, Adapter, Case, Fsdp2
from harness.covering import ADAPTERS, over_each
from harness.pool import Pools
from harness.training import logits, train
from harness.wiretap import wiretap
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torch.optim import Optimizer

from fsdp_zpp import Int4Delta, Int8, Strategy, invalidate
from fsdp_zpp.comm.weight_gather import SecondaryShard

Make = Callable[[Iterable[nn.Parameter]], Optimizer]
Way = Callable[[Any, Make], Iterator[None]]


def block(model: Any, index: int) -> Any:
    """A block of a sharded net, wrapped if it is."""
    return getattr(model, "module", model).blocks[index]


def backward(model: Any, step: int) -> None:
    models.loss_of(model, models.batch(step, 0)).backward()


def step_of(optimizer: Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def adapters_off_around_a_reference_and_the_step(model: Any, make: Make) -> Iterator[None]:
    """As PEFT's ``disable_adapter()``, which sets ``requires_grad`` of what modules show."""
    model.requires_grad_(False)
    adapters = nn.ModuleList(module for module in model.modules() if isinstance(module, nn.Linear))
    optimizer = make(adapters.parameters())
    for step in range(3):
        logits(model)
        adapters.requires_grad_(True)
        backward(model, step)
        adapters.requires_grad_(False)
        step_of(optimizer)
        yield


def frozen_and_given_gradients(model: Any, make: Make) -> Iterator[None]:
    """Nothing is ever trained, as with evolution strategies; only the step says that weights change.

    The root is left out, since stock FSDP keeps it unsharded after an evaluation, old weights and all.
    """
    model.requires_grad_(False)
    held = list(block(model, 0).parameters())
    optimizer = make(held)
    logits(model)
    for _ in range(2):
        with torch.no_grad():
            for p in held:
                p.grad = p.detach() * 0.1
        optimizer.step()
        yield


def unfrozen_into_a_new_group(model: Any, make: Make) -> Iterator[None]:
    block(model, 0).requires_grad_(False)
    optimizer = make(p for p in model.parameters() if p.requires_grad)
    for step in range(4):
        if step == 2:
            logits(model)
            block(model, 0).requires_grad_(True)
            optimizer.add_param_group({"params": list(block(model, 0).parameters())})
        backward(model, step)
        step_of(optimizer)
        yield


def two_optimizers_and_a_frozen_part(model: Any, make: Make) -> Iterator[None]:
    optimizers = [make(list(block(model, i).parameters())) for i in (0, 1)]
    for step in range(4):
        block(model, 0).requires_grad_(step < 2)
        backward(model, step)
        optimizers[step % 2].step()
        model.zero_grad(set_to_none=False)
        yield


def perturbed_within_the_step(model: Any, make: Make) -> Iterator[None]:
    """As SAM does: weights are written between two backwards, and written back before the step."""
    held = list(model.parameters())
    optimizer = make(held)
    for step in range(2):
        backward(model, step)
        moved = [(p, 0.1 * p.grad) for p in held if p.grad is not None]
        for sign in (1, -1):
            with torch.no_grad():
                for p, by in moved:
                    p.add_(by, alpha=sign)
            if sign == 1:
                optimizer.zero_grad()
                backward(model, step)
        step_of(optimizer)
        yield


def frozen_and_written_after_a_backward(model: Any, make: Make) -> Iterator[None]:
    """As by a step of which nothing tells: what an optimizer holds is stale after a backward, frozen or not."""
    block(model, 0).requires_grad_(False)
    kept = make(model.parameters())
    for step in range(2):
        logits(model)
        backward(model, step)
        for p in block(model, 0).parameters():
            p.data.mul_(0.9)
        model.zero_grad()
        yield
    del kept


WAYS: list[Way] = [
    adapters_off_around_a_reference_and_the_step,
    frozen_and_given_gradients,
    unfrozen_into_a_new_group,
    two_optimizers_and_a_frozen_part,
    perturbed_within_the_step,
    frozen_and_written_after_a_backward,
]


def weights_after(way: Way, optimizer: str, adapter: Adapter, strategy: Strategy | None) -> list[dict[str, Any]]:
    """In a worker: the weights after each step; each forward computes with those that there are."""
    model = adapter.make(Case(), strategy)
    weights = [adapter.full_weights(model)]
    for _ in way(model, lambda parameters: models.make_optimizer(optimizer, iter(parameters))):
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
    """In a worker: the largest distance from stock after any step; not of weights that codecs round."""
    ours = weights_after(way, optimizer, adapter, strategy)
    if strategy.weights is not None:
        return 0.0
    return max(map(models.distance, ours, stock_weights_after(way, optimizer, adapter)))


STRATEGIES = {scopes: Strategy(scopes, gpus_per_node=2) for scopes in ("IGG", "NGG", "IIG", "NNG", "III", "NNN")} | {
    f"encoded {scopes}": Strategy(scopes, weights=Int8(64), gradients=Int8(64), gpus_per_node=2)
    for scopes in ("IGG", "NGG", "NNG")
}
# In this order, each way meets both adapters and each adapter both optimizers.
PLACES = {f"{adapter}-{name}": (adapter, name) for name in ("adamw", "adamw-fused") for adapter in ADAPTERS}


@over_each(2, rest=False, way=WAYS, strategy=STRATEGIES, place=PLACES)
def test_weights_are_those_that_there_are_and_equal_stocks(
    pool: Pools, way: Way, strategy: Strategy, place: tuple[Adapter, str]
) -> None:
    adapter, optimizer = place
    # AdamW divides by gradients' magnitudes, which multiplies the rounding of small ones.
    assert max(pool(4).run(distance_after, way, optimizer, adapter, strategy)) <= 1e-4


# ---- frozen parameters beside trained ones


def trainable(model: nn.Module) -> Iterator[nn.Parameter]:
    return (p for p in model.parameters() if p.requires_grad)


def adapted_weights(adapter: Adapter, strategy: Any) -> tuple[dict[str, Tensor], dict[str, int], bool]:
    """In a worker: weights after training, bytes sent in a warm backward, whether frozen weights got gradients."""
    net: Any = lora.make_net()
    for i, block in enumerate(net.blocks):
        net.blocks[i] = adapter.wrap(block, strategy)
    model = adapter.wrap(net, strategy)
    optimizer = models.make_optimizer("adamw", trainable(model))
    train(adapter, model, Case(steps=2, micro_batches=2), optimizer=optimizer)
    loss = models.loss_of(model, models.batch(9, 0))
    with wiretap(2) as tap:
        loss.backward()
    allocated = any(p.grad is not None for p in model.parameters() if not p.requires_grad)
    reduced = {hop: tap.total(hop, "all_to_all") for hop in ("intra", "inter")}
    return adapter.full_weights(model), reduced, allocated


@over_each(rest=False, adapter=ADAPTERS, scopes=("GGG", "IGG", "NNG", "III"))
def test_frozen_parameters_are_neither_given_gradients_nor_reduced(pool: Pools, adapter: Adapter, scopes: str) -> None:
    trained = sum(p.nbytes for p in trainable(lora.make_net()))
    stock, _, _ = pool(4).once(adapted_weights, adapter, STOCK)[0]
    for weights, reduced, allocated in pool(4).run(adapted_weights, adapter, Strategy(scopes, gpus_per_node=2)):
        assert models.distance(weights, stock) <= 1e-4
        assert not allocated
        # Half of the values go to the other rank of the node; padding is what FSDP aligns small parameters with.
        assert 0 < reduced["intra"] <= 0.75 * trained
        assert 0 < reduced["inter"] <= 0.4 * trained


def gathered_in_a_later_step(adapter: Adapter, strategy: Strategy) -> set[str]:
    """In a worker: the units that the third step gathers between nodes, where all but the root is frozen."""
    net = models.make_net()
    net.blocks.requires_grad_(False)
    model = adapter.shard(net, Case(), strategy)
    optimizer = models.make_optimizer("sgd", trainable(model))
    train(adapter, model, Case(steps=2, clip=None), optimizer=optimizer)
    gathered, hold = set(), SecondaryShard.hold

    def noted(self: SecondaryShard, *arguments: Any) -> None:
        gathered.add(self.label)
        hold(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SecondaryShard, "hold", noted)
        train(adapter, model, Case(steps=1, clip=None), optimizer=optimizer)
    return gathered


@over_each(rest=False, adapter=ADAPTERS, scopes=("IGG", "NGG", "NNI"))
def test_what_is_frozen_and_kept_is_gathered_once(pool: Pools, adapter: Adapter, scopes: str) -> None:
    assert pool(4).run(gathered_in_a_later_step, adapter, Strategy(scopes, gpus_per_node=2)) == [{"root"}] * 4


# ---- several dtypes in one unit


class Adapted(nn.Module):
    """A bf16 base with fp32 adapters, as PEFT makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64).to(torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 8, bias=False), nn.Linear(8, 64, bias=False)
        self.norm = nn.LayerNorm(64).to(torch.bfloat16).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x.bfloat16()) + self.up(self.down(x)).bfloat16()
        return self.norm(y)[..., :32].float().square().mean()


def two_dtypes(strategy: Strategy | None) -> tuple[list[float], dict[str, Tensor]]:
    """In a worker: losses, and gradients of the first step."""
    torch.manual_seed(0)
    model = Fsdp2().wrap(Adapted().to(models.device()), strategy)
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-2, fused=True)
    losses, first = [], {}
    for step in range(4):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(models.device())
        loss = model(x)
        loss.backward()
        first = first or Fsdp2().full_gradients(model)
        losses.append(loss.item())
        step_of(optimizer)
    return losses, first


OF_TWO_DTYPES = {
    "GGG": Strategy("GGG", weights=Int8(64), gpus_per_node=2),
    "deltas": Strategy("IGG", weights=Int4Delta(64, whole=Int8(64)), gpus_per_node=2),
    "III": Strategy("III", gpus_per_node=2),
    "NNG": Strategy("NNG", weights=Int8(64), gpus_per_node=2),
    "NGG": Strategy("NGG", weights=Int8(32), gpus_per_node=2),
}


@over_each(rest=False, strategy=OF_TWO_DTYPES)
def test_a_unit_may_have_two_dtypes(pool: Pools, strategy: Strategy) -> None:
    (losses, gradients), (stock_losses, stock) = (pool(4).once(two_dtypes, each)[0] for each in (strategy, STOCK))
    if strategy.weights is None:
        assert losses == stock_losses
    for name, gradient in stock.items():
        assert cosine_similarity(gradients[name].flatten(), gradient.flatten(), dim=0) > 0.99, name
    assert losses[-1] < losses[0] * 1.5
