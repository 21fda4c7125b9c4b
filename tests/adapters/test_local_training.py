"""Nodes that train on their own: beside training in step, and beside the algorithm by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import models
from harness.adapter import STOCK, Adapter, Case, Precision
from harness.covering import ADAPTERS, over_adapters, over_pairs
from harness.outer_fit import correlation_by_search, fitting_by_search
from harness.pool import Pool
from harness.training import differing_tensors, mean_loss, train
from local_nodes import LAYOUTS, sgd, strategy_of, this_node
from torch import Tensor

from fsdp_zpp import Int8, LocalSteps, LoCo, Strategy, TopK, exchange_weights

MEAN: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False, "codec": None}
"""An outer step that is the mean over nodes."""
SPARSE = LoCo(beta=0, decay=0.95, reset_every=0)
ROUNDING = 2e-5
SCHEDULES = {
    "one after the other": LocalSteps(3, codec=None, outer_momentum=0.9),
    "all at once": LocalSteps(3, codec=None, outer_momentum=0.9, spread=False, nesterov=False),
    "overlapped": LocalSteps(4, codec=None, outer_momentum=0.9, overlap=2, mix=0.5),
    "overlapped, all at once": LocalSteps(2, codec=None, outer_momentum=0.9, overlap=1, spread=False),
    "kept on the CPU": LocalSteps(3, codec=None, outer_momentum=0.9, overlap=1, offload=True),
    "kept apart": LocalSteps(3, codec=None, outer_momentum=0.9, mix=0),
    "momentum that fits": LocalSteps(2, codec=None, outer_momentum="auto", outer_lr=0.6),
    "momentum that fits, overlapped": LocalSteps(2, codec=None, outer_momentum="auto", overlap=1, nesterov=False),
    "after a start": LocalSteps(2, codec=None, outer_momentum=0.9, start=5),
    "after a start, all at once": LocalSteps(
        3, codec=None, outer_momentum=0.9, start=6, spread=False, nesterov=False, offload=True
    ),
    "ever rarer": LocalSteps(((0, 2), (3, 4)), codec=None, outer_momentum=0.9, overlap=1),
    "ever rarer after a start": LocalSteps(
        ((0, 1), (2, 2), (5, 3)), codec=None, outer_momentum=0.9, start=4, spread=False
    ),
}


def distance_from_steps_alike(adapter: Adapter, strategy: Strategy, case: Case) -> float:
    """In a worker: how far the weights of a training are from those of full sharding."""
    weights = []
    for each in (strategy, STOCK):
        model = adapter.make(case, each)
        train(adapter, model, case, optimizer=sgd(model))
        if each is strategy:
            exchange_weights(model)
        weights.append(adapter.full_weights(model))
    return models.distance(*weights)


@over_pairs(adapter=ADAPTERS, layout=LAYOUTS, micro_batches=[1, 2])
def test_exchanging_the_mean_in_every_step_is_training_in_step(
    pool: Callable[[int], Pool], adapter: Adapter, layout: tuple[str, int], micro_batches: int
) -> None:
    strategy = strategy_of(*layout, every=1, **MEAN)
    case = Case(steps=20, clip=None, micro_batches=micro_batches)
    assert max(pool(4).run(distance_from_steps_alike, adapter, strategy, case)) < ROUNDING


def distance_from_average_by_hand(adapter: Adapter, strategy: Strategy, case: Case) -> float:
    """In a worker: how far a training is from nodes that torch's own FSDP trains, averaged by hand."""
    assert strategy.local_steps is not None
    every, gpus = strategy.local_steps.every, strategy.gpus_per_node
    assert gpus is not None
    model = adapter.make(case, strategy)
    train(adapter, model, case, optimizer=models.make_optimizer("adamw", model.parameters()))
    exchange_weights(model)
    ours = adapter.full_weights(model)
    with this_node(gpus) as node:
        model = adapter.make(case, STOCK, group=node)

        def average(step: int, optimizer: Any) -> None:
            for parameter in model.parameters() if (step + 1) % every == 0 else ():
                local = adapter.local(parameter).data
                gathered: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(gathered, local.cpu())
                same_part = gathered[dist.get_rank() % gpus :: gpus]
                local.copy_(torch.stack(same_part).double().mean(0))

        train(adapter, model, case, average, models.make_optimizer("adamw", model.parameters()))
        return models.distance(ours, adapter.full_weights(model))


@over_pairs(adapter=ADAPTERS, gpus_per_node=[1, 2])
def test_nodes_are_averaged_as_by_hand(pool: Callable[[int], Pool], adapter: Adapter, gpus_per_node: int) -> None:
    strategy = strategy_of("III", gpus_per_node, every=3, spread=False, **MEAN)
    case = Case(steps=6, micro_batches=2, clip=0.5)  # of which each node clips its own gradients
    assert max(pool(4).run(distance_from_average_by_hand, adapter, strategy, case)) < 1e-4


class Simulation:
    """Four nodes of one GPU, all in this process, and what they exchange, by torch's own operators.

    Its fragments are those of a net whose blocks are units: the rest of it first.
    """

    def __init__(self, config: LocalSteps) -> None:
        self.config, self.step = config, 0
        self.nets = [models.make_net() for _ in range(4)]
        self.optimizers = [sgd(net) for net in self.nets]
        self.agreed = {name: p.detach().double().clone() for name, p in self.nets[0].named_parameters()}
        self.momentum = {name: torch.zeros_like(agreed) for name, agreed in self.agreed.items()}
        self.correlations: dict[tuple[str, ...], float] = {}
        self.on_their_way: list[tuple[int, list[str]]] = []
        blocks = [f"blocks.{index}." for index in range(len(self.nets[0].blocks))]
        rest = [name for name in self.agreed if not name.startswith("blocks.")]
        self.fragments = [rest, *([name for name in self.agreed if name.startswith(block)] for block in blocks)]

    @torch.no_grad()
    def send(self, names: list[str]) -> None:
        """The outer step of a fragment on the mean of changes."""
        held = {name: torch.stack([net.get_parameter(name).double() for net in self.nets]) for name in names}
        gradients = {name: self.agreed[name] - each.mean(0) for name, each in held.items()}
        coefficient, nesterov = self.fitted(gradients), self.config.nesterov
        for name, gradient in gradients.items():
            self.momentum[name] = coefficient * self.momentum[name] + gradient
            ahead = gradient + coefficient * self.momentum[name]
            self.agreed[name] = self.agreed[name] - self.config.outer_lr * (ahead if nesterov else self.momentum[name])

    def fitted(self, gradients: dict[str, Tensor]) -> float:
        """The momentum of an outer step, by the correlation that the one before has found."""
        if self.config.outer_momentum != "auto":
            return self.config.outer_momentum
        known = self.correlations.get(tuple(gradients), 1.0)
        coefficient = fitting_by_search(self.config.outer_lr, known, self.config.nesterov)
        along, norm = (
            sum((each[n] * g).sum().item() for n, g in gradients.items()) for each in (self.momentum, gradients)
        )
        if along:
            self.correlations[tuple(gradients)] = correlation_by_search(coefficient, along / norm)
        return coefficient

    @torch.no_grad()
    def receive(self, names: list[str], mix: float) -> None:
        """Every node goes on from a mixture."""
        for net in self.nets:
            for name in names:
                weight = net.get_parameter(name)
                weight.copy_(mix * self.agreed[name] + (1 - mix) * weight)

    def train(self, steps: int) -> None:
        """Steps of all nodes, and what is due after each."""
        for step in range(self.step, self.step + steps):
            for rank, net in enumerate(self.nets):
                models.loss_of(net, models.batch(step, 0, rank)).backward()
            if step < self.config.start:
                self.average_gradients()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.exchange(step + 1)
        self.step += steps

    def average_gradients(self) -> None:
        """What a synchronous step does."""
        for parameters in zip(*(net.parameters() for net in self.nets), strict=True):
            mean = torch.stack([p.grad.double() for p in parameters if p.grad is not None]).mean(0)
            for p in parameters:
                p.grad = mean.to(p.dtype)

    @torch.no_grad()
    def warm_up(self, names: list[str]) -> None:
        """The momentum of steps in which all nodes are alike."""
        for name in names:
            held = self.nets[0].get_parameter(name).double()
            self.momentum[name] = self.config.outer_momentum * self.momentum[name] + self.agreed[name] - held
            self.agreed[name] = held.clone()

    def exchange(self, step: int) -> None:
        """What is due after a step: each fragment every few steps, at an own time of these."""
        count, segments = len(self.fragments), self.config.every
        begin, every = (0, segments) if isinstance(segments, int) else [each for each in segments if each[0] < step][-1]
        self.arrive(step)
        for index, names in enumerate(self.fragments):
            own_time = begin + ((index + 1) * every // count if self.config.spread else every)
            if (step - own_time) % every == 0:
                if step <= self.config.start:
                    self.warm_up(names)
                    continue
                self.arrive(step, of=names)
                self.send(names)
                self.on_their_way.append((step + self.config.overlap, names))
        self.arrive(step)
        if step == self.config.start:
            self.agreed = {name: p.detach().double().clone() for name, p in self.nets[0].named_parameters()}

    def arrive(self, step: float, of: list[str] | None = None) -> None:
        """Receive what has arrived by a step, or a fragment that is sent once more."""
        arriving = [each for each in self.on_their_way if each[0] <= step or each[1] is of]
        for _, names in arriving:
            self.receive(names, self.config.mix)
        self.on_their_way = [each for each in self.on_their_way if each not in arriving]

    def exchange_all(self) -> None:
        """The last exchange."""
        self.arrive(float("inf"))
        for names in self.fragments:
            self.send(names)
            self.receive(names, 1.0)

    def weights(self, rank: int) -> dict[str, Tensor]:
        """Of a node."""
        return {name: p.detach().float().cpu() for name, p in self.nets[rank].named_parameters()}


def distances_from_simulation(adapter: Adapter, config: LocalSteps, steps: int) -> tuple[float, float]:
    """In a worker: how far this node's weights are from the simulated, when it is about to step, and in the end."""
    model = adapter.make(Case(), Strategy("III", local_steps=config, gpus_per_node=1))
    simulation = Simulation(config)
    train(adapter, model, Case(steps=steps, clip=None), optimizer=sgd(model))
    simulation.train(steps)
    # Nodes exchange what is due before a forward; this one changes nothing else.
    models.loss_of(model, models.batch(0, 0))
    before = models.distance(adapter.full_weights(model), simulation.weights(dist.get_rank()))
    exchange_weights(model)
    simulation.exchange_all()
    return before, models.distance(adapter.full_weights(model), simulation.weights(dist.get_rank()))


@over_pairs(adapter=ADAPTERS, schedule=SCHEDULES)
def test_nodes_train_as_simulated(pool: Callable[[int], Pool], adapter: Adapter, schedule: LocalSteps) -> None:
    for distances in pool(4).run(distances_from_simulation, adapter, schedule, 9):
        assert max(distances) < ROUNDING


def differing_weights(adapter: Adapter, strategy: Strategy, case: Case) -> tuple[int, int]:
    """In a worker: tensors in which nodes differ, before the last exchange and after it."""
    model = adapter.make(case, strategy)
    train(adapter, model, case)
    found = []
    for _ in range(2):
        found.append(differing_tensors(adapter, model))
        exchange_weights(model)
    return found[0], found[1]


@over_pairs(
    adapter=ADAPTERS,
    layout=LAYOUTS,
    config=[
        LocalSteps(2),
        LocalSteps(3, codec=Int8(64), overlap=1),
        LocalSteps(2, error_feedback=LoCo()),
        LocalSteps(1, outer_momentum="auto"),
        LocalSteps(2, codec=TopK(), error_feedback=SPARSE),
    ],
    precision=[None, Precision(torch.bfloat16, torch.float32)],
)
def test_nodes_are_equal_bit_for_bit_after_an_exchange_of_all(
    pool: Callable[[int], Pool], adapter: Adapter, layout: tuple[str, int], config: LocalSteps, precision: Precision
) -> None:
    strategy = Strategy(layout[0], local_steps=config, gpus_per_node=layout[1])
    for before, after in pool(4).run(differing_weights, adapter, strategy, Case(steps=4, precision=precision)):
        assert before > 0
        assert after == 0


def losses_of_sparse_exchanges(adapter: Adapter, gpus_per_node: int) -> tuple[float, ...]:
    """In a worker: losses before training, and with what nodes agreed on if all changes or the largest are sent."""
    case, losses = Case(steps=12), []
    plain: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False}
    for codec, feedback in ((None, None), (TopK(0.05, 2, 256), SPARSE)):
        config = LocalSteps(2, codec=codec, error_feedback=feedback, **plain)
        model = adapter.make(case, Strategy("III", local_steps=config, gpus_per_node=gpus_per_node))
        losses.append(mean_loss(model, 0))
        train(adapter, model, case)
        exchange_weights(model)
        losses.append(mean_loss(model, 0))
    return losses[0], losses[1], losses[3]


@over_adapters
def test_it_trains_on_the_largest_changes_alone(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for before, all_changes, largest in pool(4).run(losses_of_sparse_exchanges, adapter, 2):
        # Most of the way that training gets which exchanges all changes.
        assert before - largest > 0.5 * (before - all_changes) > 0
