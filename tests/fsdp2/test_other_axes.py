"""Axes beside data parallelism: experts on a mesh or with a strategy of their own, and stages of a pipeline.

Weights are as by torch, or as on one rank, copies are equal, and bytes follow a formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Fsdp2
from harness.covering import over_each
from harness.messages import Refusal, Reply, assert_refused, attempt
from harness.pool import Pool, device_type
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_zpp import (
    CodecState,
    Int2Delta,
    Int4,
    Int4Delta,
    Int8,
    LocalSteps,
    LoCo,
    Strategy,
    clip_grad_norm_,
    exchange_weights,
    fully_shard,
    quantize_frozen_params,
    traffic,
)
from fsdp_zpp._torch_compat import major_minor
from fsdp_zpp.runtime.unit import StrategyUnit, named_units

WIDTH, HIDDEN, EXPERTS, MICRO_BATCHES, ROWS, STEPS, BYTES = 24, 96, 4, 2, 4, 2, 4
TWO: dict[str, Any] = {"gpus_per_node": 2}
Wrap = Callable[..., Any]
"""``fully_shard``, by a strategy or torch's own."""
needs_meshes = pytest.mark.skipif(
    not hasattr(_fsdp_common, "ShardPlacementResult"), reason="this torch has no mesh for a parameter"
)


# ---- a mixture, and how it is split and trained


class Experts(nn.Module):
    """Fused experts; with expert parallelism a rank computes with its own, for the tokens of all."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)
        self.ranks: DeviceMesh | None = None

    def spread(self, ranks: DeviceMesh, plain: bool = False) -> None:
        """Keep this rank's experts alone, as DTensors or as plain tensors."""
        self.ranks = ranks
        for name, parameter in list(self.named_parameters()):
            whole = distribute_tensor(parameter.detach(), ranks, [Shard(0)])
            setattr(self, name, nn.Parameter(whole.to_local() if plain else whole))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        if self.ranks is None:
            return self._mix(x, weights, up, down)
        group, place = self.ranks.get_group(), self.ranks.get_local_rank()
        x, weights = (all_gather_tensor_autograd(each, 0, group) for each in (x, weights))
        mixed = self._mix(x, weights.chunk(self.ranks.size(), 1)[place], up, down)
        return reduce_scatter_tensor_autograd(mixed, "sum", 0, group)

    @staticmethod
    def _mix(x: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return (weights.T.unsqueeze(-1) * (torch.tanh(x @ up) @ down)).sum(0)


class Mixture(nn.Module):
    """A norm, an MLP, a router and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(torch.tanh(self.up(h))) + self.experts(h, self.router(h).softmax(-1))


def mixtures(count: int) -> list[Mixture]:
    """Make the blocks that all trainings start from."""
    torch.manual_seed(0)
    return [Mixture().to(models.device()) for _ in range(count)]


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """Make an optimizer; its eps keeps a rounding error of a gradient near zero from becoming a whole step."""
    return torch.optim.AdamW(parameters, lr=3e-3, eps=1e-4, foreach=False)


def batch(step: int, rank: int, rows: int = MICRO_BATCHES * ROWS) -> tuple[Tensor, Tensor]:
    """Make inputs and targets of a data-parallel rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs, target = torch.randn(2, rows, WIDTH, generator=generator).to(models.device()).unbind()
    return inputs, target


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def by(strategy: Strategy) -> Wrap:
    return partial(fully_shard, strategy=strategy)


class Axis(NamedTuple):
    """A mesh of dimensions, of which all but ``tp`` have data of their own."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    sums: bool = False  # gradients are summed and losses divided, since experts have seen the tokens of all ranks


AXES = {
    "across": Axis(("efsdp", "ep"), (2, 2)),  # the same experts are on both nodes
    "within": Axis(("ep", "efsdp"), (2, 2)),
    "one mesh": Axis(("dp",), (4,)),
    "tp x ep": Axis(("efsdp", "ep", "tp"), (2, 2, 2), sums=True),
}


@cache  # DTensors remember meshes of these ranks, so that their groups must stay
def meshes(axis: Axis) -> tuple[DeviceMesh, DeviceMesh]:
    """In a worker: the mesh of an axis, and the 1-D one of its data-parallel ranks."""
    mesh = init_device_mesh(device_type(), axis.sizes, mesh_dim_names=axis.names)
    data = [name for name in axis.names if name != "tp"]
    return mesh, mesh[data[0]] if len(data) == 1 else mesh[tuple(data)]._flatten("_".join(data))


def on_their_mesh(block: Mixture, mesh: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    """Return the ``shard_placement_fn`` that shards experts over a mesh of their own."""
    info, experts = _fsdp_common.FSDPMeshInfo(mesh["efsdp"], shard_mesh_dim=0), set(block.experts.parameters())
    return lambda p: _fsdp_common.ShardPlacementResult(Shard(1), info) if p in experts else None


class Training:
    """Two mixtures on the mesh of an axis, sharded by ``wrap``."""

    def __init__(self, axis: Axis, wrap: Wrap) -> None:
        self.mesh, self.data = meshes(axis)
        self.model: Any = nn.Sequential(*mixtures(2))
        for block in self.model:
            if "tp" in axis.names:
                parallelize_module(block, self.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            own = {}
            if "ep" in axis.names:
                block.experts.spread(self.mesh["ep"])
                own = {"shard_placement_fn": on_their_mesh(block, self.mesh)}
            wrap(block, mesh=self.data, **own)
            if axis.sums:
                block.set_gradient_divide_factor(1.0)
                block.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        wrap(self.model, mesh=self.data)
        self.divisor = MICRO_BATCHES * (self.data.size() if axis.sums else 1)
        self.optimizer = optimizer_of(self.model.parameters())

    def step(self, step: int) -> list[float]:
        """Return the losses of two micro-batches."""
        losses: list[Tensor] = []
        parts = (each.chunk(MICRO_BATCHES) for each in batch(step, self.data.get_local_rank()))
        for i, (inputs, target) in enumerate(zip(*parts, strict=True)):
            self.model.set_requires_gradient_sync(i == MICRO_BATCHES - 1)
            losses.append(loss_of(self.model(inputs), target))
            (losses[-1] / self.divisor).backward()
        clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [loss.item() for loss in losses]

    def weights(self) -> Tensor:
        """Gather all weights, from this rank's own copies on other axes."""
        return torch.cat([_whole(p).flatten() for p in self.model.parameters()])

    def copies_differ(self) -> bool:
        """Tell whether this rank's weights are others than those of the first rank. Collective."""
        weights = self.weights()
        first = weights.clone()
        dist.broadcast(first, 0)
        return not torch.equal(first, weights)

    def shard_numel(self) -> int:
        """Count the values that this rank holds, rows of dense weights being rounded up."""
        return sum(
            p.to_local().numel() if p.device_mesh.ndim > 1 else -(-p.shape[0] // self.data.size()) * p[:1].numel()
            for p in self.model.parameters()
        )


def _whole(value: Any) -> Tensor:
    while isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach()


# ---- experts


@dataclass
class Outcome:
    """Observations of a rank, of a training by a strategy and of one by torch."""

    losses: list[float]  # by a strategy
    expected: list[float]  # by torch
    distance: float  # between the weights, relative to them
    sent: int  # bytes that were gathered between nodes
    once_a_step: int  # what they are if each shard crosses nodes once a step


@cache
def trained_by_torch(axis: Axis) -> tuple[list[float], Tensor]:
    """In a worker: losses and weights under torch's own ``fully_shard``."""
    training = Training(axis, torch_fully_shard)
    return [loss for step in range(STEPS) for loss in training.step(step)], training.weights()


def trained(axis: Axis, strategy: Strategy) -> Outcome:
    """In a worker: train by a strategy, which leaves copies equal, and by torch."""
    expected, theirs = trained_by_torch(axis)
    ours = Training(axis, by(strategy))
    losses = [loss for step in range(STEPS) for loss in ours.step(step)]
    distance, sent = float((ours.weights() - theirs).norm() / theirs.norm()), traffic(ours.model)["gather"]["inter"]
    assert not ours.copies_differ()
    return Outcome(losses, expected, distance, sent, STEPS * ours.shard_numel() * BYTES)


def outcomes_of(pool: Callable[[int], Pool], axis: str, strategy: Strategy) -> list[Outcome]:
    return pool(math.prod(AXES[axis].sizes)).run(trained, AXES[axis], replace(strategy, **TWO))


def check_equal(outcomes: list[Outcome]) -> None:
    """Check that a training was as by torch."""
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(outcome.expected, rel=1e-5)
        assert outcome.distance <= 1e-5


@needs_meshes
@pytest.mark.parametrize(
    ("axis", "levels"),
    [
        ("across", "IGG"),
        ("within", "III"),
        ("across", "NNN"),
        ("across", "IIG"),
        ("tp x ep", "NNG"),
        pytest.param("within", "GGG", marks=pytest.mark.wide),
        pytest.param("tp x ep", "III", marks=pytest.mark.wide),
    ],
)
def test_experts_on_a_mesh_of_their_own_train_as_with_torch(
    pool: Callable[[int], Pool], axis: str, levels: str
) -> None:
    outcomes = outcomes_of(pool, axis, Strategy(levels))
    check_equal(outcomes)
    for outcome in outcomes:
        if levels in ("IGG", "IIG", "NNG") and axis != "within":  # where experts do not cross nodes
            assert outcome.sent == outcome.once_a_step
        elif levels in ("III", "NNN"):
            assert outcome.sent == 0


CODED = {
    "delta": Strategy.zeropp(levels="IIG", weights=Int4Delta()),
    "LoCo": Strategy.loco(),
    "LoCo within nodes": Strategy("III", gradients=Int4(), error_feedback=LoCo()),
    "kept": Strategy("NNG", weights=Int8(64), gradients=Int4(32)),
    "of experts": Strategy.zeropp(overrides={"Experts": Strategy.zeropp(weights=Int2Delta())}),
}


@needs_meshes
@pytest.mark.parametrize(
    ("axis", "name"),
    [
        ("across", "of experts"),
        ("across", "kept"),
        ("tp x ep", "LoCo"),
        pytest.param("across", "LoCo within nodes", marks=pytest.mark.wide),
        pytest.param("tp x ep", "delta", marks=pytest.mark.wide),
    ],
)
def test_codecs_encode_experts_too(pool: Callable[[int], Pool], axis: str, name: str) -> None:
    for outcome in outcomes_of(pool, axis, CODED[name]):
        assert outcome.losses == pytest.approx(outcome.expected, rel=2e-2)
        assert outcome.distance > 1e-5


OVERRIDDEN = {
    "inside nodes": Strategy("IGG", overrides={"Experts": Strategy("III")}),
    "patterns": Strategy("III", overrides={"Exp*": Strategy("GGG"), "*": Strategy("NNN")}),
    "norms": Strategy("GGG", overrides={"Experts": Strategy("IGG"), "LayerNorm": Strategy("NNG")}),
    "nodes": Strategy("NNN", overrides={"Mixture": Strategy("IIG"), "Experts": Strategy("GGG", gpus_per_node=1)}),
}


@needs_meshes
@over_each(rest=False, strategy=OVERRIDDEN, axis=["across", "one mesh"])
def test_overrides_shard_by_other_scopes(pool: Callable[[int], Pool], strategy: Strategy, axis: str) -> None:
    check_equal(outcomes_of(pool, axis, strategy))


def resumed(strategy: Strategy) -> bool:
    """In a worker: whether a training goes on bit for bit with the codec state of all parts."""
    losses = []
    state: dict[str, Any] = {}
    weights: list[Tensor] = []
    for is_resumed in (False, True):
        training = Training(AXES["across"], by(strategy))
        training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
        if is_resumed:
            with torch.no_grad():
                for parameter, value in zip(training.model.parameters(), weights, strict=True):
                    parameter.to_local().copy_(value)
            CodecState(training.model).load_state_dict(state)
        else:
            training.step(0), training.step(1)
            weights = [p.detach().to_local().clone() for p in training.model.parameters()]
            state = CodecState(training.model).state_dict()
        losses.append(training.step(2) + training.step(3))
    return losses[0] == losses[1]


@needs_meshes
def test_codec_state_of_all_parts_is_saved(pool: Callable[[int], Pool]) -> None:
    strategy = Strategy.loco(weights=Int4Delta(), overrides={"Experts": Strategy.loco(gradients=Int4(32))}, **TWO)
    assert pool(4).run(resumed, strategy) == [True] * 4


def plain_mixture() -> tuple[Mixture, DeviceMesh]:
    """In a worker: a mixture with this rank's experts as plain tensors, and the mesh of two dimensions."""
    mesh, _ = meshes(AXES["across"])
    block = mixtures(1)[0]
    block.experts.spread(mesh["ep"], plain=True)
    return block, mesh


def error_of_frozen_experts(strategy: Strategy) -> tuple[float, list[str]]:
    """In a worker: how far an output is off once experts are quantized, and which parameters are left."""
    block, mesh = plain_mixture()
    inputs, _ = batch(0, dist.get_rank())
    expected = block(inputs)
    block.experts.requires_grad_(False)
    by(strategy)(block, shard_placement_fn=on_their_mesh(block, mesh))
    return float((block(inputs) - expected).detach().norm() / expected.detach().norm()), [
        name for name, _ in block.named_parameters()
    ]


@needs_meshes
def test_frozen_experts_are_quantized_over_their_mesh(pool: Callable[[int], Pool]) -> None:
    for error, names in pool(4).run(error_of_frozen_experts, Strategy("IGG", frozen=Int8(64), **TWO)):
        assert 0 < error <= 0.01
        assert not any("experts." in name for name in names)


def levels_of_a_list(order: tuple[int, int]) -> list[str]:
    """In a worker: the scopes of the units of a norm and a linear layer that are gathered together."""
    parts: list[nn.Module] = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]
    model = nn.ModuleList(parts).to(models.device())
    strategy = Strategy("IGG", overrides={"LayerNorm": Strategy("GGG")}, **TWO)
    fully_shard([parts[place] for place in order], strategy=strategy)
    units = [unit for unit in named_units(model) if isinstance(unit, StrategyUnit)]
    assert all(unit.sharded.numel() for unit in units)
    return sorted(unit.strategy.levels for unit in units)


@pytest.mark.skipif(major_minor(torch.__version__) < (2, 12), reason="this torch makes one group of a module")
def test_overrides_of_one_module_of_a_list_leave_the_others(pool: Callable[[int], Pool]) -> None:
    for order in ((0, 1), (1, 0)):
        assert pool(4).run(levels_of_a_list, order) == [["GGG", "IGG"]] * 4


def quantized_before() -> None:
    block, mesh = plain_mixture()
    block.experts.requires_grad_(False)
    quantize_frozen_params(block, Int8(64))
    block.experts.more = nn.Parameter(torch.zeros(2, 2, 2))
    fully_shard(block, strategy=Strategy.zeropp(**TWO), shard_placement_fn=on_their_mesh(block, mesh))


def in_two_ways() -> None:
    block, mesh = plain_mixture()
    place = on_their_mesh(block, mesh) if dist.get_rank() else lambda p: None
    fully_shard(block, strategy=Strategy.zeropp(**TWO), shard_placement_fn=place)


def over_other_ranks() -> None:
    block, _ = plain_mixture()
    mesh = init_device_mesh(device_type(), (4,), mesh_dim_names=("efsdp",))
    half = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
    fully_shard(block, mesh=half, strategy=Strategy.zeropp(**TWO), shard_placement_fn=on_their_mesh(block, mesh))


REFUSALS: dict[str, Refusal] = {
    "different on each rank": (in_two_ways, ValueError, "gave parameters other meshes or strategies than"),
    "a base from before": (quantized_before, ValueError, "pass frozen= to the strategies"),
    "ranks of unknown nodes": (over_other_ranks, ValueError, "leave gpus_per_node to torchrun, or give the overrides"),
}


def attempts() -> dict[str, Reply]:
    """In a worker: how each call is refused."""
    return {name: attempt(refusal) for name, refusal in REFUSALS.items()}


@needs_meshes
def test_meshes_that_can_not_be_are_refused_on_every_rank(pool: Callable[[int], Pool]) -> None:
    replies = pool(4).run(attempts)
    for name, refusal in REFUSALS.items():
        assert_refused([of_rank[name] for of_rank in replies], refusal)


# ---- nodes that train on their own

LOCAL = LocalSteps(2, codec=Int4(32), error_feedback=LoCo(dtype=Int8(128)), overlap=1)


def exchanged(local_steps: LocalSteps) -> tuple[bool, list[float]]:
    """In a worker: whether copies differ after a training and a last exchange, and the losses."""
    training = Training(AXES["tp x ep"], by(Strategy.diloco(local_steps=local_steps, **TWO)))
    losses = [loss for step in range(4) for loss in training.step(step)]
    exchange_weights(training.model)
    return training.copies_differ(), losses


@needs_meshes
def test_coded_exchanges_leave_all_copies_of_a_mixture_equal(pool: Callable[[int], Pool]) -> None:
    coded, exact = (pool(8).run(exchanged, each) for each in (LOCAL, replace(LOCAL, codec=None, error_feedback=None)))
    for (differ, losses), (_, expected) in zip(coded, exact, strict=True):
        assert not differ
        assert losses == pytest.approx(expected, rel=2e-2)
        assert losses != expected


# ---- pipelines of two stages or more, each of which trains on four data-parallel ranks

LAYERS, DATA_PARALLEL = 4, 4
STAGES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zbv": 2}
"""Schedules, and the stages that each rank has."""


@cache
def mesh_of_stages() -> DeviceMesh:
    """In a worker: the mesh of stages x data parallelism, whose groups all trainings share."""
    return init_device_mesh(device_type(), (2, DATA_PARALLEL), mesh_dim_names=("pp", "dp"))


class Pipeline:
    """In a worker: this rank's stages, sharded layer by layer, and the schedule that runs them."""

    def __init__(self, kind: str, strategy: Any) -> None:
        mesh, device = mesh_of_stages(), models.device()
        rank, self.rank = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
        stages = 2 * STAGES[kind]
        indices = [rank, stages - 1 - rank] if kind == "zbv" else [*range(rank, stages, 2)]
        self.first, self.last, size = 0 in indices, stages - 1 in indices, LAYERS // stages
        self.parts = {index: nn.Sequential(*mixtures(LAYERS)[index * size : (index + 1) * size]) for index in indices}
        for part in self.parts.values():
            # Layers that are units of their own get wrong gradients from torch 2.13 in zero-bubble schedules.
            for module in (part,) if kind == "zbv" else (*part, part):
                Fsdp2().apply(module, strategy, mesh=mesh["dp"])
        group = mesh["pp"].get_group()
        pieces: Any = [PipelineStage(part, index, stages, device, group=group) for index, part in self.parts.items()]
        looped: Any = ScheduleZBVZeroBubble if kind == "zbv" else ScheduleInterleaved1F1B
        single: Any = ScheduleGPipe if kind == "gpipe" else Schedule1F1B
        of_stages = (looped, pieces) if len(pieces) > 1 else (single, pieces[0])
        self.schedule = of_stages[0](of_stages[1], 4, loss_fn=loss_of)
        self.optimizer = optimizer_of([p for part in self.parts.values() for p in part.parameters()])

    def step(self, index: int) -> None:
        inputs, target = batch(index, self.rank)
        self.schedule.step(*([inputs] if self.first else []), **({"target": target} if self.last else {}))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        """Return this rank's part of the model, by names in the list of all layers. Collective."""
        found = {}
        for index, part in self.parts.items():
            for name, parameter in part.named_parameters():
                place, _, own = name.partition(".")
                found[f"{index * len(part) + int(place)}.{own}"] = _whole(parameter)
        return found

    def sent(self, kind: str) -> int:
        """Return the bytes of a kind that this rank has sent between nodes so far."""
        return sum(traffic(part)[kind]["inter"] for part in self.parts.values())


@cache
def trained_alone() -> dict[str, Tensor]:
    """Train all layers on this rank alone, on the batches of all data-parallel ranks."""
    layers = nn.Sequential(*mixtures(LAYERS))
    optimizer = optimizer_of(layers.parameters())
    for step in range(STEPS):
        for rank in range(DATA_PARALLEL):
            inputs, target = batch(step, rank)
            (loss_of(layers(inputs), target) / DATA_PARALLEL).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in layers.named_parameters()}


def pipelined(kind: str, strategy: Strategy) -> tuple[float, dict[str, int]]:
    """In a worker: how far weights are from those of a training on one rank, and what the last step has sent."""
    pipeline, sent = Pipeline(kind, strategy), {"gather": 0, "reduce": 0}
    for step in range(STEPS):
        before = {each: pipeline.sent(each) for each in sent}
        pipeline.step(step)
        sent = {each: pipeline.sent(each) - nbytes for each, nbytes in before.items()}
    distance = max(float((value - trained_alone()[name]).abs().max()) for name, value in pipeline.weights().items())
    return distance, sent


@over_each(rest=False, kind=list(STAGES), levels=["IIG", "IGG", "NNG", "III"])
def test_stages_train_as_one_rank_and_send_once_a_step(pool: Callable[[int], Pool], kind: str, levels: str) -> None:
    if kind == "zbv" and device_type() == "cpu" and major_minor(torch.__version__) < (2, 12):
        pytest.skip("in the first step, pipelines of this torch send to their own rank, which gloo can not")
    numel = LAYERS // 2 * sum(p.numel() for p in Mixture().parameters())  # of a rank's stages; rows divide by four
    for distance, sent in pool(8).run(pipelined, kind, Strategy(levels, **TWO)):
        assert distance <= 1e-6  # of weights of 0.3, after steps of 0.01
        if levels in ("IIG", "NNG"):
            assert sent == dict.fromkeys(("gather", "reduce"), numel // DATA_PARALLEL * BYTES)
        elif levels == "III":  # of its half a rank sends half to the other node, and then half of the sums
            assert sent == {"gather": 0, "reduce": 2 * numel // 4 * BYTES}
        elif (
            levels == "IGG" and kind == "1f1b"
        ):  # gradient scope G sends each micro-batch and what the schedule reduces
            assert sent["reduce"] == 5 * sent["gather"] == 5 * numel // DATA_PARALLEL * BYTES
