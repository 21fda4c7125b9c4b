"""Weights of nodes that train on their own: loaded, shown, written and frozen ones, and what nodes are told."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter, Case, Fsdp1, Fsdp2, original_name
from harness.covering import ADAPTERS, over_adapters, over_each
from harness.local_nodes import HEAD, ONE_BLOCK, A, B, sgd, strategy_of, train_parts
from harness.messages import Refusal, attempt, collected
from harness.pool import Pools
from harness.training import differing_tensors, train
from harness.wiretap import sent_in
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from fsdp_zpp import CodecState, Int4, LoCo, Strategy, agreed_weights, exchange_weights, invalidate
from fsdp_zpp._torch_compat import major_minor

TWO_NODES = partial(strategy_of, "III", 2)


def kind_of(adapter: Adapter) -> str:
    """A kind of state dict that both FSDPs load back into what is sharded alike."""
    return "SHARDED_STATE_DICT" if isinstance(adapter, Fsdp1) else adapter.state_dict_kinds[0]


# ---- loaded


def put_back(adapter: Adapter, start: int) -> tuple[float, int]:
    """In a worker: a model whose weights are replaced and put back while it trains, against one left alone."""
    # A momentum has taken in all of a start's changes after whole exchanges, as after two steps.
    strategy = TWO_NODES(every=2, start=start, spread=not start)
    average, own, *trained = (adapter.make(Case(), strategy) for _ in range(4))
    optimizers = [models.make_optimizer("sgd", model.parameters()) for model in trained]
    for model, optimizer in zip(trained, optimizers, strict=True):
        train(adapter, model, Case(steps=2 if start else 3), optimizer=optimizer)
        if start:
            models.loss_of(model, models.batch(0, 0))  # before which the momentum is warmed up
    adapter.load_from(trained[0], own, kind_of(adapter))
    for source in (average, own):
        adapter.load_from(source, trained[0], kind_of(adapter))
        with torch.no_grad():
            models.loss_of(trained[0], models.batch(9, 0))
    for model, optimizer in zip(trained, optimizers, strict=True):
        train(adapter, model, Case(steps=4), optimizer=optimizer, first_step=3)
        exchange_weights(model)
    return models.distance(*(adapter.full_weights(model) for model in trained)), differing_tensors(adapter, trained[0])


@over_each(adapter=ADAPTERS, start=[0, 4])
def test_weights_that_are_put_back_change_nothing(pool: Pools, adapter: Adapter, start: int) -> None:
    assert pool(4).run(put_back, adapter, start) == [(0, 0)] * 4


def after_loading(adapter: Adapter, kind: str, then: str) -> tuple[float, int]:
    """In a worker: a model that has trained and then loads weights, against one that starts from these."""
    strategy = TWO_NODES(every=2, spread=False)  # so that, after four steps, both exchange after the same ones
    source, *targets = (adapter.make(Case(), strategy) for _ in range(3))
    optimizer = models.make_optimizer("sgd", targets[0].parameters())
    train(adapter, targets[0], Case(steps=4), optimizer=optimizer, first_step=20)
    if then == "backward before":  # of a step that is not made
        models.loss_of(targets[0], models.batch(7, 0)).backward()
        optimizer.zero_grad()
    adapter.load_from(source, targets[0], kind)
    weights = []
    for target in targets:
        if then == "agreed":
            with torch.no_grad():
                models.loss_of(target, models.batch(9, 0))  # a first forward, for one of them
            with agreed_weights(target):
                weights.append(adapter.full_weights(target))
            continue
        if then == "exchange" and target is targets[0]:
            exchange_weights(target)
        if then != "exchange":
            train(adapter, target, Case(steps=3))
            exchange_weights(target)
        weights.append(adapter.full_weights(target))
    return models.distance(*weights), differing_tensors(adapter, targets[0])


KINDS = {str(adapter): (adapter, kind_of(adapter)) for adapter in ADAPTERS} | {"in place": (Fsdp2(), "in place")}


@over_each(rest=False, kind=KINDS, then=["training", "backward before", "exchange", "agreed"])
def test_weights_that_are_loaded_are_agreed_on(pool: Pools, kind: tuple[Adapter, str], then: str) -> None:
    assert pool(4).run(after_loading, *kind, then) == [(0, 0)] * 4


# ---- shown


def looked_at_alone(adapter: Adapter, levels: str, gpus: int) -> tuple[int, int]:
    """In a worker: what nodes send if one of them is saved and evaluated, and how they differ in the end."""
    model = adapter.make(Case(), strategy_of(levels, gpus, every=4))
    optimizer = models.make_optimizer("adamw", model.parameters())
    train(adapter, model, Case(steps=3), optimizer=optimizer)

    def look() -> None:
        if dist.get_rank() < gpus:
            return
        for full in (False, True):
            get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=full, cpu_offload=full))
        adapter.full_weights(model)
        CodecState(model, optimizer).state_dict()
        with agreed_weights(model):
            adapter.full_weights(model)
        with torch.no_grad():
            models.loss_of(model, models.batch(9, 0))

    tap, _ = sent_in(look, model, gpus)
    train(adapter, model, Case(steps=2), optimizer=optimizer, first_step=3)
    exchange_weights(model)
    return tap.total("inter"), differing_tensors(adapter, model)


@over_each(rest=False, adapter=ADAPTERS, levels=["III", "NNI"], gpus_per_node=[1, 2])
def test_a_node_that_is_saved_and_evaluated_alone_waits_for_no_other(
    pool: Pools, adapter: Adapter, levels: str, gpus_per_node: int
) -> None:
    if isinstance(adapter, Fsdp1) and major_minor(torch.__version__) < (2, 13):
        pytest.skip("FSDP1 gathers optimizer states from all ranks of the job until torch 2.12")
    found = pool(2 * gpus_per_node).run(looked_at_alone, adapter, levels, gpus_per_node)
    assert found == [(0, 0)] * 2 * gpus_per_node


# ---- frozen and written


def written_while_frozen(adapter: Adapter, scopes: str) -> None:
    """In a worker: agreed weights show what a user wrote to frozen parameters, on all nodes."""
    model = adapter.make(ONE_BLOCK, strategy_of(scopes, 2, every=2, codec=None))
    train_parts(adapter, model, sgd(model), [(A, B, HEAD)] * 2 + [(B, HEAD)] * 2 + [(HEAD,)])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if original_name(name) == A:
                parameter.fill_(7.0)
    invalidate(model)
    with agreed_weights(model):
        assert (adapter.full_weights(model)[A] == 7.0).all()
        assert differing_tensors(adapter, model) == 0


@over_each(rest=False, adapter=ADAPTERS, scopes=("III", "INI", "NNI"))
def test_agreed_weights_are_those_of_what_is_exchanged(pool: Pools, adapter: Adapter, scopes: str) -> None:
    pool(4).run(written_while_frozen, adapter, scopes)


def moved_while_frozen(adapter: Adapter) -> float:
    """In a worker: how far a parameter moves, encoded and with error feedback, after its last exchange."""
    model = adapter.make(ONE_BLOCK, TWO_NODES(every=1, codec=Int4(32), error_feedback=LoCo(beta=0.0)))
    optimizer = sgd(model)
    # Before the last of these steps, the last one of A is exchanged.
    train_parts(adapter, model, optimizer, [(A, B, HEAD)] * 4 + [(B, HEAD)])
    before = adapter.full_weights(model)[A]
    train_parts(adapter, model, optimizer, [(B, HEAD)] * 4, first_step=5)
    exchange_weights(model)
    return (adapter.full_weights(model)[A] - before).abs().max().item()


@over_adapters
def test_what_is_frozen_stays_where_its_last_exchange_left_it(pool: Pools, adapter: Adapter) -> None:
    assert max(pool(4).run(moved_while_frozen, adapter)) == 0


def left_by_a_mixture(scopes: str) -> int:
    """In a worker: how nodes differ in what was trained still when a mixture arrived, and never again."""
    model = Fsdp2().make(ONE_BLOCK, strategy_of(scopes, 2, every=1, codec=None, mix=0.5))
    optimizer = sgd(model)
    train_parts(Fsdp2(), model, optimizer, [(A, B, HEAD)])
    models.loss_of(model, models.batch(1, 0))  # before which nodes exchange
    train_parts(Fsdp2(), model, optimizer, [(HEAD,)], first_step=2)
    exchange_weights(model)
    return differing_tensors(Fsdp2(), model)


@over_each(scopes=["III", "NNI"])
def test_what_a_mixture_leaves_different_is_exchanged_again(pool: Pools, scopes: str) -> None:
    """Under fully_shard alone: FullyShardedDataParallel lets nobody freeze what a forward left unsharded."""
    assert pool(4).run(left_by_a_mixture, scopes) == [0] * 4


# ---- told


def logged_on_one_node(adapter: Adapter) -> list[tuple[str, str]]:
    """In a worker: what is logged where there is nothing to exchange, and that all that is called works."""
    with collected() as records:
        model = adapter.make(Case(), Strategy.diloco(every=2, gpus_per_node=2))
        train(adapter, model, Case(steps=3))
        exchange_weights(model)
        with agreed_weights(model):
            assert not CodecState(model).state_dict().keys() - {"layout"}
    return records


@over_adapters
def test_on_one_node_they_are_inactive_and_said_to_be(pool: Pools, adapter: Adapter) -> None:
    [[(level, line)], _] = pool(2).run(logged_on_one_node, adapter)
    assert level == "WARNING"
    assert "NOT active: local steps, weights exchanged between nodes every 2 steps as int4(128)" in line
    assert line.endswith("(one node: nothing to exchange)")


def refusals(adapter: Adapter) -> list[Refusal]:
    """Calls on two nodes of two ranks, and what they say."""

    def make(**local_steps: Any) -> tuple[Any, torch.optim.Optimizer]:
        model = adapter.make(Case(), TWO_NODES(**local_steps))
        return model, sgd(model)

    def parts_with_others() -> None:
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        net[0].requires_grad_(False)  # a frozen part counts, too
        net[0] = adapter.wrap(net[0], TWO_NODES(every=2))
        model = adapter.wrap(net, TWO_NODES(every=3))
        model(torch.ones(2, 8, device=models.device()))

    def agreed_without_local_steps() -> None:
        with agreed_weights(adapter.make(Case(), Strategy("III", gpus_per_node=2))):
            pass

    def exchange_while_shown() -> None:
        model, optimizer = make(every=2)
        train(adapter, model, Case(steps=2, clip=None), optimizer=optimizer)
        with agreed_weights(model):
            exchange_weights(model)

    def out_of_step(overlap: int, steps: int, left_out: int) -> None:
        model, optimizer = make(every=6, overlap=overlap)
        for step in range(steps):
            models.loss_of(model, models.batch(step, 0)).backward()
            if step != left_out or dist.get_rank() >= 2:
                optimizer.step()
            optimizer.zero_grad()
        exchange_weights(model)

    def gradients_that_wait_at_the_switch(is_cleared: bool) -> None:
        model, optimizer = make(every=2, start=1)
        models.loss_of(model, models.batch(0, 0)).backward()
        with adapter.micro_batch(model, False, False):
            models.loss_of(model, models.batch(0, 1)).backward()
        optimizer.step()
        if is_cleared:
            optimizer.zero_grad()
        models.loss_of(model, models.batch(1, 0)).backward()

    others = "its parts were given local_steps=LocalSteps(every="
    different = "an exchange of weights between nodes: ranks were given different arguments"
    gradients_that_wait_at_the_switch(is_cleared=True)
    return [
        (lambda: CodecState(make(every=2)[0]), ValueError, "pass CodecState(model, optimizer)"),
        (lambda: exchange_weights(make(every=2)[0]), RuntimeError, "has not run a forward yet"),
        (agreed_without_local_steps, ValueError, "has a Strategy(local_steps=..."),
        (
            lambda: exchange_weights(adapter.make(Case(), Strategy("III", gpus_per_node=2))),
            ValueError,
            "no part of this",
        ),
        (exchange_while_shown, RuntimeError, "leave agreed_weights() first"),
        (parts_with_others, ValueError, others),
        (partial(out_of_step, 4, 12, 3), ValueError, different),
        (partial(out_of_step, 0, 3, 2), ValueError, "all 3 after step 2 on ranks 0-1, all 3 after step 3 on ranks 2-3"),
        (
            partial(gradients_that_wait_at_the_switch, False),
            RuntimeError,
            ", step 2: local_steps reduces gradients over other ranks from here on",
        ),
    ]


def check_refusals(adapter: Adapter) -> None:
    """In a worker."""
    for refusal in refusals(adapter):
        kind, text, _ = attempt(refusal)
        assert kind == refusal[1].__name__, (refusal, text)
        assert refusal[2] in text, text


@over_adapters
def test_what_cannot_be_is_refused_on_all_nodes(pool: Pools, adapter: Adapter) -> None:
    pool(4).run(check_refusals, adapter)


def two_steps_after_one_forward() -> None:
    """In a worker."""
    model = Fsdp1().make(Case(wrap_blocks=False), strategy_of("III", 1, every=2))
    optimizer = models.make_optimizer("sgd", model.parameters())
    models.loss_of(model, models.batch(0, 0)).backward()
    optimizer.step()
    model._fsdp_zpp_backward_watch.on_backward_end(True)  # as a backward of a method's own forward does
    with pytest.raises(RuntimeError, match="without a forward of its outermost module between them"):
        optimizer.step()


def test_steps_without_a_forward_of_the_root_are_refused(pool: Pools) -> None:
    pool(2).run(two_steps_after_one_forward)
