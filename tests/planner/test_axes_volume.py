"""Planned bytes beside other parallelisms against those that are counted, by the strategies that a plan returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from harness.covering import SCOPES
from harness.models import device
from harness.pool import Pool, device_type
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_zpp import Int4, Int8, fully_shard, plan, traffic
from fsdp_zpp.planner.model_size import module_size
from fsdp_zpp.planner.volume import Volume

WIDTH, LAYERS, EXPERTS, MICRO_BATCHES = 64, 2, 4, 3
CODECS = {"weights": Int8(64), "gradients": Int4(32)}


class Experts(nn.Module):
    """A matrix for each expert, all of which see all values."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.randn(experts, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (x.unsqueeze(0) @ self.matrices).mean(0)


class Layer(nn.Module):
    """Two matrices, and experts if there are any.

    Without biases, norms and routers: codecs leave them as they are, and tensor parallelism copies them, which plans
    don't count.
    """

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
    """Parallelisms on four ranks.

    Args:
        axes: Their degrees, as ``plan`` takes them.
        experts_strategy: As ``plan`` takes it.
        gpus_per_node: GPUs of a node.
        schedule: The schedule of the pipeline.
        codecs: As ``plan`` takes them.
    """

    axes: dict[str, int]
    experts_strategy: str | None = None
    gpus_per_node: int = 2
    schedule: Any = None
    codecs: dict[str, Any] = field(default_factory=dict)

    def degree(self, axis: str) -> int:
        return self.axes.get(axis, 1)

    @property
    def experts(self) -> int:
        return EXPERTS if "ep" in self.axes or self.experts_strategy else 0


CASES = {
    "tp": Case({"tp": 2}, codecs=CODECS),
    "ep": Case({"ep": 2}, codecs=CODECS),
    "tp and ep": Case({"tp": 2, "ep": 2}),
    "ep, experts by IGG": Case({"ep": 2}, experts_strategy="IGG", codecs=CODECS),
    "experts by IIG": Case({}, experts_strategy="IIG"),
    "pp, GPipe": Case({"pp": 2}, gpus_per_node=1, schedule=ScheduleGPipe),
    "pp, 1F1B": Case({"pp": 2}, gpus_per_node=1, schedule=Schedule1F1B, codecs=CODECS),
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
        schedule = case.schedule(stage, MICRO_BATCHES, loss_fn=lambda output, target: output.square().mean())
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
    options: dict[str, Any] = case.axes | case.codecs | {"experts_strategy": case.experts_strategy}
    dtypes = {"compute": torch.float32, "reduce": torch.float32}
    made = plan(size, **cluster, **options, **dtypes, micro_batches=MICRO_BATCHES)
    dense, experts = meshes(case)
    found = {}
    for letters in SCOPES:
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
        assert list(found) == list(SCOPES)
        assert {letters: counted for letters, (counted, _) in found.items()} == {
            letters: planned for letters, (_, planned) in found.items()
        }
