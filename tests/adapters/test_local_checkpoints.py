"""Checkpoints of nodes that train on their own, the weights that they have agreed on, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import models
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, over_adapters, over_each, over_pairs
from harness.fsdp1 import Fsdp1
from harness.fsdp2 import Fsdp2
from harness.messages import Refusal, attempt, collected
from harness.pool import Pool
from harness.training import differing_tensors, load, save, train
from harness.wiretap import sent_in
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner

from fsdp_zpp import CodecState, Int8, LocalSteps, LoCo, Strategy, agreed_weights, exchange_weights

CONFIGS = {
    "int4": LocalSteps(3),
    "on its way": LocalSteps(4, overlap=3, mix=0.5, spread=False),
    "with errors": LocalSteps(2, error_feedback=LoCo(dtype=Int8(32)), overlap=1),
    "on the CPU": LocalSteps(2, offload=True),
    "momentum that fits": LocalSteps(1, outer_momentum="auto", outer_lr=1),
    "with moments": LocalSteps(2, moments_every=2),
}
LAYOUTS = [("III", 2), ("INI", 2), ("NNN", 2), ("III", 1)]


def resumed(adapter: Adapter, strategy: Strategy, optimizer: str, path: str, codecs_last: bool, trained: bool) -> None:
    """In a worker: a training that is saved and goes on, and one that goes on from there, are the same on each node."""
    case = Case(steps=4, micro_batches=2)
    first, second = adapter.make(case, strategy), adapter.make(case, strategy)
    optimizers = [models.make_optimizer(optimizer, model.parameters()) for model in (first, second)]
    train(adapter, first, case, optimizer=optimizers[0])
    save(first, optimizers[0], CodecState(first, optimizers[0]), path)
    expected = train(adapter, first, case, optimizer=optimizers[0], first_step=4)
    if trained:
        train(adapter, second, Case(steps=3), optimizer=optimizers[1], first_step=50)
    codecs = CodecState(second, [optimizers[1]])
    load(second, optimizers[1], None if codecs_last else codecs, path)
    if codecs_last:
        dcp.load({"codecs": codecs}, checkpoint_id=path)
    assert train(adapter, second, case, optimizer=optimizers[1], first_step=4) == expected
    assert models.distance(adapter.full_weights(second), adapter.full_weights(first)) == 0
    for model in (first, second):
        exchange_weights(model)
    assert models.distance(adapter.full_weights(second), adapter.full_weights(first)) == 0


@over_pairs(
    adapter=ADAPTERS,
    config=CONFIGS,
    layout=LAYOUTS,
    optimizer=["sgd", "adamw-foreach"],
    codecs_last={"all at once": False, "codecs last": True},
    trained={"into a new model": False, "into one that has trained": True},
)
def test_a_training_resumes_bit_for_bit_on_every_node(
    pool: Callable[[int], Pool],
    tmp_path: Path,
    adapter: Adapter,
    config: LocalSteps,
    layout: tuple[str, int],
    optimizer: str,
    codecs_last: bool,
    trained: bool,
) -> None:
    strategy = Strategy(layout[0], local_steps=config, gpus_per_node=layout[1])
    pool(4).run(resumed, adapter, strategy, optimizer, str(tmp_path / "checkpoint"), codecs_last, trained)


def resumed_without_own_parameters(adapter: Adapter, path: str) -> None:
    """In a worker: likewise, of a root whose parameters are all in other units, before whose first forward it loads."""
    strategy, losses = Strategy("III", local_steps=CONFIGS["int4"], gpus_per_node=2), []
    for resumes in (False, True):
        torch.manual_seed(0)
        layers = [adapter.wrap(nn.Linear(16, 16).to(models.device()), strategy) for _ in range(2)]
        model = adapter.wrap(nn.Sequential(*layers), strategy)
        optimizer = models.make_optimizer("adamw", model.parameters())
        for step in range(4 * resumes, 8):
            if resumes and step == 4:
                load(model, optimizer, CodecState(model, optimizer), path)
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            loss = model(x.to(models.device())).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if not resumes and step == 3:
                save(model, optimizer, CodecState(model, optimizer), path)
    assert losses[4:8] == losses[8:]


@over_adapters
def test_a_root_without_parameters_of_its_own_resumes_bit_for_bit(
    pool: Callable[[int], Pool], tmp_path: Path, adapter: Adapter
) -> None:
    pool(4).run(resumed_without_own_parameters, adapter, str(tmp_path / "checkpoint"))


def resumed_while_frozen(adapter: Adapter, path: str) -> None:
    """In a worker: a model that is frozen when it takes over, and trained after, goes on as the one that was saved."""
    strategy, losses = Strategy("III", local_steps=CONFIGS["int4"], gpus_per_node=2), []
    for frozen in (False, True):
        model = adapter.make(Case(), strategy)
        optimizer = models.make_optimizer("adamw", model.parameters())
        if frozen:
            load(model, optimizer, None, path)
            model.requires_grad_(False)
            dcp.load({"codecs": CodecState(model, optimizer)}, checkpoint_id=path)
            model.requires_grad_(True)
        else:
            train(adapter, model, Case(steps=4), optimizer=optimizer)
            save(model, optimizer, CodecState(model, optimizer), path)
        losses.append(train(adapter, model, Case(steps=3), optimizer=optimizer, first_step=4))
    assert losses[0] == losses[1]


@over_adapters
def test_a_model_that_is_frozen_when_it_takes_over_gets_optimizer_states_too(
    pool: Callable[[int], Pool], tmp_path: Path, adapter: Adapter
) -> None:
    pool(4).run(resumed_while_frozen, adapter, str(tmp_path / "checkpoint"))


def saved_agreed(adapter: Adapter, strategy: Strategy, path: str) -> dict[str, Tensor]:
    """In a worker: save the agreed weights after some steps; return them."""
    model = adapter.make(Case(), strategy)
    optimizer = models.make_optimizer("sgd", model.parameters())
    train(adapter, model, Case(steps=3), optimizer=optimizer)
    with agreed_weights(model):
        save(model, optimizer, CodecState(model, optimizer), path)
        return adapter.full_weights(model)


def loaded_elsewhere(adapter: Adapter, strategy: Strategy, path: str) -> tuple[dict[str, Tensor], list[Any], int]:
    """In a worker of another world: the weights, what is logged, and how many tensors differ between nodes after."""
    model = adapter.make(Case(), strategy)
    optimizer = models.make_optimizer("sgd", model.parameters())
    codecs = CodecState(model, optimizer)
    load(model, optimizer, None, path)
    with collected() as records:
        dcp.load({"codecs": codecs}, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=True))
    weights = adapter.full_weights(model)
    train(adapter, model, Case(steps=3), optimizer=optimizer, first_step=3)
    exchange_weights(model)
    return weights, records, differing_tensors(adapter, model)


@over_each(adapter=ADAPTERS, layout=[(2, 1), (4, 1)])
def test_another_layout_goes_on_from_the_agreed_weights(
    pool: Callable[[int], Pool], tmp_path: Path, adapter: Adapter, layout: tuple[int, int]
) -> None:
    config, path = LocalSteps(2), str(tmp_path / "checkpoint")
    saved = pool(4).run(saved_agreed, adapter, Strategy("III", local_steps=config, gpus_per_node=2), path)
    world, gpus = layout
    strategy = Strategy("III", local_steps=config, gpus_per_node=gpus)
    for rank, (weights, records, differing) in enumerate(pool(world).run(loaded_elsewhere, adapter, strategy, path)):
        assert models.distance(weights, saved[0]) == 0
        assert differing == 0
        warnings = [text for level, text in records if level == "WARNING"]
        assert len(warnings) == (rank == 0)
        assert all("local steps start over from the loaded weights" in text for text in warnings)


def shown(adapter: Adapter, strategy: Strategy) -> None:
    """In a worker: what the agreed weights are, and what it costs to see them."""
    model = adapter.make(Case(), strategy)
    optimizer = models.make_optimizer("sgd", model.parameters())
    seen = {}

    def agree(name: str) -> None:
        with agreed_weights(model):
            seen[name] = adapter.full_weights(model)

    train(adapter, model, Case(steps=2), optimizer=optimizer)
    agree("before")
    assert models.distance(seen["before"], on_cpu_initial()) == 0  # nothing has been exchanged yet
    exchange_weights(model)
    exchanged = adapter.full_weights(model)
    agree("after")
    assert models.distance(seen["after"], exchanged) == 0
    train(adapter, model, Case(steps=2), optimizer=optimizer, first_step=2)
    own = adapter.full_weights(model)
    tap, _ = sent_in(lambda: agree("later"), model, strategy.gpus_per_node or 1)
    assert tap.total("inter") == 0
    assert models.distance(seen["later"], exchanged) == 0
    assert models.distance(adapter.full_weights(model), own) == 0
    assert models.distance(own, exchanged) > 0


def on_cpu_initial() -> dict[str, Tensor]:
    """The weights of a net that is new."""
    return {name: p.detach().float().cpu() for name, p in models.make_net().named_parameters()}


@over_pairs(adapter=ADAPTERS, layout=LAYOUTS)
def test_agreed_weights_are_those_of_the_last_exchange(
    pool: Callable[[int], Pool], adapter: Adapter, layout: tuple[str, int]
) -> None:
    pool(4).run(shown, adapter, Strategy(layout[0], local_steps=LocalSteps(8), gpus_per_node=layout[1]))


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
def test_on_one_node_they_are_inactive_and_said_to_be(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    first, _ = pool(2).run(logged_on_one_node, adapter)
    [(level, line)] = first
    assert level == "WARNING"
    assert "NOT active: local steps, weights exchanged between nodes every 2 steps as int4(128)" in line
    assert line.endswith("(one node: nothing to exchange)")


def _exchange_of_uneven_steps(adapter: Adapter) -> None:
    model = adapter.make(Case(), Strategy.diloco(gpus_per_node=2))
    train(adapter, model, Case(steps=2 + dist.get_rank() // 2))
    exchange_weights(model)


def uneven(adapter: Adapter) -> tuple[str, str]:
    """In a worker: the error of ranks that have made different numbers of steps."""
    kind, message, _ = attempt((partial(_exchange_of_uneven_steps, adapter), ValueError, ""))
    return kind, message


@over_adapters
def test_nodes_that_made_different_numbers_of_steps_are_told(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for kind, message in pool(4).run(uneven, adapter):
        assert kind == "ValueError"
        assert "all 4 after step 2 on ranks 0-1, all 4 after step 3 on ranks 2-3" in message


def _without_optimizer(adapter: Adapter) -> None:
    CodecState(adapter.make(Case(), Strategy.diloco(gpus_per_node=1)))


def _before_the_first_forward(adapter: Adapter) -> None:
    exchange_weights(adapter.make(Case(), Strategy.diloco(gpus_per_node=1)))


def _agreed_without_local_steps(adapter: Adapter) -> None:
    with agreed_weights(adapter.make(Case(), Strategy("III", gpus_per_node=2))):
        pass


def _exchange_without_local_steps(adapter: Adapter) -> None:
    exchange_weights(adapter.make(Case(), Strategy("III", gpus_per_node=2)))


def refusals(adapter: Adapter) -> dict[str, Refusal]:
    """What is refused, under an adapter."""
    return {
        "no optimizer": (partial(_without_optimizer, adapter), ValueError, "pass CodecState(model, optimizer)"),
        "no forward": (partial(_before_the_first_forward, adapter), RuntimeError, "has not run a forward yet"),
        "nothing agreed": (partial(_agreed_without_local_steps, adapter), ValueError, "has a Strategy(local_steps=..."),
        "nothing to exchange": (
            partial(_exchange_without_local_steps, adapter),
            ValueError,
            "no part of this",
        ),
    }


def error_of(adapter: Adapter, name: str) -> tuple[str, str]:
    """In a worker: what a refusal says."""
    kind, message, _ = attempt(refusals(adapter)[name])
    return kind, message


@pytest.mark.parametrize("adapter", [Fsdp1(), Fsdp2()], ids=str)
@pytest.mark.parametrize("name", list(refusals(Fsdp2())))
def test_refused(pool: Callable[[int], Pool], adapter: Adapter, name: str) -> None:
    _, error, expected = refusals(adapter)[name]
    for kind, message in pool(2).run(error_of, adapter, name):
        assert kind == error.__name__, message
        assert expected in message
