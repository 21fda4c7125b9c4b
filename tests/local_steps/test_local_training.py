"""Nodes that train on their own: beside a simulation of the algorithm, step by step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter, Case, Precision
from harness.covering import ADAPTERS, over_each
from harness.local_nodes import (
    HEAD,
    LAYOUTS,
    ON_OTHER_NODES,
    ONE_BLOCK,
    TRAINED,
    set_trained,
    sgd,
    strategy_of,
    this_node,
)
from harness.messages import collected
from harness.pool import Pools, device_type
from harness.training import differing_tensors, scaled_steps, train
from harness.wiretap import sent_in
from top_k_codec import TopK
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from fsdp_zpp import Int4, Int8, LocalSteps, LoCo, Strategy, agreed_weights, exchange_weights, traffic

Named = dict[str, Tensor]
STEPS = 8
ROUNDING = 2e-5
PLAIN: dict[str, Any] = {"codec": None, "outer_momentum": 0.9}
SCHEDULES = {
    "one after the other": LocalSteps(3, **PLAIN),
    "overlapped": LocalSteps(4, **PLAIN, overlap=2, mix=0.5),
    "kept on the CPU": LocalSteps(3, **PLAIN, overlap=1, offload=True),
    "kept apart": LocalSteps(3, **PLAIN, mix=0),
    "momentum that fits": LocalSteps(2, codec=None, outer_momentum="auto", outer_lr=0.6),
    "momentum that fits, overlapped": LocalSteps(2, codec=None, outer_momentum="auto", overlap=1),
    "after a start, all at once": LocalSteps(3, **PLAIN, start=4, spread=False, offload=True),
    "at once after a start": LocalSteps(3, **PLAIN, start=4, spread=False),
}
CODED: dict[str, dict[str, Any]] = {
    "int4": {"local_steps": LocalSteps(3, codec=Int4(32))},
    "int8, on its way": {"local_steps": LocalSteps(3, codec=Int8(32), overlap=1, spread=False)},
    "with errors": {"local_steps": LocalSteps(2, error_feedback=LoCo())},
    "the largest": {"local_steps": LocalSteps(2, codec=TopK(), error_feedback=LoCo(beta=0, decay=0.95, reset_every=0))},
    "after a start": {
        "local_steps": LocalSteps(2, outer_momentum=0.9, start=1, error_feedback=LoCo()),
        "gradients": Int4(32),
    },
}
CASES = {
    "plain": Case(clip=None),
    "clipped micro-batches": Case(micro_batches=2, clip=0.5),  # of which each node clips its own gradients
    "partly frozen": Case(frozen=True, clip=None),
}
SCHEDULES_OF_SETS = {
    "each step": LocalSteps(1, **PLAIN),
    "every 2": LocalSteps(2, **PLAIN, spread=False),
    "on the way": LocalSteps(3, **PLAIN, spread=False, overlap=1),
    "mixed": LocalSteps(4, **PLAIN, spread=False, overlap=2, mix=0.5),
    "after a start": LocalSteps(3, **PLAIN, spread=False, start=4),
}

# The momentum of ``outer_momentum="auto"``, by a search that shares no formula with the library.
TARGET, MOST = 1.4, 0.9


def fitting_by_search(lr: float, correlation: float) -> float:
    """The largest momentum up to 0.9 whose settled gain is at most 1.4."""

    def gain(momentum: float) -> float:
        along = sum(momentum ** (k - 1) * abs(correlation) ** k for k in range(1, 400))
        return lr * (1 + momentum + momentum**2 * along)

    return MOST if gain(MOST) <= TARGET else _by_bisection(0.0, MOST, lambda momentum: gain(momentum) <= TARGET)


def correlation_by_search(momentum: float, along: float) -> float:
    """The correlation at which the momentum kept, along a change, would settle at ``along``."""
    return _by_bisection(-1.0, 1.0, lambda at: sum(momentum ** (k - 1) * at**k for k in range(1, 400)) < along)


def _by_bisection(low: float, high: float, is_above: Callable[[float], bool]) -> float:
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if is_above(middle) else (low, middle)
    return (low + high) / 2


class Simulation:
    """All nodes in one process, each with a net that is not sharded, and exchanges by torch's own operators.

    Each step trains what ``trained`` names in ``TRAINED``, or all that is not frozen.
    """

    def __init__(self, config: LocalSteps, case: Case, gpus: int, trained: str | None) -> None:
        self.config, self.case, self.gpus, self.trained = config, case, gpus, trained
        count = dist.get_world_size() // gpus
        self.nets = [models.make_net(frozen=case.frozen, **dict(case.model)) for _ in range(count)]
        self.optimizers = [optimizer_of(net, trained) for net in self.nets]
        self.agreed = {name: p.detach().double().clone() for name, p in self.nets[0].named_parameters()}
        self.momentum = {name: torch.zeros_like(agreed) for name, agreed in self.agreed.items()}
        self.correlations: dict[tuple[str, ...], float] = {}
        self.changed: set[str] = set()  # since their last exchange
        self.sent: dict[str, float] = {}  # and after which step they arrive
        self.is_apart = config.start == 0
        blocks = [f"blocks.{index}." for index in range(len(self.nets[0].blocks))]
        rest = [name for name in self.agreed if not name.startswith("blocks.")]
        self.fragments = [rest, *([name for name in self.agreed if name.startswith(block)] for block in blocks)]

    def trained_in(self, step: int, node: int) -> set[str]:
        """The parameters that a node trains in a step."""
        if self.trained is None:
            return {name for name, p in self.nets[node].named_parameters() if p.requires_grad}
        return set(names_trained(self.trained, step, node))

    def train(self, step: int) -> None:
        """A step of all nodes."""
        for node, net in enumerate(self.nets):
            for rank in range(node * self.gpus, (node + 1) * self.gpus):
                for micro_batch in range(self.case.micro_batches):
                    loss = models.loss_of(net, models.batch(step, micro_batch, rank))
                    (loss / self.gpus / self.case.micro_batches).backward()
            names = self.trained_in(step, node)
            self.changed |= names
            for name, parameter in net.named_parameters():
                parameter.grad = parameter.grad if name in names else None
        if not self.is_apart:
            average([[p.grad for p in net.parameters() if p.grad is not None] for net in self.nets])
        for net, optimizer in zip(self.nets, self.optimizers, strict=True):
            if self.case.clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), self.case.clip)
            optimizer.step()
            optimizer.zero_grad()

    def exchange(self, step: int) -> int:
        """Make what is due after so many steps; the number of values exchanged."""
        config, due = self.config, self.due(step)
        if not self.is_apart:
            if step <= config.start:
                self.warm_up({name for fragment in due for name in fragment} & self.changed)
            if step == config.start:
                self.agreed, self.changed, self.is_apart = self.weights(0, torch.float64), set(), True
            return 0
        self.receive(step, lambda name: self.sent[name] <= step)
        sent = []
        for fragment in due:
            self.receive(step, lambda name: name in fragment)  # noqa: B023
            sent += self.send([name for name in fragment if name in self.changed], step + config.overlap)
        self.receive(step, lambda name: self.sent[name] <= step)
        return sum(self.agreed[name].numel() for name in sent)

    def due(self, step: int) -> list[list[str]]:
        """Each fragment that is trained every few steps, at an own time of these."""
        every = self.config.every
        active = [each for each in self.fragments if self.trained or each[0] in self.trained_in(0, 0)]
        times = [(at + 1) * every // len(active) if self.config.spread else every for at in range(len(active))]
        return [each for each, time in zip(active, times, strict=True) if step and (step - time) % every == 0]

    @torch.no_grad()
    def warm_up(self, names: set[str]) -> None:
        """The momentum of steps in which all nodes are alike."""
        for name in names:
            held = self.nets[0].get_parameter(name).double()
            self.momentum[name] = self.config.outer_momentum * self.momentum[name] + self.agreed[name] - held
            self.agreed[name] = held.clone()
        self.changed -= names

    @torch.no_grad()
    def send(self, names: list[str], arrives: float) -> list[str]:
        """The outer step of a fragment on the mean of changes."""
        held = {name: torch.stack([net.get_parameter(name).double() for net in self.nets]) for name in names}
        gradients = {name: self.agreed[name] - each.mean(0) for name, each in held.items()}
        coefficient = self.fitted(gradients)
        for name, gradient in gradients.items():
            self.momentum[name] = coefficient * self.momentum[name] + gradient
            ahead = gradient + coefficient * self.momentum[name]
            self.agreed[name] = self.agreed[name] - self.config.outer_lr * ahead
            self.sent[name] = arrives
        self.changed -= set(names)
        return names

    def fitted(self, gradients: Named) -> float:
        """The momentum of an outer step, by the correlation that the one before has found."""
        if self.config.outer_momentum != "auto":
            return self.config.outer_momentum
        known = self.correlations.get(tuple(gradients), 1.0)
        coefficient = fitting_by_search(self.config.outer_lr, known)
        along, norm = (
            sum((each[n] * g).sum().item() for n, g in gradients.items()) for each in (self.momentum, gradients)
        )
        if along:
            self.correlations[tuple(gradients)] = correlation_by_search(coefficient, along / norm)
        return coefficient

    @torch.no_grad()
    def receive(self, step: int, which: Callable[[str], bool], mix: float | None = None) -> None:
        """Every node goes on from a mixture, but for what it does not train any more: that would be left to differ."""
        mix = self.config.mix if mix is None else mix
        for name in [name for name in self.sent if which(name)]:
            for node, net in enumerate(self.nets):
                share = mix if name in self.trained_in(step, node) else 1.0
                weight = net.get_parameter(name)
                weight.copy_(share * self.agreed[name] + (1 - share) * weight)
                self.changed |= {name} if share != 1 else set()
            del self.sent[name]

    def finish(self, step: int) -> None:
        """Exchange all that was trained."""
        self.receive(step, lambda name: True)
        for fragment in self.fragments:
            self.send([name for name in fragment if name in self.changed], step)
        self.receive(step, lambda name: True, mix=1.0)

    def weights(self, node: int, dtype: torch.dtype = torch.float32) -> Named:
        """The weights of a node, by name."""
        return {name: p.detach().to(dtype, copy=True) for name, p in self.nets[node].named_parameters()}

    @property
    def shown(self) -> Named:
        """The agreed weights."""
        return {name: w.float() for name, w in (self.agreed if self.is_apart else self.weights(0)).items()}


def average(of_nodes: list[list[Tensor]]) -> None:
    """Give all nodes the mean of each tensor."""
    for tensors in zip(*of_nodes, strict=True):
        mean = torch.stack([each.double() for each in tensors]).mean(0)
        for each in tensors:
            each.copy_(mean)


def optimizer_of(model: nn.Module, trained: str | None) -> torch.optim.Optimizer:
    """An optimizer with momentum, which nodes keep apart; but it would move what was only just frozen."""
    return models.make_optimizer("sgd", model.parameters()) if trained is None else sgd(model)


def names_trained(trained: str, step: int, node: int) -> Collection[str]:
    steps = (ON_OTHER_NODES if node and trained in ON_OTHER_NODES else TRAINED)[trained]
    return steps[min(step, len(steps) - 1)]


def beside_simulation(
    adapter: Adapter, strategy: Strategy, case: Case, trained: str | None = None, is_exact: bool = True
) -> None:
    """In a worker: train beside the simulation; nodes send and, if it is exact, hold what it does after each step."""
    config = strategy.local_steps
    assert config is not None
    gpus, are_moving = strategy.gpus_per_node or 1, False
    model, node = adapter.make(case, strategy), dist.get_rank() // gpus
    optimizer = optimizer_of(model, trained)
    simulation = Simulation(config, case, gpus, trained)

    def compare(simulated: Named) -> None:
        distance = models.distance(adapter.full_weights(model), {name: each.cpu() for name, each in simulated.items()})
        assert not is_exact or distance < ROUNDING

    def look() -> None:
        with agreed_weights(model):
            compare(simulation.shown)
        if not simulation.is_apart:
            exchange_weights(model)  # nodes are alike
        if trained is None:  # FSDP1 lets nobody freeze what a forward has left unsharded
            with torch.no_grad():
                models.loss_of(model, models.batch(99, 0))

    for step in range(STEPS):
        if trained is not None:
            set_trained(model, names_trained(trained, step, node))
        exchanged = simulation.exchange(step) if step else 0
        one_step = partial(train, adapter, model, replace(case, steps=1), optimizer=optimizer, first_step=step)
        tap, counted = sent_in(one_step, model, gpus)
        assert counted["gather"]["inter"] + counted["reduce"]["inter"] == tap.total("inter")
        if simulation.is_apart:
            check_sent(tap.total("inter"), exchanged, config, gpus)
            are_moving |= exchanged > 0
        simulation.train(step)
        compare(simulation.weights(node))
        assert sent_in(look, model, gpus)[0].total("inter") == 0
    assert are_moving
    assert differing_tensors(adapter, model) > 0
    exchange_weights(model)
    simulation.finish(STEPS - 1)
    compare(simulation.weights(node))
    assert differing_tensors(adapter, model) == 0


def check_sent(by_this_rank: int, exchanged: int, config: LocalSteps, gpus: int) -> None:
    """All ranks together send as many bytes as so many values take. Collective."""
    total = torch.tensor(by_this_rank, device=models.device())
    dist.all_reduce(total)
    assert (total > 0) == (exchanged > 0)
    if isinstance(config.codec, TopK):
        return
    # Each node sends the others their chunks of the change, and its chunk of the updates to each of them.
    values = 2 * exchanged * (4 // gpus - 1)
    width = 4.0 if config.codec is None else config.codec.nbytes(2**20) / 2**20
    # Odd shapes pad chunks and blocks.
    assert values * width * 0.99 <= total <= values * width * (1.05 if config.codec is None else 1.25)


@over_each(adapter=ADAPTERS, layout=LAYOUTS, schedule=SCHEDULES, case=CASES)
def test_nodes_train_and_send_as_simulated(
    pool: Pools, adapter: Adapter, layout: tuple[str, int], schedule: LocalSteps, case: Case
) -> None:
    strategy = Strategy(layout[0], local_steps=schedule, gpus_per_node=layout[1])
    pool(4).run(beside_simulation, adapter, strategy, case)


PRECISIONS = {"bf16": Precision(torch.bfloat16, torch.float32), "fp32": None}


@over_each(rest=False, adapter=ADAPTERS, layout=LAYOUTS[::-1], coded=CODED, precision=PRECISIONS)
def test_coded_exchanges_of_all_leave_nodes_equal_bit_for_bit(
    pool: Pools, adapter: Adapter, layout: tuple[str, int], coded: dict[str, Any], precision: Precision | None
) -> None:
    strategy = Strategy(layout[0], gpus_per_node=layout[1], **coded)
    pool(4).run(beside_simulation, adapter, strategy, Case(precision=precision), None, False)


@over_each(rest=False, adapter=ADAPTERS, layout=LAYOUTS[1:5], schedule=SCHEDULES_OF_SETS, trained=list(TRAINED))
def test_parameters_are_exchanged_once_after_any_node_has_trained_them(
    pool: Pools, adapter: Adapter, layout: tuple[str, int], schedule: LocalSteps, trained: str
) -> None:
    strategy = Strategy(layout[0], local_steps=schedule, gpus_per_node=layout[1])
    pool(4).run(beside_simulation, adapter, strategy, ONE_BLOCK, trained)


def left_different(adapter: Adapter) -> int:
    """In a worker: tensors in which nodes differ after a block was due while it was on its way."""
    strategy = Strategy("III", local_steps=LocalSteps(8, **PLAIN, overlap=7), gpus_per_node=2)
    case = Case(model=(("blocks", 3),), clip=None, steps=1)
    model = adapter.make(case, strategy)
    optimizer = sgd(model)
    first, second, third = ({f"blocks.{i}.{each}.weight" for each in ("up", "down")} for i in range(3))
    # The second is sent after step 8, to arrive after 15; once the third takes part, it is due after 14. Part of it is
    # trained no more, so that nobody sends that again.
    frozen = {"blocks.1.up.weight"}
    sets = (
        [{HEAD, *first, *second}] * 8
        + [{HEAD, *first, *second} - frozen]
        + [{HEAD, *first, *second, *third} - frozen] * 6
    )
    for step, names in enumerate(sets):
        set_trained(model, names)
        train(adapter, model, case, optimizer=optimizer, first_step=step)
    exchange_weights(model)
    return differing_tensors(adapter, model)


@over_each(rest=False, adapter=ADAPTERS)
def test_a_block_that_is_due_while_it_is_on_its_way_arrives_first(pool: Pools, adapter: Adapter) -> None:
    assert pool(4).run(left_different, adapter) == [0] * 4


def exchanges_by(adapter: Adapter, kind: str) -> list[bool]:
    """In a worker: whether nodes exchange in each step, by optimizers of a kind, at a schedule of two steps."""
    model = adapter.make(Case(), strategy_of("III", 2, every=2, spread=False))
    parameters, sent = list(model.parameters()), []
    if kind == "several":
        optimizers: list[Any] = [torch.optim.SGD(half, lr=0.1) for half in (parameters[::2], parameters[1::2])]
    else:
        optimizers = [models.PlainSgd(model) if kind == "plain" else sgd(model)]
    with this_node(2) as node:
        scaler = ShardedGradScaler(
            device=device_type(), init_scale=2.0**10, process_group=node, enabled=kind == "scaler that skips"
        )

        def one_step(step: int) -> None:
            if scaler.is_enabled():
                scaled_steps(model, optimizers[0], scaler, [-1 if step == 2 else step])
                return
            models.loss_of(model, models.batch(step, 0)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        for step in range(6):
            sent.append(sent_in(partial(one_step, step), model, 2)[0].total("inter") > 0)
        has_skipped = scaler.is_enabled() and scaler.get_scale() < 2.0**10
        assert has_skipped == (kind == "scaler that skips" and dist.get_rank() < 2)
    exchange_weights(model)
    return sent


@over_each(adapter=ADAPTERS, kind=["several", "plain", "scaler that skips"])
def test_a_step_counts_once_by_several_or_unknown_optimizers_and_where_one_node_skips_it(
    pool: Pools, adapter: Adapter, kind: str
) -> None:
    assert pool(4).run(exchanges_by, adapter, kind) == [[False, False, True, False, True, False]] * 4


# ---- synchronous steps at the beginning

CODECS: dict[str, dict[str, Any]] = {
    "no codec": {},
    "int4": {"gradients": Int4(32)},
    "errors between nodes": {"gradients": Int4(32), "error_feedback": LoCo()},
    "errors on both hops": {"gradients": Int4(32), "intra_gradients": Int8(32), "error_feedback": LoCo(hops="both")},
}


def of_a_training(adapter: Adapter, strategy: Strategy, case: Case, is_divided: bool) -> tuple[list[Any], list[Named]]:
    """In a worker: the losses and the bytes of a training after which ranks are alike, and its weights in each step."""
    model = adapter.make(case, strategy)
    for module in model.modules() if is_divided else ():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(2.0)
    weights: list[Named] = []
    losses = train(adapter, model, case, lambda *_: weights.append(adapter.full_weights(model)))
    assert differing_tensors(adapter, model) == 0
    return [losses, {kind: dict(of_hop) for kind, of_hop in traffic(model).items()}], weights


def side_by_side(adapter: Adapter, strategy: Strategy, case: Case, is_divided: bool) -> None:
    """In a worker: all steps are synchronous, the last of which ends the start."""
    with_start = replace(strategy, local_steps=LocalSteps(2, start=case.steps))
    (expected, weights), (found, our_weights) = (
        of_a_training(adapter, each, case, is_divided) for each in (strategy, with_start)
    )
    assert found == expected
    assert len(weights) == len(our_weights) == case.steps
    assert max(map(models.distance, weights, our_weights)) == 0


@over_each(
    rest=False,
    adapter=ADAPTERS,
    layout=LAYOUTS,
    codecs=CODECS,
    case={
        "clipped": Case(),
        "micro-batches": Case(micro_batches=3, optimizer="adamw-foreach"),
        "scaler": Case(scaler=True, micro_batches=2, synced=True),
        "partly frozen": Case(frozen=True, clip=None),
        "bf16": Case(precision=Precision(torch.bfloat16, torch.float32), micro_batches=2),
    },
    is_divided={"": False, "divided by hand": True},  # which fully_shard alone can do
)
def test_the_start_is_the_strategy_without_local_steps(
    pool: Pools, adapter: Adapter, layout: tuple[str, int], codecs: dict[str, Any], case: Case, is_divided: bool
) -> None:
    case = replace(case, scaler=case.scaler and "error_feedback" not in codecs)  # which raises
    pool(4).run(side_by_side, adapter, Strategy(layout[0], gpus_per_node=layout[1], **codecs), case, is_divided)


# ---- outer steps that overshoot


class Valley(nn.Module):
    """Weights, and their loss: a slope, or a bowl."""

    def __init__(self, slope: float, curvature: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.slope, self.curvature = slope, curvature

    def forward(self, unused: Tensor) -> Tensor:
        return self.slope * self.weight.sum() + 0.5 * self.curvature * self.weight.square().sum()


SLOPE, BOWL = (1.0, 0.0), (0.0, 1.0)
"""Where changes are all alike, and where a step of a node is the last one that it needs."""
OUTER_STEPS: dict[str, tuple[LocalSteps, tuple[float, float], str]] = {
    "DiLoCo's": (
        LocalSteps(1, outer_momentum=0.9),
        SLOPE,
        "outer_momentum=0.9 or outer_lr=0.7, or pass outer_momentum='auto'",
    ),
    "large lr": (
        LocalSteps(1, outer_lr=2.1, outer_momentum=0.0),
        BOWL,
        "(now 2.10 times); lower outer_lr=2.1",
    ),
    "large lr, too large for auto": (
        LocalSteps(1, outer_lr=1.5, outer_momentum=0.5),
        SLOPE,
        "; lower outer_momentum=0.5 or outer_lr=1.5",
    ),
    "auto": (LocalSteps(1, outer_momentum="auto"), SLOPE, ""),
    "low lr": (LocalSteps(1, outer_lr=0.7, outer_momentum=0.1), BOWL, ""),
}
"""Local steps, the loss, and a part of the warning if they overshoot."""


def warned_of(adapter: Adapter, config: LocalSteps, shape: tuple[float, float]) -> list[str]:
    """In a worker: what is said of 15 outer steps."""
    model: Any = adapter.wrap(Valley(*shape).to(models.device()), Strategy("III", local_steps=config, gpus_per_node=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.ones(1, device=models.device())  # for torch 2.11, which on GPUs can't call modules without an input
    with collected() as records:
        for _ in range(16):
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        model(x)
    return [text for level, text in records if level == "WARNING"]


@over_each(adapter=ADAPTERS, name=list(OUTER_STEPS))
def test_outer_steps_that_overshoot_are_warned_of_once(pool: Pools, adapter: Adapter, name: str) -> None:
    config, shape, remedy = OUTER_STEPS[name]
    warnings, *others = pool(4).run(warned_of, adapter, config, shape)
    assert others == [[]] * 3
    assert len(warnings) == (remedy != "")
    for text in warnings:
        assert "outer steps overshoot: in 5 exchanges in a row" in text
        assert remedy in text
        assert ("'auto'" in text) == (name == "DiLoCo's")
