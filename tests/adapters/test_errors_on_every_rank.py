"""Bad input is an error on every rank before any collective; a dead rank is an error on the others.

Nodes that train on their own may come to different places; each of them is told where the others are.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import messages, models
from harness.adapter import STOCK, Adapter, Case
from harness.covering import ADAPTERS, SCOPES, WITH_FLAT, over_adapters, over_each, over_pairs
from harness.fsdp1 import Fsdp1
from harness.fsdp2 import Fsdp2
from harness.messages import Refusal, Reply, assert_refused
from harness.pool import Pool, WorkerError, device_type
from harness.training import train
from torch import Tensor, nn

from fsdp_zpp import (
    CodecState,
    Int4,
    LocalSteps,
    LoCo,
    Strategy,
    agreed_weights,
    exchange_weights,
    gathered_weights,
    invalidate,
    traffic,
)

TWO: Any = {"gpus_per_node": 2}


def _integers() -> nn.Module:
    net = models.make_net()
    net.register_parameter("codes", nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False))
    return net


def refusals_of(adapter: Adapter) -> dict[str, Refusal]:
    """Calls that an adapter refuses, by name."""

    def sharded(strategy: Any, net: Callable[[], nn.Module] = models.make_net) -> Callable[[], Any]:
        return lambda: adapter.apply(net(), strategy)

    return {
        "indivisible": (sharded(Strategy(gpus_per_node=3)), ValueError, "allowed are [1, 2, 4]"),
        "the class": (sharded(Strategy), TypeError, "did you mean Strategy()"),
        "a method": (sharded(Strategy.zeropp), TypeError, "did you mean Strategy.zeropp()?"),
        "integers": (sharded(Strategy(**TWO), _integers), TypeError, "codes is torch.int8"),
        "doubles": (sharded(Strategy(**TWO), lambda: models.make_net().double()), TypeError, "is torch.float64"),
        "traffic of what": (lambda: traffic(models.make_net()), ValueError, "no part of this Net"),
        "invalidate what": (lambda: invalidate(models.make_net()), ValueError, "no part of this Net"),
    }


def attempt(adapter: Adapter, name: str) -> Reply:
    """In a worker: how one call is refused."""
    return messages.attempt(refusals_of(adapter)[name])


@pytest.mark.parametrize("name", refusals_of(ADAPTERS[0]))
@over_adapters
def test_bad_input_is_refused_on_every_rank_before_anything_is_sent(
    pool: Callable[[int], Pool], adapter: Adapter, name: str
) -> None:
    assert_refused(pool(4).run(attempt, adapter, name), refusals_of(adapter)[name])


def leave_in_step(adapter: Adapter, dies: bool) -> str:
    """In a worker: the last rank dies, or stays away, between two steps of two nodes of two."""
    case = Case(steps=1, clip=None)
    model = adapter.make(case, Strategy.zeropp(**TWO), dist.new_group(timeout=timedelta(seconds=5)))
    train(adapter, model, case)
    if dist.get_rank() == dist.get_world_size() - 1:
        if dies:
            os._exit(1)
        return "stayed away"
    with pytest.raises(RuntimeError) as caught:
        train(adapter, model, case)
    return type(caught.value).__name__


@pytest.mark.skipif(device_type() == "cuda", reason="NCCL's watchdog ends the process instead of raising")
@over_adapters
def test_a_dead_rank_is_an_error_on_the_others(adapter: Adapter) -> None:
    pool = Pool(4)
    with pytest.raises(WorkerError, match=r"failed on ranks \[3\] of 4, first on rank 3:\nthe process died"):
        pool.run(leave_in_step, adapter, True)


@pytest.mark.skipif(device_type() == "cuda", reason="NCCL's watchdog ends the process instead of raising")
@over_adapters
def test_an_absent_rank_is_an_error_within_the_timeout(adapter: Adapter) -> None:
    pool = Pool(4)
    assert pool.run(leave_in_step, adapter, False) == ["RuntimeError"] * 3 + ["stayed away"]
    pool.stop(kill=True)


@dataclass
class LocalNode:
    """A training on this node, whose last step may still have to be made."""

    adapter: Adapter
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def forward(self) -> None:
        models.loss_of(self.model, models.batch(9, 0)).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step_and_forward(self) -> None:
        self.step()
        self.forward()

    def exchange(self) -> None:
        self.step()
        exchange_weights(self.model)

    def gather(self) -> None:
        dict(gathered_weights(self.model))

    def wrap(self) -> None:
        self.adapter.wrap(models.make_net(), Strategy(**TWO))

    def load_codec_state(self) -> None:
        self.step()
        codecs = CodecState(self.model, self.optimizer)
        codecs.load_state_dict(codecs.state_dict())
        self.forward()

    def show_codec_state(self) -> None:
        self.step()
        codecs = CodecState(self.model, self.optimizer)
        codecs.load_state_dict(codecs.state_dict())
        with agreed_weights(self.model):
            self.forward()

    def load_weights(self) -> None:
        self.step()
        self.adapter.load_from(self.model, self.model, self.adapter.state_dict_kinds[0])
        self.forward()

    def show_weights(self) -> None:
        self.step()
        self.adapter.load_from(self.model, self.model, self.adapter.state_dict_kinds[0])
        with agreed_weights(self.model):
            self.forward()


PLACES: dict[str, tuple[Callable[[LocalNode], None], str]] = {
    "exchange": (LocalNode.exchange, "in exchange_weights"),
    "gather": (LocalNode.gather, "gathered_weights"),
    "wrap": (LocalNode.wrap, "FullyShardedDataParallel(Net)|fully_shard(Net)"),
    "codec state": (LocalNode.load_codec_state, "the first use of codec state that was loaded"),
    "codec state, shown": (LocalNode.show_codec_state, "the first use of codec state that was loaded"),
}
"""Where a node may be after the backward of a second step, with what errors say of it."""
APART = {
    "weights": (LocalNode.load_weights, "at the first use of weights that were loaded"),
    "weights, shown": (LocalNode.show_weights, "at the first use of weights that were loaded"),
}
FORWARD = LocalNode.step_and_forward
PHASES: dict[str, tuple[dict[str, Any], dict[str, tuple[Callable[[LocalNode], None], str]]]] = {
    "an exchange": (
        {"every": 2, "spread": False, "overlap": 1, "moments_every": 1, "error_feedback": LoCo(), "codec": Int4(32)},
        PLACES | APART | {"forward": (FORWARD, "before the forward of step 3")},
    ),
    "the start": (
        {"every": 2, "start": 2},
        PLACES
        | {"forward": (FORWARD, "before the forward of step 3, where local steps begin")}
        | {"no step": (LocalNode.forward, "before the forward of step 2")},
    ),
    "the stop": (
        {"every": 8, "stop": 2},
        PLACES | APART | {"forward": (FORWARD, "before the forward of step 3, where local steps end")},
    ),
}
"""Local steps, and the places where nodes may be under them."""


def met(adapter: Adapter, levels: str, gpus_per_node: int, phase: str) -> list[tuple[str, str, str]]:
    """In a worker: the errors for every pair of places, the last node at one of them and the others at the other."""
    config, places = PHASES[phase]
    strategy = Strategy(levels, local_steps=LocalSteps(**config), gpus_per_node=gpus_per_node)
    is_last, found = dist.get_rank() >= dist.get_world_size() - gpus_per_node, []
    for pair in combinations(places, 2):
        if places[pair[0]][1] == places[pair[1]][1]:
            continue
        model = adapter.make(Case(), strategy)
        node = LocalNode(adapter, model, models.make_optimizer("adamw", model.parameters()))
        train(adapter, model, Case(steps=1, clip=None), optimizer=node.optimizer)
        node.forward()
        act = places[pair[is_last]][0]
        kind, text, _ = messages.attempt((lambda node=node, act=act: act(node), ValueError, ""))
        found.append((*pair, f"{kind}: {text}"))
    return found


@over_pairs(adapter=ADAPTERS, layout=[("III", 2), ("III", 1), ("INI", 2), ("NNN", 2)], phase=PHASES)
def test_nodes_at_different_places_are_told_where_each_of_them_is(
    pool: Callable[[int], Pool], adapter: Adapter, layout: tuple[str, int], phase: tuple[Any, Any]
) -> None:
    name = next(name for name, each in PHASES.items() if each is phase)
    for found in pool(2 * layout[1]).run(met, adapter, *layout, name):
        assert len(found) > 10
        for *pair, text in found:
            assert text.startswith("ValueError: "), (pair, text)
            for place in pair:
                assert any(each in text for each in phase[1][place][1].split("|")), (pair, text)


# ---- what two units share


def _module_of_siblings() -> models.Net:
    net = models.make_net()
    net.blocks[1].down = net.blocks[0].down
    return net


def _weight_of_siblings() -> models.Net:
    net = models.make_net()
    net.blocks[1].down.weight = net.blocks[0].down.weight
    return net


def _module_of_the_root() -> models.Net:
    net = models.make_net()
    net.head = nn.Sequential(nn.Linear(22, 37), net.blocks[2].down)
    return net


def _weight_of_the_root() -> models.Net:
    net = models.make_net(width=22, hidden=61)
    net.blocks[0].up.weight = net.embedding.weight
    return net


SHARED: dict[str, tuple[Callable[[], models.Net], str]] = {
    "module of siblings": (_module_of_siblings, "down.weight"),
    "weight of siblings": (_weight_of_siblings, "down.weight"),
    "module of the root": (_module_of_the_root, "head.1.weight (unit root)"),
    "weight of the root": (_weight_of_the_root, "embedding.weight"),
}


def attempt_shared(adapter: Adapter, kind: str, scopes: str) -> Reply:
    """In a worker: how a net is refused if two of its units share something."""
    make, name = SHARED[kind]
    shard = lambda: adapter.shard(make(), Case(), Strategy(scopes, **TWO))  # noqa: E731
    return messages.attempt((shard, ValueError, name))


@over_each(adapter=WITH_FLAT, kind=list(SHARED), scopes=SCOPES)
def test_what_two_units_share_is_refused_on_every_rank(
    pool: Callable[[int], Pool], adapter: Adapter, kind: str, scopes: str
) -> None:
    make, name = SHARED[kind]
    replies = pool(4).run(attempt_shared, adapter, kind, scopes)
    assert_refused(replies, (make, ValueError, "it is shared by two units"))
    remedy = "fully_shard([a, b]" if isinstance(adapter, Fsdp2) else "wrap the module around both as one unit"
    for _, text, _ in replies:
        assert name in text
        assert remedy in text


def attempt_on_one_rank(adapter: Adapter) -> Reply:
    """In a worker: how a net is refused if two of its units share something on the last rank only."""
    make = _module_of_siblings if dist.get_rank() == dist.get_world_size() - 1 else models.make_net
    return messages.attempt((lambda: adapter.shard(make(), Case(), Strategy(**TWO)), ValueError, ""))


@over_adapters
def test_what_two_units_share_on_one_rank_is_an_error_on_all(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    replies = pool(4).run(attempt_on_one_rank, adapter)
    assert_refused(replies, (models.make_net, ValueError, "ranks were given different arguments: "))


def weights_with_a_shared_module(adapter: Adapter, wrap_blocks: bool, strategy: Strategy | None) -> dict[str, Tensor]:
    """In a worker: the weights of a net with two blocks in one unit that share a module and a weight."""
    case = Case(wrap_blocks=wrap_blocks)
    net = _module_of_siblings()
    net.blocks[1].up.weight = net.blocks[0].up.weight
    model = adapter.shard(net, case, strategy)
    train(adapter, model, case)
    return adapter.full_weights(model)


@over_each(adapter={"fsdp1": Fsdp1(), "fsdp1 flat": Fsdp1(False), "fsdp2": Fsdp2(pairs=True)}, scopes=SCOPES)
def test_what_one_unit_shares_with_itself_trains_as_stock(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str
) -> None:
    ours, stock = (
        pool(4).run(weights_with_a_shared_module, adapter, isinstance(adapter, Fsdp2), strategy)[0]
        for strategy in (Strategy(scopes, **TWO), STOCK)
    )
    assert models.distance(ours, stock) <= 1e-6
