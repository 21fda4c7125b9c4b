"""Local steps when what is trained changes: whatever was trained is exchanged once, whatever is trained by then."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter, original_name
from harness.covering import ADAPTERS, over_adapters, over_pairs
from harness.fsdp1 import Fsdp1
from harness.fsdp2 import Fsdp2
from harness.pool import Pool
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from fsdp_zpp import (
    CodecState,
    Int4,
    LocalSteps,
    LoCo,
    Strategy,
    agreed_weights,
    exchange_weights,
    invalidate,
)

GPUS = 2
STEPS = 8
A, B, HEAD = "0.a.weight", "0.b.weight", "1.weight"
TRAINED: dict[str, list[Sequence[str]]] = {
    "a, then b": [(A, HEAD)] * 3 + [(B, HEAD)] * 5,
    "a, then nothing of the block": [(A, HEAD)] * 3 + [(HEAD,)] * 5,
    "a, then both": [(A, HEAD)] * 3 + [(A, B, HEAD)] * 5,
    "both, then b": [(A, B, HEAD)] * 4 + [(B, HEAD)] * 4,
    "a and again": [(A, HEAD)] * 2 + [(HEAD,)] * 3 + [(A, HEAD)] * 3,
    "turns": [(A, HEAD), (B, HEAD)] * 4,
}
"""The parameters that are trained in each step."""
SCHEDULES = {
    "each step": LocalSteps(1, codec=None, outer_momentum=0.9),
    "every 2": LocalSteps(2, codec=None, outer_momentum=0.9, spread=False),
    "on the way": LocalSteps(3, codec=None, outer_momentum=0.9, spread=False, overlap=1),
    "mixed": LocalSteps(4, codec=None, outer_momentum=0.9, spread=False, overlap=2, mix=0.5),
}


class Block(nn.Module):
    """Two parameters of one size in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


def make_net() -> nn.Sequential:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.Linear(6, 3, bias=False)).to(models.device())


def batch(step: int) -> Tensor:
    """The inputs of a step, other ones on each node."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank() // GPUS)
    return torch.randn(4, 6, generator=generator).to(models.device())


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, trained: Sequence[str]) -> None:
    """One step, in which some parameters are trained."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(original_name(name) in trained)
    model(batch(step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def make_model(adapter: Adapter, strategy: Strategy) -> nn.Module:
    """The net in two units."""
    net = make_net()
    net[0] = adapter.wrap(net[0], strategy)
    model: nn.Module = adapter.wrap(net, strategy)
    return model


def all_hold(weights: dict[str, Tensor]) -> bool:
    """In a worker: whether all ranks have the same ones. Collective."""
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, weights)
    return all(torch.equal(other[name], weights[name]) for other in every for name in weights)


class Simulation:
    """This node's net, not sharded, and each parameter's exchanges by themselves."""

    def __init__(self, config: LocalSteps) -> None:
        self.config, self.net = config, make_net()
        self.parameters = dict(self.net.named_parameters())
        self.agreed = {name: p.detach().double().clone() for name, p in self.parameters.items()}
        self.momentum = {name: torch.zeros_like(w) for name, w in self.agreed.items()}
        self.changed: set[str] = set()
        self.sent: dict[str, int] = {}

    @torch.no_grad()
    def send(self, names: set[str], arrives: int) -> None:
        """Average what some parameters have changed, and make the outer step."""
        config = self.config
        for name in sorted(names):
            change = self.agreed[name] - self.parameters[name].double()
            dist.all_reduce(change)
            change /= dist.get_world_size()
            momentum = self.momentum[name].mul_(config.outer_momentum).add_(change)
            self.agreed[name] -= config.outer_lr * (change + config.outer_momentum * momentum)
            self.sent[name] = arrives
        self.changed -= names

    @torch.no_grad()
    def receive(self, step: int, trained: Sequence[str]) -> None:
        """Go on from what arrives after a step, mixed only with what is trained still."""
        for name in [name for name, arrives in self.sent.items() if arrives <= step]:
            weight = self.parameters[name]
            mix = self.config.mix if name in trained else 1.0
            weight.copy_(weight.double().lerp(self.agreed[name], mix))
            del self.sent[name]

    def train(self, trained: list[Sequence[str]]) -> None:
        """All steps, and an exchange of everything in the end."""
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        for step, names in enumerate(trained, 1):
            step_of(self.net, optimizer, step, names)
            self.changed |= set(names)
            if step == len(trained):  # what is due now is due before the next forward
                break
            self.receive(step, trained[step])
            if step % self.config.every == 0:
                self.send(set(self.changed), step + self.config.overlap)
                self.receive(step, trained[step])
        self.receive(len(trained) + self.config.every, trained[-1])
        self.send(self.changed | set(trained[-1]), 0)
        self.receive(0, ())


def distance_from_simulation(adapter: Adapter, scopes: str, schedule: str, trained: str) -> tuple[float, bool]:
    """In a worker: the distance from the simulation, and whether all nodes hold the same."""
    config = SCHEDULES[schedule]
    model = make_model(adapter, Strategy(scopes, gpus_per_node=GPUS, local_steps=config))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, names in enumerate(TRAINED[trained], 1):
        step_of(model, optimizer, step, names)
    exchange_weights(model)
    simulated = Simulation(config)
    simulated.train(TRAINED[trained])
    weights = adapter.full_weights(model)
    same = all_hold(weights)
    return models.distance(weights, {name: p.detach().cpu() for name, p in simulated.parameters.items()}), same


@over_pairs(
    rest=False, adapter=ADAPTERS, scopes=("III", "INI", "NNI", "NNN"), schedule=[*SCHEDULES], trained=[*TRAINED]
)
def test_parameters_are_exchanged_as_each_by_itself(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str, schedule: str, trained: str
) -> None:
    for distance, same in pool(4).run(distance_from_simulation, adapter, scopes, schedule, trained):
        assert distance < 1e-5
        assert same


def moved_while_frozen(adapter: Adapter) -> float:
    """In a worker: how far a parameter moves, encoded and with error feedback, after its last exchange."""
    config = LocalSteps(1, codec=Int4(32), error_feedback=LoCo(beta=0.0))
    model = make_model(adapter, Strategy("III", gpus_per_node=GPUS, local_steps=config))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        step_of(model, optimizer, step, (A, B, HEAD))
    step_of(model, optimizer, 4, (B, HEAD))  # before which the last step of A is exchanged
    before = adapter.full_weights(model)[A]
    for step in range(5, 9):
        step_of(model, optimizer, step, (B, HEAD))
    exchange_weights(model)
    return (adapter.full_weights(model)[A] - before).abs().max().item()


@over_adapters
def test_what_is_frozen_stays_where_its_last_exchange_left_it(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    assert max(pool(4).run(moved_while_frozen, adapter)) == 0


def resumed(adapter: Adapter, trained: str) -> bool:
    """In a worker: whether a training that goes on from a checkpoint equals one without."""
    config = LocalSteps(3, codec=Int4(32), error_feedback=LoCo(beta=0.0), overlap=1)
    strategy = Strategy("III", gpus_per_node=GPUS, local_steps=config)
    model = make_model(adapter, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, names in enumerate(TRAINED[trained][:5]):
        step_of(model, optimizer, step, names)
    saved = CodecState(model, optimizer).state_dict()
    again = make_model(adapter, strategy)
    other = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
    for name, parameter in again.named_parameters():
        parameter.requires_grad_(original_name(name) in TRAINED[trained][4])
    CodecState(again, other).load_state_dict(saved)
    set_model_state_dict(again, get_model_state_dict(model))
    weights = []
    for each, its_optimizer in ((model, optimizer), (again, other)):
        for step, names in enumerate(TRAINED[trained][5:], 5):
            step_of(each, its_optimizer, step, names)
        exchange_weights(each)
        weights.append(adapter.full_weights(each))
    return all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@over_pairs(rest=False, adapter=ADAPTERS, trained=[*TRAINED])
def test_it_goes_on_from_a_checkpoint(pool: Callable[[int], Pool], adapter: Adapter, trained: str) -> None:
    assert all(pool(4).run(resumed, adapter, trained))


class Replacing(torch.optim.SGD):
    """An optimizer that gives parameters other memory, as stock FSDP allows."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.data = parameter.data - 0.1 * parameter.grad


def with_optimizer(kind: type[torch.optim.SGD], gpus: int, every: int) -> dict[str, Tensor]:
    """In a worker: the weights after some steps under FullyShardedDataParallel."""
    model = make_model(Fsdp1(), Strategy("III", gpus_per_node=gpus, local_steps=LocalSteps(every, codec=None)))
    optimizer = kind(model.parameters(), lr=0.1)
    for step in range(5):
        step_of(model, optimizer, step, (A, B, HEAD))
    exchange_weights(model)
    return Fsdp1().full_weights(model)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("gpus", [1, GPUS])  # on a node of one, nothing is sharded
def test_replaced_parameters_are_exchanged(pool: Callable[[int], Pool], gpus: int, every: int) -> None:
    replaced, written = (pool(4).run(with_optimizer, kind, gpus, every) for kind in (Replacing, torch.optim.SGD))
    for ours, expected, first in zip(replaced, written, [replaced[0]] * 4, strict=True):
        assert models.distance(ours, expected) < 1e-6
        assert all(torch.equal(ours[name], first[name]) for name in ours)


def left_by_a_mixture(adapter: Adapter, scopes: str) -> bool:
    """In a worker: whether nodes agree on what was trained still when a mixture arrived, and never again."""
    strategy = Strategy(scopes, gpus_per_node=GPUS, local_steps=LocalSteps(1, codec=None, mix=0.5))
    model = make_model(adapter, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step_of(model, optimizer, 0, (A, B, HEAD))
    model(batch(1))  # before which nodes exchange
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(original_name(name) == HEAD)
    step_of(model, optimizer, 2, (HEAD,))
    exchange_weights(model)
    weights = adapter.full_weights(model)
    return all_hold(weights)


@pytest.mark.parametrize("scopes", ["III", "INI", "NNI", "NNN"])
def test_what_a_mixture_leaves_different_is_exchanged_again(pool: Callable[[int], Pool], scopes: str) -> None:
    """Under fully_shard alone: FullyShardedDataParallel lets nobody freeze what a forward left unsharded."""
    assert all(pool(4).run(left_by_a_mixture, Fsdp2(), scopes))


def shown_and_own(adapter: Adapter, scopes: str) -> tuple[bool, bool]:
    """In a worker: whether agreed weights show what a user wrote to frozen parameters, and what nodes agree on."""
    model = make_model(adapter, Strategy(scopes, gpus_per_node=GPUS, local_steps=LocalSteps(2, codec=None)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained = {A: (A, B, HEAD), B: (B, HEAD), HEAD: (HEAD,)}
    for step, names in enumerate((trained[A], trained[A], trained[B], trained[B], trained[HEAD])):
        step_of(model, optimizer, step, names)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if original_name(name) == A:
                parameter.fill_(7.0)
    invalidate(model)
    with agreed_weights(model):
        shown = adapter.full_weights(model)
    same = all_hold(shown)
    return bool((shown[A] == 7.0).all()), same


@over_pairs(rest=False, adapter=ADAPTERS, scopes=("III", "INI", "NNI", "NNN"))
def test_agreed_weights_are_those_of_what_is_exchanged(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str
) -> None:
    assert set(pool(4).run(shown_and_own, adapter, scopes)) == {(True, True)}


def trained_on_one_node(adapter: Adapter, scopes: str) -> tuple[bool, float]:
    """In a worker: whether nodes agree in the end, and how far what only the first one has trained has gone."""
    model = make_model(adapter, Strategy(scopes, gpus_per_node=GPUS, local_steps=LocalSteps(2, codec=None)))
    before = adapter.full_weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        names = (A, B, HEAD) if dist.get_rank() < GPUS or step == 0 else (B, HEAD)
        step_of(model, optimizer, step, names)
    exchange_weights(model)
    weights = adapter.full_weights(model)
    same = all_hold(weights)
    return same, (weights[A] - before[A]).norm().item()


@over_pairs(rest=False, adapter=ADAPTERS, scopes=("III", "INI", "NNI", "NNN"))
def test_nodes_exchange_what_any_of_them_has_trained(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str
) -> None:
    for same, distance in pool(4).run(trained_on_one_node, adapter, scopes):
        assert same
        assert distance > 0
