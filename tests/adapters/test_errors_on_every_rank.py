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
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, over_adapters, over_pairs
from harness.messages import Refusal, Reply, assert_refused
from harness.pool import Pool, WorkerError, device_type
from harness.training import train
from torch import nn

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
    """A training on this node, whose last step may be left to be made."""

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
    """In a worker: what is raised where the last node is at another place than the others, for every two places."""
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
