"""An elastic node that is the only one: it trains as without exchanges, resumes bit for bit, refuses what can't be."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from harness import models
from harness.adapter import STOCK, Adapter, Case
from harness.covering import ADAPTERS, over_adapters, over_pairs
from harness.messages import attempt
from harness.pool import Pool, free_port
from harness.training import train

from fsdp_zpp import (
    CodecState,
    Elastic,
    Int4,
    LocalSteps,
    LoCo,
    Strategy,
    count_tokens,
    end_training,
    exchange_weights,
    members,
)
from fsdp_zpp.collectives.agreement import from_first_rank
from fsdp_zpp.runtime.elastic_header import Header, Request, check_alike, current_nodes
from fsdp_zpp.runtime.unit import StrategyUnit, named_units

MEAN: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False, "codec": None}
CASE = Case(steps=6, clip=None)


@contextmanager
def alone(levels: str = "III", **local_steps: Any) -> Iterator[Strategy]:
    """In a worker: the strategy of a node that is the only one, with a store of its own."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
    endpoint = from_first_rank(f"127.0.0.1:{store.port}" if store is not None else "")
    elastic = Elastic(1, endpoint=endpoint, run_id=endpoint, heartbeat=0.5)  # models of other tests may not be gone yet
    yield Strategy(levels, local_steps=LocalSteps(**local_steps, elastic=elastic))
    gc.collect()  # the model has a thread that would ask for the store
    dist.barrier()


def distance_from_stock(adapter: Adapter, levels: str, every: int) -> tuple[float, tuple[int, ...]]:
    """In a worker: how far a node's training is from that of torch's own FSDP, and its place in the end."""
    weights = []
    with alone(levels, every=every, **MEAN) as strategy:
        for each in (strategy, STOCK):
            model = adapter.make(CASE, each)
            train(adapter, model, CASE, optimizer=models.make_optimizer("adamw", model.parameters()))
            if each is not STOCK:
                exchange_weights(model)
                place = tuple(members(model))
                end_training(model)
            weights.append(adapter.full_weights(model))
    return models.distance(*weights), place


@over_pairs(adapter=ADAPTERS, levels=["III", "NNN", "INI"], every=[1, 3])
def test_a_node_alone_trains_as_without_exchanges(
    pool: Callable[[int], Pool], adapter: Adapter, levels: str, every: int
) -> None:
    for distance, place in pool(2).run(distance_from_stock, adapter, levels, every):
        assert distance < 2e-5
        assert place == (0, 1, 6)


def come_apart(adapter: Adapter, strategy: Strategy, steps: int) -> str:
    """In a worker: the error if one rank of a node exchanges before a forward, and the other in a call."""
    model = adapter.make(CASE, strategy)
    train(adapter, model, replace(CASE, steps=steps), optimizer=models.make_optimizer("adamw", model.parameters()))

    def run() -> None:
        if dist.get_rank() == 0:
            exchange_weights(model)
        else:
            models.loss_of(model, models.batch(0, 0))

    kind, text, _ = attempt((run, ValueError, ""))
    end_training(model)
    return f"{kind}: {text}"


def apart_in_a_node(adapter: Adapter, meets: bool) -> str:
    """In a worker: the same after one step, before the node has met others, or after two."""
    with alone(every=1, **MEAN) as strategy:
        return come_apart(adapter, strategy, 1 if meets else 2)


@over_pairs(adapter=ADAPTERS, meets=[False, True])
def test_ranks_of_a_node_at_different_places_are_told(
    pool: Callable[[int], Pool], adapter: Adapter, meets: bool
) -> None:
    place = "before the forward of step 2, where this node meets others" if meets else "before the forward of step 3"
    for text in pool(2).run(apart_in_a_node, adapter, meets):
        assert text.startswith("ValueError: an exchange of weights between nodes: "), text
        assert f"place: in exchange_weights on rank 0, {place} on rank 1" in text


def differing_after_resuming(adapter: Adapter) -> list[str]:
    """In a worker: the weights that differ in a training that was interrupted."""
    ends = []
    for interrupted in (False, True):
        with alone(every=4, codec=Int4(32), error_feedback=LoCo()) as strategy:
            model = adapter.make(CASE, strategy)
            optimizer = models.make_optimizer("adamw", model.parameters())
            for step in range(10):
                if step == 5:
                    # The errors of exchanges start from zero where nodes meet, as they do after a restart.
                    (training,) = {unit.local_training for unit in named_units(model) if isinstance(unit, StrategyUnit)}
                    training._members.disconnect()
                if interrupted and step == 5:
                    saved = CodecState(model, optimizer).state_dict()
                    resumed = adapter.make(CASE, strategy)
                    adapter.load_from(model, resumed, adapter.state_dict_kinds[0])
                    model, optimizer = resumed, models.make_optimizer("adamw", resumed.parameters())
                    CodecState(model, optimizer).load_state_dict(saved)
                    del training, resumed
                    gc.collect()  # as if the process had ended
                models.loss_of(model, models.batch(step, 0)).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert members(model).step == 10
            exchange_weights(model)
            ends.append(adapter.full_weights(model))
            end_training(model)
            del model, optimizer
    return [name for name, value in ends[0].items() if not value.equal(ends[1][name])]


@over_adapters
def test_a_node_resumes_bit_for_bit(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for differing in pool(2).run(differing_after_resuming, adapter):
        assert differing == []


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises((RuntimeError, ValueError)) as error:
        call()
    return str(error.value)


def refusals(adapter: Adapter) -> list[str]:
    """In a worker: errors of what can't be."""
    said = []
    nobody = Strategy.diloco(elastic=Elastic(1, endpoint=f"127.0.0.1:{from_first_rank(free_port())}", join_timeout=0.5))
    two_nodes = replace(nobody, gpus_per_node=1)
    said.append(error_of(lambda: adapter.make(CASE, two_nodes)))
    model = adapter.make(CASE, nobody)
    said.append(error_of(lambda: members(model)))
    models.loss_of(model, models.batch(0, 0))
    said.append(error_of(lambda: models.loss_of(model, models.batch(0, 0))))
    plain = adapter.make(CASE, Strategy.diloco(gpus_per_node=1))
    models.loss_of(plain, models.batch(0, 0))
    said.append(error_of(lambda: members(plain)))
    said.append(error_of(lambda: count_tokens(plain, -1)))
    with alone(every=1) as strategy:
        model = adapter.make(CASE, strategy)
        models.loss_of(model, models.batch(0, 0))
        end_training(model)
        again = adapter.make(CASE, strategy)
        models.loss_of(again, models.batch(0, 0))
        said.append(error_of(lambda: models.loss_of(again, models.batch(0, 0))))
    return said


@over_adapters
def test_what_cannot_be_is_refused_on_all_ranks(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    parts = (
        "elastic nodes are jobs of their own, but this job of 2 ranks has its model on 2 nodes x 1",
        "has not run a forward yet",
        "this node can't meet others at 127.0.0.1:",
        "have no elastic=Elastic(...)",
        "tokens must be an int of 0 or more, got -1",
        "the training has ended: nodes of the run",
    )
    for said in pool(2).run(refusals, adapter):
        for text, part in zip(said, parts, strict=True):
            assert part in text


HEADER = Header("a net", 3, 24, 2, None, False, Request(24, (0,)), ((True,),), (8,), False, ((0.5, 1.0),))


@pytest.mark.parametrize(
    ("headers", "current"),
    [
        ([HEADER, HEADER], [0, 1]),
        ([replace(HEADER, committed=2), HEADER, HEADER], [1, 2]),
        ([HEADER, replace(HEADER, made=25)], [1]),
        # Both have committed to a fourth exchange in rounds of their own; the later round decides.
        ([HEADER, replace(HEADER, round=3), replace(HEADER, round=3)], [1, 2]),
        ([replace(HEADER, committed=0, made=0, round=0, start="one", request=None), HEADER], [1]),
        ([replace(HEADER, committed=0, made=0, start=start) for start in ("one", "other", "one")], [0, 2]),
    ],
    ids=["alike", "one was lost", "one is behind", "apart", "one is new", "all are new"],
)
def test_nodes_with_the_most_exchanges_are_current(headers: list[Header], current: list[int]) -> None:
    assert current_nodes(headers) == current


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"model": "another"}, "different models or local steps: a net on node 0, another on node 1; give all of them"),
        ({"counts_tokens": True}, "node 1 counts tokens, but node 0 does not"),
    ],
)
def test_nodes_that_were_given_different_things_raise(other: dict[str, Any], message: str) -> None:
    check_alike([HEADER, replace(HEADER, trained=(0,), counts_tokens=True)], "net")  # it has just joined
    with pytest.raises(ValueError, match=message):
        check_alike([HEADER, replace(HEADER, **other)], "net")
