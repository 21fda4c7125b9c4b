"""Plans beside tensor, pipeline and expert parallelism: where ranks lie, what they have and send, reports."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from harness.models import device
from harness.pool import Pool, device_type
from harness.strategies import FOURTEEN, PARO
from hypothesis import example, given, settings, strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_zpp import Int4, Int8, fully_shard, plan, traffic
from fsdp_zpp.planner.cluster import Cluster
from fsdp_zpp.planner.memory import Memory, Volume
from fsdp_zpp.planner.model_size import Axes, ModelSize, Routing, Unit, module_size
from fsdp_zpp.planner.report import plan_to_json
from fsdp_zpp.strategy.error_feedback import Topology

GBPS = {"inter_gbps": 100, "intra_gbps": 2400}
CODECS: dict[str, Any] = {"weights": Int8(64), "gradients": Int4(32)}
MOE = ModelSize(
    (Unit(96, reshard_after_forward=False), Unit(640, count=4, expert_trainable=512)),
    idle_trainable=4 * 256,
    routing=Routing(8, 4),
)
"""96 elements in the root, and four layers of 128 dense elements and 512 in experts."""


# ---- what a rank has and sends


def _without_fixed(memory: Memory) -> list[int]:
    return [getattr(memory, name) for name in ("parameters", "shard", "optimizer", "gradients", "errors", "working")]


def test_tensor_parallelism_is_a_smaller_model_on_fewer_ranks() -> None:
    whole = ModelSize((Unit(640, 64, count=3), Unit(96, reshard_after_forward=False)))
    half = ModelSize((Unit(320, 32, count=3), Unit(48, reshard_after_forward=False)))
    work = {"micro_batches": 3, "tokens": 1000, "tflops": 100, **CODECS, **GBPS}
    beside, alone = plan(whole, nodes=4, gpus_per_node=8, tp=2, **work), plan(half, nodes=4, gpus_per_node=4, **work)
    for levels in FOURTEEN:
        assert beside[levels].strategy == alone[levels].strategy
        assert (beside[levels].volume, beside[levels].memory) == (alone[levels].volume, alone[levels].memory)
        assert beside[levels].time.computation == alone[levels].time.computation
        assert beside[levels].inter_node_bytes == 2 * alone[levels].inter_node_bytes  # of twice as many GPUs a node


@pytest.mark.parametrize("codecs", [{}, CODECS], ids=["plain", "encoded"])
def test_experts_are_a_model_of_their_own_on_their_ranks(codecs: dict[str, Any]) -> None:
    dense = ModelSize((Unit(48, reshard_after_forward=False), Unit(64, count=4)))
    experts = ModelSize((Unit(128, count=4),))
    work = {"micro_batches": 3, **codecs, **GBPS}
    made = plan(MOE, nodes=4, gpus_per_node=8, tp=2, ep=4, **work)
    of_dense, of_experts = (plan(size, nodes=4, gpus_per_node=n, **work) for size, n in ((dense, 4), (experts, 2)))
    assert [part.topology for part in made.parts] == [Topology(16, 4), Topology(8, 2)]
    for levels in FOURTEEN:
        found = made[levels]
        assert found.volume == of_dense[levels].volume + of_experts[levels].volume
        parts = zip(*(_without_fixed(each[levels].memory) for each in (of_dense, of_experts)), strict=True)
        assert _without_fixed(found.memory) == [sum(part) for part in parts]
        assert found.memory.activations == of_dense[levels].memory.activations


@pytest.mark.parametrize(
    ("units", "stages", "elements"),
    [
        # Two stages have four and three of seven layers, and half the root each.
        ((Unit(10, reshard_after_forward=False), Unit(100, count=7)), 2, 405),
        # The larger layers spread evenly, and so do the smaller ones.
        ((Unit(10, count=3), Unit(100, count=58)), 16, 400),
        ((Unit(10, count=4), Unit(11, count=1)), 5, 11),
    ],
)
def test_a_stage_has_its_share_of_the_layers(units: tuple[Unit, ...], stages: int, elements: int) -> None:
    made = plan(ModelSize(units), nodes=stages, gpus_per_node=2, pp=stages, **GBPS)
    assert made["NNN"].memory.shard == 4 * elements
    assert made["GGG"].topology == Topology(2, 2)
    # From the first backward to the last, all of the stage stays gathered.
    gradient = max(unit.trainable for unit in units) * (2 + 4)
    assert made["GGG"].memory.working == 2 * elements + gradient


def test_routed_experts_of_a_module_are_known_and_shared_ones_are_dense() -> None:
    def layer() -> nn.ModuleDict:
        experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(8))
        return nn.ModuleDict(
            {"router": nn.Linear(4, 8), "experts": experts, "shared_experts": nn.Linear(4, 4, bias=False)}
        )

    model = nn.ModuleDict({"layers": nn.ModuleList(layer() for _ in range(2))})
    assert module_size(model).units == (Unit(40 + 8 * 16 + 16, count=2, expert_trainable=8 * 16),)
    for each in model["layers"]:
        each["experts"].requires_grad_(False)
    assert module_size(model).units == (Unit(56, 128, 2, expert_frozen=128),)


# ---- where ranks lie


def groups_of(world: int, stage: int, stride: int) -> tuple[list[list[int]], list[list[int]]]:
    """By going through the ranks: groups of neighbours that split parameters, and those that shard them."""
    neighbours, sharding = defaultdict(list), defaultdict(list)
    for rank in range(world):
        neighbours[rank // stride].append(rank)
        sharding[rank // stage, rank % stride].append(rank)
    return list(neighbours.values()), list(sharding.values())


degree = st.sampled_from([1, 2, 3, 4, 6, 8])


@settings(deadline=None, max_examples=300)
@given(nodes=st.integers(1, 6), gpus=st.sampled_from([1, 2, 3, 4, 6, 8]), tp=degree, pp=degree, ep=degree)
@example(nodes=4, gpus=8, tp=2, pp=2, ep=8)
@example(nodes=6, gpus=8, tp=8, pp=3, ep=4)
def test_ranks_lie_where_going_through_them_finds_them(nodes: int, gpus: int, tp: int, pp: int, ep: int) -> None:
    axes, cluster, world = Axes(tp, pp, ep), Cluster(nodes, gpus, **GBPS), nodes * gpus
    if world % (tp * pp):
        with pytest.raises(ValueError, match="does not divide the"):
            axes.dense_ranks(cluster)
        return
    stage = world // pp
    for ranks, stride in ((axes.dense_ranks, tp), (axes.expert_ranks, ep)):
        if stage % stride:
            with pytest.raises(ValueError, match="does not divide the"):
                ranks(cluster)
            continue
        neighbours, sharding = groups_of(world, stage, stride)
        apart, together = (
            {count for group in groups for count in Counter(rank // gpus for rank in group).values()}
            for groups in (neighbours, sharding)
        )
        if len(sharding[0]) > 1 and (len(apart) > 1 or len(together) > 1):
            with pytest.raises(ValueError, match="do not lie on nodes of"):
                ranks(cluster)
        else:
            assert ranks(cluster) == Topology(len(sharding[0]), *together)


# ---- reports


def test_the_report_says_where_ranks_lie_if_there_are_other_axes() -> None:
    made = plan(MOE, **PARO, tp=2, ep=4, tokens=100, tflops=1)
    degrees = "tp 2, pp 1, ep 4; sharded over 16 ranks, 4 a node; experts over 8 ranks, 2 a node"
    assert degrees in str(made).splitlines()[2]
    report = json.loads(plan_to_json(made))
    assert report["axes"] == {"tp": 2, "pp": 1, "ep": 4}
    assert report["model"]["units"][1]["expert_trainable"] == 512
    assert "sharded over" not in str(plan(MOE, **PARO))


# ---- bytes of a training

WIDTH, LAYERS, EXPERTS, MICRO_BATCHES = 64, 2, 4, 3
LETTERS = ["IGG", "III"]
"""With and without bytes of weights between nodes; test_plan_bytes.py has all letters."""


class Experts(nn.Module):
    """A matrix for each expert, all of which see all values."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.randn(experts, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (x.unsqueeze(0) @ self.matrices).mean(0)


class Layer(nn.Module):
    """Two matrices and experts. Plans don't count biases, norms and routers, which are copied or not encoded."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.experts = Experts(experts) if experts else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(self.down(self.up(x)))


class Model(nn.Module):
    """Layers, and a head that is as wide as there are stages."""

    def __init__(self, stages: int = 1, experts: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(experts) for _ in range(stages * LAYERS))
        self.head = nn.Linear(WIDTH, stages * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@dataclass(frozen=True)
class Case:
    """Parallelisms on four ranks, as ``plan`` takes them."""

    axes: dict[str, int]
    gpus_per_node: int = 2

    def degree(self, axis: str) -> int:
        return self.axes.get(axis, 1)

    @property
    def experts(self) -> int:
        return EXPERTS if "ep" in self.axes else 0


CASES = {
    "tp and ep": Case({"tp": 2, "ep": 2}),
    "ep": Case({"ep": 2}),
    "pp": Case({"pp": 2}, gpus_per_node=1),
}


def meshes(case: Case) -> tuple[DeviceMesh, DeviceMesh]:
    """In a worker: the ranks that dense parameters are sharded over, and those that experts are."""
    tp, pp, ep = (case.degree(axis) for axis in ("tp", "pp", "ep"))
    dense = init_device_mesh(device_type(), (pp, 4 // (pp * tp), tp), mesh_dim_names=("pp", "dp", "tp"))
    experts = init_device_mesh(device_type(), (4 // ep, ep), mesh_dim_names=("efsdp", "ep"))
    return dense, experts["efsdp"]


def sharded(case: Case, dense: DeviceMesh, experts: DeviceMesh, planned: Any) -> Any:
    """In a worker: a model, or a stage of one, sharded by the strategies of ``planned``."""
    torch.manual_seed(0)
    # Its size of a node counts ranks of the mesh: of experts, every ep-th one.
    own = replace(planned.strategy, gpus_per_node=max(1, case.gpus_per_node // case.degree("ep")))
    model = Model(experts=case.experts // case.degree("ep")).to(device())
    if "tp" in case.axes:
        ways = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel(), "head": ColwiseParallel()}
        parallelize_module(model, dense["tp"], ways)
    for layer in model.layers:
        if case.experts:
            fully_shard(layer.experts, strategy=own, mesh=experts)
        fully_shard(layer, strategy=planned.strategy, mesh=dense["dp"])
    return fully_shard(model, strategy=planned.strategy, mesh=dense["dp"])


def step_of(case: Case, model: Any, dense: DeviceMesh) -> Callable[[], object]:
    """In a worker: a function that makes the micro-batches of a step."""
    batch = torch.ones(2 * MICRO_BATCHES, WIDTH, device=device())
    if "pp" in case.axes:
        stages = dense["pp"]
        stage = PipelineStage(model, stages.get_local_rank(), stages.size(), device(), group=stages.get_group())
        schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=lambda output, target: output.square().mean())
        is_first = stages.get_local_rank() == 0
        return lambda: schedule.step(batch) if is_first else schedule.step(target=batch)

    def step() -> None:
        for index, micro_batch in enumerate(batch.chunk(MICRO_BATCHES)):
            model.set_requires_gradient_sync(index == MICRO_BATCHES - 1)
            model.set_is_last_backward(index == MICRO_BATCHES - 1)
            model(micro_batch).square().mean().backward()

    return step


def sent(model: nn.Module) -> Volume:
    """In a worker: what has been sent so far."""
    return Volume(*(sum(hops[hop] for hops in traffic(model).values()) for hop in ("inter", "intra")))


def counted_and_planned(case: Case) -> dict[str, tuple[Volume, Volume]]:
    """In a worker, by letters: bytes of a step, as counted and as planned."""
    size = module_size(Model(case.degree("pp"), case.experts))
    cluster = {"nodes": 4 // case.gpus_per_node, "gpus_per_node": case.gpus_per_node, "inter_gbps": 1, "intra_gbps": 1}
    options: dict[str, Any] = case.axes | CODECS
    dtypes = {"compute": torch.float32, "reduce": torch.float32}
    made = plan(size, **cluster, **options, **dtypes, micro_batches=MICRO_BATCHES)
    dense, experts = meshes(case)
    found = {}
    for letters in LETTERS:
        planned = made[letters]
        model = sharded(case, dense, experts, planned)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
        step = step_of(case, model, dense)
        for _ in range(2):  # in the second step, weights that nodes keep have been gathered before
            before = sent(model)
            step()
            optimizer.step()
            optimizer.zero_grad()
            after = sent(model)
        found[letters] = Volume(after.inter - before.inter, after.intra - before.intra), planned.volume
    return found


@pytest.mark.parametrize("case", CASES)
def test_planned_bytes_are_those_that_are_counted(case: str, pool: Callable[[int], Pool]) -> None:
    for found in pool(4).run(counted_and_planned, CASES[case]):
        for letters in LETTERS:
            counted, planned = found[letters]
            assert counted == planned, letters
