"""Moments of optimizers, which nodes that train on their own average more rarely than weights."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter, Case, Fsdp2, original_name
from harness.covering import ADAPTERS, WITH_FLAT, over_each
from harness.local_nodes import LAYOUTS, strategy_of
from harness.messages import attempt
from harness.pool import Pools
from harness.training import train
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, AdamW, NAdam, Optimizer, RMSprop

from fsdp_zpp import exchange_weights

CASE = Case(steps=4, clip=None)
States = dict[str, dict[str, Tensor]]
"""A rank's part of optimizers' states, by the parameter's name."""


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AMSGrad": lambda model: AdamW(model.parameters(), 3e-3, amsgrad=True),
    "fused": lambda model: AdamW(model.parameters(), 3e-3, fused=True),
    "one by one": lambda model: AdamW(model.parameters(), 3e-3, foreach=False),
    "momentum": lambda model: SGD(model.parameters(), 0.01, momentum=0.9),
    "RMSprop": lambda model: RMSprop(model.parameters(), 1e-3, momentum=0.5, centered=True),
    "Adagrad": lambda model: Adagrad(model.parameters(), 1e-3),
    "NAdam": lambda model: NAdam(model.parameters(), 1e-3),
    "without states": lambda model: SGD(model.parameters(), 0.01),
}


def states(model: nn.Module, optimizer: Optimizer) -> States:
    return {
        name: {
            state: local(value).cpu().clone()
            for state, value in optimizer.state.get(parameter, {}).items()
            if value is not None
        }
        for name, parameter in model.named_parameters()
    }


def local(value: Any) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def on_nodes(model: nn.Module, optimizer: Optimizer, gpus_per_node: int) -> list[States]:
    """Every node's states of the values that are this rank's on its own node. Collective."""
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, states(model, optimizer))
    return held[dist.get_rank() % gpus_per_node :: gpus_per_node]


def differing(nodes: Sequence[States]) -> int:
    """In how many states nodes differ."""
    first = nodes[0]
    assert all(node.keys() == first.keys() for node in nodes)
    return sum(
        any(state not in node[name] or not torch.equal(node[name][state], value) for node in nodes)
        for name, of_parameter in first.items()
        for state, value in of_parameter.items()
    )


def means(adapter: Adapter, layout: tuple[str, int], optimizer: str) -> tuple[float, int, int]:
    """In a worker: how far kinds of states are from the mean, and in how many nodes differ before and after."""
    model = adapter.make(CASE, strategy_of(*layout, every=50, moments_every=1))
    made = OPTIMIZERS[optimizer](model)
    train(adapter, model, CASE, optimizer=made)
    before = on_nodes(model, made, layout[1])
    exchange_weights(model)
    after = on_nodes(model, made, layout[1])
    off = 0.0
    for name, of_parameter in after[0].items():
        for state, value in of_parameter.items():
            mean = torch.stack([node[name][state].double() for node in before]).mean(0)
            if value.numel():
                off = max(off, ((value - mean).norm() / mean.norm().clamp(min=1e-30)).item())
    return off, differing(before), differing(after)


@over_each(rest=False, adapter=WITH_FLAT, layout=LAYOUTS, optimizer=list(OPTIMIZERS))
def test_an_average_is_the_mean_of_every_optimizer_of_torch(
    pool: Pools, adapter: Adapter, layout: tuple[str, int], optimizer: str
) -> None:
    for off, before, after in pool(4).run(means, adapter, layout, optimizer):
        assert off <= 0.05  # fourth roots in 8 bits, twice
        assert (before > 0) == (optimizer != "without states")
        assert after == 0


def moments_differ(adapter: Adapter, layout: tuple[str, int], overlap: int, spread: bool) -> list[int]:
    """In a worker: after each of 8 steps and the exchanges due after it, in how many states nodes differ."""
    model = adapter.make(CASE, strategy_of(*layout, every=2, moments_every=2, overlap=overlap, spread=spread))
    optimizer, found = OPTIMIZERS["AMSGrad"](model), []
    for step in range(8):
        train(adapter, model, Case(steps=1), first_step=step, optimizer=optimizer)
        models.loss_of(model, models.batch(0, 0))  # before which exchanges are made
        found.append(differing(on_nodes(model, optimizer, layout[1])))
    return found


@over_each(
    rest=False,
    adapter=WITH_FLAT,
    layout=[("III", 1), ("III", 2)],
    overlap=[0, 1],
    spread=[False, True],
)
def test_nodes_are_equal_bit_for_bit_after_the_exchanges_that_include_moments(
    pool: Pools, adapter: Adapter, layout: tuple[str, int], overlap: int, spread: bool
) -> None:
    for found in pool(4).run(moments_differ, adapter, layout, overlap, spread):
        if spread:
            assert all(found)  # some fragments were exchanged in the last step, the others have been trained since
            assert min(found[3], found[7]) < min(found[:2] + found[4:6])
        else:
            assert [step for step, count in enumerate(found, 1) if count == 0] == [4, 8]


def half_used(adapter: Adapter) -> tuple[int, list[float]]:
    """In a worker: in how many states nodes differ when the moments of a block that half of them use were averaged.

    The second result is by what factors those of the block have changed on nodes that use it.
    """
    model = adapter.make(CASE, strategy_of("III", 2, every=50, moments_every=1))
    uses_it = dist.get_rank() < 2
    net = next(module for module in model.modules() if isinstance(module, models.Net))
    net.skipped = None if uses_it else 1
    optimizer = AdamW(model.parameters(), 3e-3)
    train(adapter, model, CASE, optimizer=optimizer)
    before = states(model, optimizer)
    exchange_weights(model)
    after, nodes = states(model, optimizer), on_nodes(model, optimizer, 2)
    of_block = [name for name in before if "blocks.1." in original_name(name) and name.endswith("up.weight")]
    factors = [
        (after[name][state].norm() / before[name][state].norm()).item()
        for name in of_block
        for state in ("exp_avg", "exp_avg_sq")
        if uses_it and before[name]["exp_avg"].numel()
    ]
    assert all(node[name]["step"] == CASE.steps for node in nodes for name in of_block if node[name])
    return differing(nodes), factors


@over_each(adapter=ADAPTERS)
def test_a_node_without_states_of_a_parameter_counts_as_zeros(pool: Pools, adapter: Adapter) -> None:
    found = pool(4).run(half_used, adapter)
    assert all(count == 0 for count, _ in found)
    factors = [factor for _, of_rank in found for factor in of_rank]
    assert factors
    assert factors == pytest.approx([0.5] * len(factors), rel=0.02)


def largest_update(large: float) -> tuple[float, float]:
    """In a worker: Adam's largest update before and after an exchange, where each node saw tokens of its own.

    Every other value had gradients ``large`` times as large.
    """
    model = Fsdp2().make(CASE, strategy_of("III", 1, every=50, moments_every=1))
    optimizer = AdamW(model.parameters(), 3e-3)
    for step in range(10):
        tokens = models.batch(step, 0) % 15 + 15 * dist.get_rank()
        models.loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    for of_parameter in optimizer.state.values():
        for state, factor in (("exp_avg", large), ("exp_avg_sq", large**2)):
            local(of_parameter[state]).view(-1)[1::2] *= factor
    found = []
    for _ in range(2):
        updates = [
            (of_parameter["exp_avg"] / (of_parameter["exp_avg_sq"].sqrt() + 1e-8)).abs().max().item()
            for of_parameter in states(model, optimizer).values()
            if of_parameter and of_parameter["exp_avg"].numel()
        ]
        found.append(max(updates))
        exchange_weights(model)
    return found[0], found[1]


@pytest.mark.parametrize("large", [1.0, 1e6])
def test_updates_of_rows_that_one_node_saw_and_beside_large_ones_do_not_blow_up(pool: Pools, large: float) -> None:
    for before, after in pool(4).run(largest_update, large):
        assert 0 < after < 2 * before


class OddStates(SGD):
    """An optimizer of whose states some can't be averaged."""

    def __init__(self, parameters: Any, kind: str) -> None:
        super().__init__(parameters, lr=0.01)
        self.kind = kind

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                flat = local(parameter).detach().view(-1)
                values: dict[str, Any] = {
                    "8 bits": flat.to(torch.uint8),
                    "rows": flat.new_zeros(3),
                    "list": [1],
                    "good": torch.zeros_like(flat),
                    "other": torch.zeros_like(flat),
                }
                self.state[parameter]["other" if self.kind == "other" else "odd"] = values[self.kind]
        return result


def refused(adapter: Adapter, kinds: tuple[str, str], every: int | None) -> str:
    """In a worker: what the exchange says where the first rank's states are of one kind, others' of another one."""
    model = adapter.make(CASE, strategy_of("III", 2, every=1, moments_every=every))
    kind = kinds[dist.get_rank() > 0]
    optimizer = models.PlainSgd(model) if kind == "not torch's" else OddStates(model.parameters(), kind)
    return attempt((partial(train, adapter, model, CASE, optimizer=optimizer), ValueError, ""))[1]


REFUSED = {
    "8 bits": (("8 bits", "good"), "OddStates keeps 'odd' of .* as a Tensor torch.uint8 of shape"),
    "rows": (("good", "rows"), "keeps 'odd' of .* as a Tensor torch.float32 of shape .3., which nodes can't average"),
    "list": (("list", "list"), "as a list, which nodes can't average"),
    "kinds": (("good", "other"), "their optimizers keep different states of it"),
    "foreign": (("not torch's", "not torch's"), "no optimizer derived from torch.optim.Optimizer has stepped"),
}


@over_each(rest=False, adapter=ADAPTERS, name=list(REFUSED))
def test_what_cannot_be_averaged_is_said_on_every_rank(pool: Pools, adapter: Adapter, name: str) -> None:
    kinds, part = REFUSED[name]
    for message in pool(4).run(refused, adapter, kinds, 1):
        assert re.search(part, message), message
    if name == "list":
        assert pool(4).run(refused, adapter, kinds, None) == [""] * 4


def without_optimizers(adapter: Adapter) -> int:
    """In a worker: in how many states nodes differ when the first of two optimizers is gone, but not on all ranks."""
    model = adapter.make(CASE, strategy_of("III", 2, every=50, moments_every=1))
    kept = []
    for _ in range(2):
        optimizer = AdamW(model.parameters(), 3e-3)
        train(adapter, model, CASE, optimizer=optimizer)
        if dist.get_rank() == 0:
            kept.append(optimizer)
        gc.collect()
    exchange_weights(model)
    return differing(on_nodes(model, optimizer, 2))


@over_each(adapter=ADAPTERS)
def test_an_optimizer_that_some_ranks_have_freed_is_left_out(pool: Pools, adapter: Adapter) -> None:
    assert pool(4).run(without_optimizers, adapter) == [0] * 4
