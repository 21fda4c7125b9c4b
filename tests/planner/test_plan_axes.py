"""Plans beside tensor, pipeline, context and expert parallelism: where ranks lie, what they have and send, reports."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
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

from fsdp_zpp import Int4, Int8, Strategy, fully_shard, plan, traffic
from fsdp_zpp.planner.cluster import Cluster
from fsdp_zpp.planner.memory import Memory, Volume
from fsdp_zpp.planner.model_size import Axes, LayerShape, ModelSize, Routing, Unit, module_size
from fsdp_zpp.planner.report import plan_to_json
from fsdp_zpp.strategy.error_feedback import Topology

GBPS = {"inter_gbps": 100, "intra_gbps": 2400}
CODECS: dict[str, Any] = {"weights": Int8(64), "gradients": Int4(32)}
MOE = ModelSize(
    (Unit(96, reshard_after_forward=False), Unit(640, count=4, expert_trainable=512)),
    idle_trainable=4 * 256,
    routing=Routing(8, 4),
    layer=LayerShape(16, 8),
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


@pytest.mark.parametrize(("own", "codecs"), [(None, {}), ("IIG", CODECS)])
def test_experts_are_a_model_of_their_own_on_their_ranks(own: str | None, codecs: dict[str, Any]) -> None:
    dense = ModelSize((Unit(48, reshard_after_forward=False), Unit(64, count=4)))
    experts = ModelSize((Unit(128, count=4),))
    work = {"micro_batches": 3, **codecs, **GBPS}
    made = plan(MOE, nodes=4, gpus_per_node=8, tp=2, ep=4, experts_strategy=own, **work)
    of_dense, of_experts = (plan(size, nodes=4, gpus_per_node=n, **work) for size, n in ((dense, 4), (experts, 2)))
    for levels in FOURTEEN:
        found, apart = made[levels], of_experts[own or levels]
        assert found.experts.strategy == apart.strategy
        assert found.experts.topology == Topology(8, 2)
        assert (found.dense_volume, found.experts.volume) == (of_dense[levels].volume, apart.volume)
        assert found.volume == of_dense[levels].volume + apart.volume
        parts = zip(_without_fixed(of_dense[levels].memory), _without_fixed(apart.memory), strict=True)
        assert _without_fixed(found.memory) == [sum(part) for part in parts]
        assert _without_fixed(found.experts.memory) == _without_fixed(apart.memory)
        assert found.memory.activations == of_dense[levels].memory.activations


def test_context_parallel_ranks_are_data_parallel_ranks() -> None:
    alone, beside = plan(1e9, **PARO), plan(1e9, **PARO, cp=4)
    for ours, theirs in zip(beside.estimates, alone.estimates, strict=True):
        assert (ours.volume, ours.memory, ours.strategy) == (theirs.volume, theirs.memory, theirs.strategy)


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


def test_activations_along_each_axis() -> None:
    """A stage of two layers; 100 tokens, 16 activations each, in 16 bits, are 1600 bytes on a rank of two."""
    made = plan(MOE, nodes=4, gpus_per_node=4, tp=2, cp=4, pp=2, ep=8, tokens=100, tflops=1, micro_batches=3, **GBPS)
    own = 100 * 16 * 2 // 2
    assert dict(made.activations) == {
        "tp": Volume(0, 3 * 2 * 8 * own),
        # Two of the four context-parallel ranks are on a node; keys and values are as large as activations here.
        "cp": Volume(2 * (each := 3 * 2 * 3 * own), each),
        # Each token goes to four experts and back; of eight ranks three others are on the node.
        "ep": Volume(4 * (each := 3 * 2 * 4 * own * 4 // 8), 3 * each),
        "pp": Volume(3 * own, 0),
    }
    assert plan(MOE, nodes=4, gpus_per_node=4, tp=2, **GBPS).activations == ()
    three = plan(MOE, nodes=2, gpus_per_node=4, pp=4, tokens=100, tflops=1, **GBPS)
    assert dict(three.activations) == {"pp": Volume(100 * 16 * 2, 100 * 16 * 2)}  # two stages on a node


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


def test_experts_may_have_codecs_of_their_own() -> None:
    made = plan(MOE, **PARO, ep=4, experts_strategy=Strategy("III", weights=Int4(32)))
    own = Strategy("III", weights=Int4(32), gpus_per_node=2)
    assert {estimate.experts.strategy for estimate in made.estimates} == {own}
    assert made.choice.strategy.weights is None


# ---- where ranks lie


def groups_of(axes: Axes, world: int) -> dict[str, list[list[int]]]:
    """All groups of ranks along each axis, by going through the ranks."""
    stage, found = world // axes.pp, defaultdict(lambda: defaultdict(list))
    data = stage // (axes.tp * axes.cp)
    for rank, (pp, dp, cp, tp) in enumerate(product(*map(range, (axes.pp, data, axes.cp, axes.tp)))):
        ep, shard = (dp * axes.cp * axes.tp + cp * axes.tp + tp) % axes.ep, rank % stage // axes.ep
        found["dense"][pp, tp].append(rank)
        found["experts"][(pp, tp) if axes.ep == 1 else (pp, ep)].append(rank)
        found["tp"][pp, dp, cp].append(rank)
        found["cp"][pp, dp, tp].append(rank)
        found["ep"][pp, shard].append(rank)
        found["pp"][dp, cp, tp].append(rank)
    return {axis: list(groups.values()) for axis, groups in found.items()}


degree = st.sampled_from([1, 2, 3, 4, 6, 8])


@settings(deadline=None, max_examples=300)
@given(nodes=st.integers(1, 6), gpus=st.sampled_from([1, 2, 3, 4, 6, 8]), tp=degree, pp=degree, cp=degree, ep=degree)
@example(nodes=4, gpus=8, tp=2, pp=2, cp=2, ep=8)
@example(nodes=6, gpus=8, tp=8, pp=3, cp=1, ep=4)
def test_ranks_lie_where_going_through_them_finds_them(
    nodes: int, gpus: int, tp: int, pp: int, cp: int, ep: int
) -> None:
    axes, cluster = Axes(tp, pp, cp, ep), Cluster(nodes, gpus, **GBPS)
    world = nodes * gpus
    if world % (tp * pp * cp) or (world // pp) % ep:
        with pytest.raises(ValueError, match="does not divide the"):
            axes.check(cluster)
        return
    shares = {
        axis: {count for group in groups for count in Counter(rank // gpus for rank in group).values()}
        for axis, groups in groups_of(axes, world).items()
    }
    if any(len(counts) > 1 for counts in shares.values()):
        with pytest.raises(ValueError, match="do not lie on nodes of"):
            axes.check(cluster)
        return
    axes.check(cluster)
    found = {"dense": axes.dense_ranks(cluster), "experts": axes.expert_ranks(cluster), **axes.others(cluster)}
    for axis, ranks in found.items():
        (share,) = shares[axis]
        assert ranks.topology(cluster) == Topology(len(groups_of(axes, world)[axis][0]), share), axis


# ---- notes and reports


def test_notes_name_codecs_without_effect_and_stacks_of_fewer_experts_than_ranks() -> None:
    notes = " ".join(plan(MOE, **PARO, pp=4, **CODECS).notes)
    assert "Each strategy's ranks share a node" in notes
    assert "weights=int8(64) has no effect" in notes
    assert "has no effect" not in " ".join(plan(MOE, **PARO, pp=2, **CODECS).notes)
    # FSDP cuts the first dimension of a parameter, which is that of the experts, if nobody tells it another one.
    padded = plan(MOE, **PARO, ep=2).notes[-1]
    assert padded.startswith("Experts are sharded over 16 ranks, and a layer has 4 for them: fully_shard pads")
    enough = plan(MOE, **PARO | {"nodes": 1}, ep=4)
    assert enough["GGG"].experts.topology.world == MOE.routing.experts // 4
    assert "Experts are sharded" not in " ".join(enough.notes)


def test_the_report_says_where_ranks_lie_and_what_each_axis_sends_if_there_are_any() -> None:
    made = plan(MOE, **PARO, tp=2, ep=4, experts_strategy="IIG", tokens=100, tflops=1)
    lines = str(made).splitlines()
    degrees = "tp 2, pp 1, cp 1, ep 4; dense parameters sharded over 16 ranks, 4 a node, experts over 8 ranks, 2 a node"
    assert degrees in lines[2]
    start = lines.index(next(line for line in lines if line.startswith(f"GB a step under {made.choice.name}:")))
    axes = [line.split("  ")[1].strip() for line in lines[start + 1 : start + 5]]
    assert axes == ["dp, dense parameters", "dp, experts (IIG)", "tp, activations *", "ep, activations *"]
    assert lines[start + 5].startswith("* estimated")
    report = json.loads(plan_to_json(made))
    assert report["axes"] == {"tp": 2, "pp": 1, "cp": 1, "ep": 4}
    assert set(report["estimated_activation_bytes_per_gpu"]) == {"tp", "ep"}
    assert report["model"]["units"][1]["expert_trainable"] == 512
    strategy = report["strategies"]["GGG"]
    assert strategy["ranks"] == {"world": 16, "gpus_per_node": 4}
    assert strategy["experts"]["levels"] == "IIG"
    assert strategy["experts"]["sent_bytes_per_gpu"] == vars(made["GGG"].experts.volume)
    alone = plan(MOE, **PARO)
    assert "axis" not in str(alone)
    assert not {"axes", "estimated_activation_bytes_per_gpu"} & set(json.loads(plan_to_json(alone)))


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
    experts_strategy: str | None = None
    gpus_per_node: int = 2

    def degree(self, axis: str) -> int:
        return self.axes.get(axis, 1)

    @property
    def experts(self) -> int:
        return EXPERTS if "ep" in self.axes else 0


CASES = {
    "tp and ep": Case({"tp": 2, "ep": 2}),
    "ep, experts by IGG": Case({"ep": 2}, experts_strategy="IGG"),
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
    model = Model(experts=case.experts // case.degree("ep")).to(device())
    if "tp" in case.axes:
        ways = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel(), "head": ColwiseParallel()}
        parallelize_module(model, dense["tp"], ways)
    for layer in model.layers:
        if case.experts:
            fully_shard(layer.experts, strategy=planned.experts.strategy, mesh=experts)
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


def sent(*modules: nn.Module) -> Volume:
    """In a worker: what has been sent for modules so far."""
    counted = [traffic(module) for module in modules]
    return Volume(*(sum(hops[hop] for each in counted for hops in each.values()) for hop in ("inter", "intra")))


def counted_and_planned(case: Case) -> dict[str, tuple[list[Volume], list[Volume]]]:
    """In a worker, by letters: bytes of a step, and those of experts among them, as counted and as planned."""
    size = module_size(Model(case.degree("pp"), case.experts))
    cluster = {"nodes": 4 // case.gpus_per_node, "gpus_per_node": case.gpus_per_node, "inter_gbps": 1, "intra_gbps": 1}
    options: dict[str, Any] = case.axes | CODECS | {"experts_strategy": case.experts_strategy}
    dtypes = {"compute": torch.float32, "reduce": torch.float32}
    made = plan(size, **cluster, **options, **dtypes, micro_batches=MICRO_BATCHES)
    dense, experts = meshes(case)
    found = {}
    for letters in LETTERS:
        planned = made[letters]
        model = sharded(case, dense, experts, planned)
        of_experts = [layer.experts for layer in model.layers] if case.experts else []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
        step, counted = step_of(case, model, dense), []
        for _ in range(2):  # in the second step, weights that nodes keep have been gathered before
            before = sent(model), sent(*of_experts)
            step()
            optimizer.step()
            optimizer.zero_grad()
            after = sent(model), sent(*of_experts)
            counted = [Volume(b.inter - a.inter, b.intra - a.intra) for a, b in zip(before, after, strict=True)]
        found[letters] = counted, [planned.volume, planned.experts.volume if case.experts else Volume()]
    return found


@pytest.mark.parametrize("case", CASES)
def test_planned_bytes_are_those_that_are_counted(case: str, pool: Callable[[int], Pool]) -> None:
    for found in pool(4).run(counted_and_planned, CASES[case]):
        for letters in LETTERS:
            counted, planned = found[letters]
            assert counted == planned, letters
