"""Corners of nodes that train on their own: weights that are loaded or shown, parts that thaw, steps out of step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, over_adapters, over_pairs
from harness.fsdp1 import Fsdp1
from harness.fsdp2 import Fsdp2
from harness.messages import attempt
from harness.pool import Pool
from harness.training import differing_tensors, load, save, train
from harness.wiretap import sent_in
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_zpp import CodecState, LocalSteps, Strategy, agreed_weights, exchange_weights
from fsdp_zpp.torch_internals import major_minor


def strategy_of(**local_steps: Any) -> Strategy:
    """Two nodes of two."""
    return Strategy("III", local_steps=LocalSteps(**local_steps), gpus_per_node=2)


def kind_of(adapter: Adapter) -> str:
    """A kind of state dict that both FSDPs load back into what is sharded alike."""
    return "SHARDED_STATE_DICT" if isinstance(adapter, Fsdp1) else adapter.state_dict_kinds[0]


def swapped(adapter: Adapter, strategy: Strategy) -> tuple[float, int]:
    """In a worker: a model whose weights are replaced and put back while it trains, against one left alone."""
    average, own, *trained = (adapter.make(Case(), strategy) for _ in range(4))
    optimizers = [models.make_optimizer("sgd", model.parameters()) for model in trained]
    for model, optimizer in zip(trained, optimizers, strict=True):
        train(adapter, model, Case(steps=3), optimizer=optimizer)
    adapter.load_from(trained[0], own, kind_of(adapter))
    for source in (average, own):
        adapter.load_from(source, trained[0], kind_of(adapter))
        with torch.no_grad():
            models.loss_of(trained[0], models.batch(9, 0))
    for model, optimizer in zip(trained, optimizers, strict=True):
        train(adapter, model, Case(steps=3), optimizer=optimizer, first_step=3)
        exchange_weights(model)
    return models.distance(*(adapter.full_weights(model) for model in trained)), differing_tensors(adapter, trained[0])


@over_adapters
def test_weights_that_are_put_back_change_nothing(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    assert pool(4).run(swapped, adapter, strategy_of(every=2)) == [(0, 0)] * 4


def after_loading(adapter: Adapter, strategy: Strategy, kind: str, then: str) -> tuple[float, int]:
    """In a worker: a model that has trained and then loads weights, against one that starts from these."""
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


@over_pairs(kind=KINDS, then=["training", "backward before", "exchange", "agreed"])
def test_weights_that_are_loaded_are_agreed_on(
    pool: Callable[[int], Pool], kind: tuple[Adapter, str], then: str
) -> None:
    adapter, of = kind
    strategy = strategy_of(every=2, spread=False)  # so that, after four steps, both exchange after the same ones
    assert pool(4).run(after_loading, adapter, strategy, of, then) == [(0, 0)] * 4


def thawed(adapter: Adapter) -> tuple[int, int]:
    """In a worker: tensors in which nodes differ before and after the last exchange, of a model with a thawed block."""
    model = adapter.make(Case(frozen=True), strategy_of(every=3))
    train(adapter, model, Case(steps=2))
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    train(adapter, model, Case(steps=4), first_step=2)
    before = differing_tensors(adapter, model)
    exchange_weights(model)
    return before, differing_tensors(adapter, model)


@over_adapters
def test_a_unit_that_is_thawed_is_exchanged_from_then_on(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for before, after in pool(4).run(thawed, adapter):
        assert before > 0
        assert after == 0


def two_steps_after_one_forward() -> tuple[str, str]:
    """In a worker: the error of steps that a method makes on its own."""
    model = FullyShardedDataParallel(
        models.make_net(),
        sharding_strategy=Strategy("NNN", local_steps=LocalSteps(2), gpus_per_node=1),
        device_id=models.device(),
        use_orig_params=True,
    )
    optimizer = models.make_optimizer("sgd", model.parameters())
    models.loss_of(model, models.batch(0, 0)).backward()
    optimizer.step()

    def another_step() -> None:
        model._fsdp_zpp_backward_watch.on_backward_end(True)  # as a backward of a method's own forward does
        optimizer.step()

    return attempt((another_step, RuntimeError, ""))[:2]


def test_steps_without_a_forward_of_the_root_are_refused(pool: Callable[[int], Pool]) -> None:
    for kind, message in pool(2).run(two_steps_after_one_forward):
        assert kind == "RuntimeError"
        assert "without a forward of its outermost module between them" in message


def uneven(adapter: Adapter, overlap: int) -> tuple[str, str]:
    """In a worker: the error of nodes of which one makes a backward without a step."""

    def run() -> None:
        model = adapter.make(Case(), strategy_of(every=6, overlap=overlap))
        optimizer = models.make_optimizer("sgd", model.parameters())
        for step in range(12):
            models.loss_of(model, models.batch(step, 0)).backward()
            if step != 3 or dist.get_rank() >= 2:
                optimizer.step()
            optimizer.zero_grad()
        exchange_weights(model)

    return attempt((run, ValueError, ""))[:2]


@over_pairs(adapter=ADAPTERS, overlap=[0, 4])
def test_nodes_out_of_step_are_told(pool: Callable[[int], Pool], adapter: Adapter, overlap: int) -> None:
    for kind, message in pool(4).run(uneven, adapter, overlap):
        assert kind == "ValueError", message
        assert "an exchange of weights between nodes: ranks were given different arguments" in message


def shown_while_saved(adapter: Adapter, path: str) -> list[float]:
    """In a worker: a training that is saved while agreed weights are shown, and one that goes on from there."""
    case, strategy = Case(steps=3), strategy_of(every=8)
    first, second = adapter.make(case, strategy), adapter.make(case, strategy)
    optimizers = [models.make_optimizer("sgd", model.parameters()) for model in (first, second)]
    train(adapter, first, case, optimizer=optimizers[0])
    with agreed_weights(first):
        save(first, optimizers[0], CodecState(first, optimizers[0]), path)
        models.loss_of(first, models.batch(9, 0))  # an evaluation that records gradients
    load(second, optimizers[1], CodecState(second, optimizers[1]), path)
    # Saved again before any forward, by objects of its own.
    save(second, optimizers[1], CodecState(second, optimizers[1]), path + "-again")
    load(second, optimizers[1], CodecState(second, optimizers[1]), path + "-again")
    losses = [
        train(adapter, model, case, optimizer=optimizer, first_step=3)
        for model, optimizer in zip((first, second), optimizers, strict=True)
    ]
    assert losses[0] == losses[1]
    return [models.distance(adapter.full_weights(first), adapter.full_weights(second))]


@over_adapters
def test_a_checkpoint_while_agreed_weights_are_shown_has_the_nodes_own(
    pool: Callable[[int], Pool], tmp_path: Path, adapter: Adapter
) -> None:
    assert pool(4).run(shown_while_saved, adapter, str(tmp_path / "checkpoint")) == [[0]] * 4


def evaluated_with_gradients(adapter: Adapter) -> tuple[float, int, str]:
    """In a worker: what an evaluation of agreed weights changes and sends, and what an exchange says meanwhile."""
    trained = [adapter.make(Case(), strategy_of(every=2)) for _ in range(2)]
    optimizers = [models.make_optimizer("sgd", model.parameters()) for model in trained]
    for model, optimizer in zip(trained, optimizers, strict=True):
        train(adapter, model, Case(steps=2), optimizer=optimizer)  # an exchange is due before the next forward
    error = ""

    def evaluate() -> None:
        nonlocal error
        with agreed_weights(trained[0]):
            models.loss_of(trained[0], models.batch(9, 0))
            error = attempt((partial(exchange_weights, trained[0]), RuntimeError, ""))[1]

    tap, _ = sent_in(evaluate, trained[0], 2)
    for model, optimizer in zip(trained, optimizers, strict=True):
        train(adapter, model, Case(steps=3), optimizer=optimizer, first_step=2)
    weights: list[dict[str, Tensor]] = [adapter.full_weights(model) for model in trained]
    return models.distance(*weights), tap.total("inter"), error


@over_adapters
def test_agreed_weights_are_evaluated_without_an_exchange(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for distance, sent, error in pool(4).run(evaluated_with_gradients, adapter):
        assert distance == 0
        assert sent == 0
        assert "leave agreed_weights() first" in error


def parts_apart(adapter: Adapter, trains_both: bool) -> tuple[str, str, int]:
    """In a worker: the error of a block and the rest around it that have other local steps; the block may be frozen."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    net[0].requires_grad_(trains_both)
    net[0] = adapter.wrap(net[0], strategy_of(every=2))
    model = adapter.wrap(net, strategy_of(every=3))
    return attempt((lambda: model(torch.ones(2, 8, device=models.device())), ValueError, ""))


@over_pairs(adapter=ADAPTERS, trains_both=[True, False])
def test_parts_with_other_local_steps_are_refused_frozen_ones_too(
    pool: Callable[[int], Pool], adapter: Adapter, trains_both: bool
) -> None:
    for kind, message, _ in pool(4).run(parts_apart, adapter, trains_both):
        assert kind == "ValueError", message
        assert "its parts were given local_steps=LocalSteps(every=" in message


def groups_used(adapter: Adapter) -> tuple[set[str], set[str]]:
    """In a worker: the groups of exchanges between nodes of one rank each, and those in which ranks agree on them."""
    strategy = Strategy("NNN", local_steps=LocalSteps(2, overlap=1), gpus_per_node=1)
    model, used = adapter.make(Case(), strategy), defaultdict[str, set[str]](set)
    optimizer = models.make_optimizer("sgd", model.parameters())
    train(adapter, model, Case(steps=2, clip=None), optimizer=optimizer)

    def note(name: str, original: Callable[..., Any], *args: Any, **given: Any) -> Any:
        used[name].add(given["group"].group_name)
        return original(*args, **given)

    with ExitStack() as stack:
        for name in ("all_to_all_single", "all_reduce"):
            stack.enter_context(patch.object(dist, name, partial(note, name, getattr(dist, name))))
        train(adapter, model, Case(steps=4, clip=None), optimizer=optimizer, first_step=2)
    return used["all_to_all_single"], used["all_reduce"]


@over_adapters
def test_ranks_agree_beside_an_exchange_on_its_way(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for exchanges, agreements in pool(2).run(groups_used, adapter):
        assert exchanges
        assert agreements
        assert not exchanges & agreements


def looked_at_alone(adapter: Adapter, strategy: Strategy) -> tuple[int, int]:
    """In a worker: what nodes send if one of them is saved and evaluated, and how they differ in the end."""
    model, gpus = adapter.make(Case(), strategy), strategy.gpus_per_node or 1
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


@over_pairs(adapter=ADAPTERS, levels=["III", "NNN"], gpus_per_node=[1, 2])
def test_a_node_that_is_saved_and_evaluated_alone_waits_for_no_other(
    pool: Callable[[int], Pool], adapter: Adapter, levels: str, gpus_per_node: int
) -> None:
    if isinstance(adapter, Fsdp1) and major_minor(torch.__version__) < (2, 13):
        pytest.skip("FSDP1 gathers optimizer states from all ranks of the job until torch 2.12")
    strategy = Strategy(levels, local_steps=LocalSteps(4), gpus_per_node=gpus_per_node)
    assert pool(2 * gpus_per_node).run(looked_at_alone, adapter, strategy) == [(0, 0)] * 2 * gpus_per_node
