"""Overrides of a strategy: modules of some classes are sharded by others, as if each was wrapped with its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import models
from harness.adapter import Adapter, Case
from harness.covering import over_adapters, over_adapters_and_flat
from harness.fsdp1 import Fsdp1
from harness.messages import Refusal, Reply, assert_refused, attempt as attempt_call, collected
from harness.pool import Pool
from harness.training import train
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_zpp import Int4Delta, Strategy, traffic

TWO: dict[str, Any] = {"gpus_per_node": 2}
OVERRIDDEN = {
    "codecs": Strategy.zeropp(overrides={"Block": Strategy.zeropp(weights=Int4Delta())}, **TWO),
    "scopes": Strategy("NGG", overrides={"Bl*k": Strategy("GGG"), "Block": Strategy("IGG")}, **TWO),
    "nodes": Strategy.zeropp(overrides={"Block": Strategy.zeropp(gpus_per_node=1)}, **TWO),
    "the model": Strategy("GGG", overrides={"Net": Strategy.zeropp(), "block": Strategy("NGG")}, **TWO),
    "whole blocks": Strategy.zeropp(overrides={"Block": Strategy("NNN")}, **TWO),
    "a whole root": Strategy("NNN", overrides={"Block": Strategy.zeropp()}, **TWO),
}
BY_HAND = {
    "codecs": (Strategy.zeropp(**TWO), Strategy.zeropp(weights=Int4Delta(), **TWO)),
    "scopes": (Strategy("NGG", **TWO), Strategy("GGG", **TWO)),
    "nodes": (Strategy.zeropp(**TWO), Strategy.zeropp(gpus_per_node=1)),
    "the model": (Strategy.zeropp(**TWO), Strategy("GGG", **TWO)),
    "whole blocks": (Strategy.zeropp(**TWO), Strategy("NNN", **TWO)),
    "a whole root": (Strategy("NNN", **TWO), Strategy.zeropp(**TWO)),
}
"""Strategies of the net and of its blocks, to the same effect."""


def trained(
    adapter: Adapter, outer: Strategy, inner: Strategy, wrap: Callable[..., Any] | None = None
) -> tuple[dict[str, torch.Tensor], Any]:
    """Train a net whose blocks are wrapped one by one; return the weights and the bytes that were sent."""
    net, wrap = models.make_net(), wrap or adapter.wrap
    for place, block in enumerate(net.blocks):
        net.blocks[place] = wrap(block, inner)
    model: Any = wrap(net, outer)
    train(adapter, model, Case(clip=None))
    return adapter.full_weights(model), traffic(model)


def is_as_by_hand(adapter: Adapter, name: str) -> bool:
    """In a worker: whether overrides give the weights and the bytes of strategies that are passed one by one."""
    ours, sent = trained(adapter, OVERRIDDEN[name], OVERRIDDEN[name])
    weights, sent_by_hand = trained(adapter, *BY_HAND[name])
    assert sent["gather"]["inter"] > 0
    return sent == sent_by_hand and all(torch.equal(ours[name], value) for name, value in weights.items())


@pytest.mark.parametrize("name", OVERRIDDEN)
@over_adapters_and_flat
def test_overrides_are_as_other_strategies(pool: Callable[[int], Pool], adapter: Adapter, name: str) -> None:
    assert pool(4).run(is_as_by_hand, adapter, name) == [True] * 4


def is_as_by_hand_with_a_policy(use_orig_params: bool, name: str) -> bool:
    """In a worker: whether overrides reach what FSDP1 wraps within an instance, too."""
    adapter, arguments = Fsdp1(use_orig_params), {"use_orig_params": use_orig_params, "device_id": models.device()}

    def wrap(module: nn.Module, strategy: Strategy, **more: Any) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(module, sharding_strategy=strategy, **arguments, **more)

    model = wrap(models.make_net(), OVERRIDDEN[name], auto_wrap_policy=ModuleWrapPolicy({models.Block}))
    train(adapter, model, Case(clip=None))
    weights, sent = trained(adapter, *BY_HAND[name], wrap)
    ours = adapter.full_weights(model)
    return traffic(model) == sent and all(torch.equal(ours[key], value) for key, value in weights.items())


@pytest.mark.parametrize("name", OVERRIDDEN)
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["original", "flat"])
def test_overrides_reach_what_a_policy_wraps(pool: Callable[[int], Pool], use_orig_params: bool, name: str) -> None:
    assert pool(4).run(is_as_by_hand_with_a_policy, use_orig_params, name) == [True] * 4


def warnings_of(adapter: Adapter) -> list[str]:
    """In a worker: what is logged of patterns."""
    strategy = Strategy.zeropp(overrides={"Block": Strategy("GGG"), "*block": Strategy("IGG")}, **TWO)
    with collected() as records:
        trained(adapter, strategy, strategy)
    return [message for _, message in records if "overrides" in message]


@over_adapters
def test_a_pattern_that_matches_nothing_is_a_warning(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    first, *others = pool(4).run(warnings_of, adapter)
    assert first == ["Net: overrides for '*block' apply to no module: no class has such a name; did you mean Block?"]
    assert others == [[], [], []]


def refusals_of(adapter: Adapter) -> dict[str, Refusal]:
    """Overrides that can't be honoured, by name."""

    def flattened() -> None:
        adapter.wrap(models.make_net(), Strategy.zeropp(overrides={"LayerNorm": Strategy("GGG")}, **TWO))

    return {"one parameter": (flattened, ValueError, "wrap the modules that overrides name by themselves")}


def attempt(adapter: Adapter, name: str) -> Reply:
    """In a worker: how overrides are refused."""
    return attempt_call(refusals_of(adapter)[name])


@over_adapters
def test_a_flat_parameter_has_one_strategy(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    if str(adapter) == "fsdp2":
        return  # which makes a group for each
    assert_refused(pool(4).run(attempt, adapter, "one parameter"), refusals_of(adapter)["one parameter"])
