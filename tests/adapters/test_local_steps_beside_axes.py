"""Nodes that train on their own beside tensor parallelism.

Coded exchanges leave copies equal bit for bit, and nodes at different places are told so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter
from harness.covering import ADAPTERS, over_adapters, over_each
from harness.messages import attempt
from harness.pool import Pool
from test_tensor_parallelism import TWO, batch, copies_that_differ, trained

from fsdp_zpp import Codec, Int4, Int8, LocalSteps, LoCo, Strategy, exchange_weights

STEPS = 9
CODED = {
    "int8, moments": LocalSteps(2, codec=Int8(64), moments_every=1),
    "int4": LocalSteps(2, codec=Int4(512), spread=False),
    "int4, feedback in int8": LocalSteps(2, codec=Int4(64), error_feedback=LoCo(dtype=Int8(128))),
    "fragments, overlap": LocalSteps(3, codec=Int4(32), error_feedback=LoCo(), overlap=1, mix=0.5),
    "momentum that fits": LocalSteps(1, codec=Int8(64), outer_momentum="auto"),
    "a start and a stop": LocalSteps(2, codec=Int4(32), start=3, stop=7),
}


def outcome(adapter: Adapter, strategy: Strategy) -> tuple[dict[str, float], list[float]]:
    """In a worker: how far copies are apart after a training and a last exchange, and the losses of all ranks."""
    net = trained(adapter, strategy, STEPS, rate=0.1)
    before = copies_that_differ(net)
    exchange_weights(net.model)
    losses = torch.tensor(net.losses, device=models.device())
    dist.all_reduce(losses)
    return before | copies_that_differ(net), losses.tolist()


@over_each(adapter=ADAPTERS, name=list(CODED))
def test_copies_stay_equal_bit_for_bit(pool: Callable[[int], Pool], adapter: Adapter, name: str) -> None:
    local = CODED[name]
    uncoded = replace(local, codec=None, error_feedback=None)
    coded, exact = (
        pool(8).run(outcome, adapter, Strategy.diloco(local_steps=each, **TWO)) for each in (local, uncoded)
    )
    assert [differing for differing, _ in coded] == [{}] * 8
    losses, expected = coded[0][1], exact[0][1]
    assert losses == pytest.approx(expected, rel=2e-2)
    assert losses != expected


class Whole(Int8):
    """A codec that does not tell which values of a chunk depend on each other."""

    block_numel = Codec.block_numel


def without_blocks(adapter: Adapter) -> tuple[str, str]:
    """In a worker: the error of such a codec."""
    strategy = Strategy.diloco(local_steps=LocalSteps(2, codec=Whole(64)), **TWO)
    return attempt((partial(trained, adapter, strategy, STEPS), NotImplementedError, ""))[:2]


@over_adapters
def test_a_codec_without_blocks_is_refused(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for kind, text in pool(8).run(without_blocks, adapter):
        assert kind == "NotImplementedError", text
        assert "up.weight is sharded already: the codec's block_numel is 0" in text


def apart(adapter: Adapter) -> tuple[str, str]:
    """In a worker: the error if one node exchanges before a forward, and the other in a call."""
    net = trained(adapter, Strategy.diloco(local_steps=LocalSteps(2, spread=False), **TWO), 2)

    def run() -> None:
        if net.mesh["dp"].get_local_rank() < 2:
            exchange_weights(net.model)
        else:
            net.model(batch(2, 0))

    return attempt((run, ValueError, ""))[:2]


@over_adapters
def test_nodes_at_different_places_are_told(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for kind, text in pool(8).run(apart, adapter):
        assert kind == "ValueError", text
        assert "an exchange of weights between nodes: ranks were given different arguments: place: " in text
        assert "in exchange_weights on ranks " in text
        assert "before the forward of step 3 on ranks " in text
