"""Plans against what training sends and keeps, counted on real collectives, and buffers against their peak."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import models
from harness.adapter import Case as Training, Fsdp2
from harness.launch import in_fake_world
from harness.live_bytes import LiveBytes
from harness.offload import offloading
from harness.pool import Pool
from harness.training import train
from harness.wiretap import wiretap
from top_k_codec import TopK
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils._pytree import tree_leaves

from fsdp_zpp import Codec, Int4, Int8, LocalSteps, LoCo, Strategy, plan
from fsdp_zpp.comm.flat_layout import Sharded
from fsdp_zpp.comm.hops import Traffic
from fsdp_zpp.comm.mesh import process_mesh
from fsdp_zpp.frozen.frozen_base import FrozenBase
from fsdp_zpp.local_steps.fragment import Fragment
from fsdp_zpp.local_steps.outer_step import NodeShare, OuterStep
from fsdp_zpp.planner.cluster import Precision
from fsdp_zpp.planner.memory import Volume, gathers_of, memory_of_units, step_volume
from fsdp_zpp.planner.model_size import ModelSize, Unit, module_size
from fsdp_zpp.planner.step_time import exchanges
from fsdp_zpp.runtime.unit import StrategyUnit, named_units
from fsdp_zpp.strategy.error_feedback import Topology

FULL = Precision(compute=torch.float32, reduce=torch.float32)
WIDTH = 64  # whose square is the least that is quantized, in whole blocks on every rank


class Layer(nn.Module):
    """Matrices that are trained or not, without biases: codecs leave those as they are, which plans don't count."""

    def __init__(self, *trained: bool) -> None:
        super().__init__()
        self.matrices = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(own) for own in trained))

    def forward(self, x: Tensor) -> Tensor:
        return self.matrices(x)


class Model(nn.Module):
    """Layers and a head; frozen are two layers or, as a base, a matrix of each layer, the embedding and the head."""

    def __init__(self, with_base: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        # FSDP1 refuses units that are frozen in part, but for what is quantized.
        kinds = [(True, False)] * 4 if with_base else [(False,), (False,), (True,), (True,)]
        self.embedding = nn.Embedding(WIDTH, WIDTH).requires_grad_(False) if with_base else None
        self.layers = nn.ModuleList(Layer(*trained) for trained in kinds)
        self.head = nn.Linear(WIDTH, WIDTH if with_base else 2, bias=False).requires_grad_(not with_base)

    def forward(self) -> Tensor:
        device = self.head.weight.device
        if self.embedding is None:
            x = torch.ones(2, WIDTH, device=device, requires_grad=True)
        else:
            x = self.embedding(torch.arange(4, device=device))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@dataclass(frozen=True)
class Case:
    """A training on four ranks, under letters that the options of the strategy allow."""

    gpus_per_node: int
    micro_batches: int
    options: dict[str, Any]

    @property
    def letters(self) -> list[str]:
        return ["NNI", "III"] if "local_steps" in self.options else ["NNI", "III", "NGG", "IGG", "GGG"]


INSIDE = {"weights": Int8(64), "intra_gradients": Int8(32), "error_feedback": LoCo(hops="both")}
ENCODED = {"weights": Int8(64), "gradients": Int4(32)}
WITH_FEEDBACK = LocalSteps(every=2, codec=Int4(32), error_feedback=LoCo(dtype=Int8(32)), overlap=1)
LARGEST = LocalSteps(every=2, codec=TopK(0.1, 4, 256), error_feedback=LoCo(beta=0, decay=0.9))
CASES = {
    "encoded": Case(2, 3, ENCODED),
    "one node encoded inside": Case(4, 3, ENCODED | {"intra_gradients": Int8(64)}),
    "quantized base": Case(2, 2, {"frozen": Int8(256)}),
    "exchanges as by default": Case(1, 3, {"local_steps": LocalSteps(every=3)}),
    "unencoded at once": Case(2, 1, {"local_steps": LocalSteps(every=2, codec=None, spread=False)}),
    "encoded, with feedback, on the way": Case(2, 3, INSIDE | {"local_steps": WITH_FEEDBACK}),
    "the largest alone": Case(1, 1, {"local_steps": LARGEST}),
    "with moments": Case(2, 1, {"local_steps": LocalSteps(every=2, moments_every=2)}),
}


def counted_and_planned(case: Case) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """In a worker, by letters: what is sent until all repeats, and bytes of a base, of outer state and of errors."""
    found = {}
    for letters in case.letters:
        strategy = Strategy(letters, gpus_per_node=case.gpus_per_node, **case.options)
        model = FullyShardedDataParallel(
            Model(strategy.frozen is not None).to(models.device()),
            sharding_strategy=strategy,
            device_id=models.device(),
            auto_wrap_policy=ModuleWrapPolicy({Layer}),
            use_orig_params=False,  # with it, FSDP pads each parameter
        )
        sent = {"sent": sent_until_all_repeats(model, strategy, case.micro_batches)}
        found[letters] = sent | bytes_kept(model), planned(strategy, case.micro_batches)
    return found


def period_of(local_steps: LocalSteps | None) -> int:
    return 1 if local_steps is None else local_steps.every * (local_steps.moments_every or 1)


def sent_until_all_repeats(model: Any, strategy: Strategy, micro_batches: int) -> Volume:
    # The first step gathers what nodes keep from then on. In the third round, each step has an exchange of the round
    # before behind it, all of them with moments or none.
    first = 1 if strategy.local_steps is None else 2 * strategy.local_steps.every
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    sent = Volume()
    for step in range(first + period_of(strategy.local_steps)):
        with wiretap(strategy.gpus_per_node) as tap:
            for micro_batch in range(micro_batches):
                with model.no_sync() if micro_batch < micro_batches - 1 else nullcontext():
                    model().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= first:
            sent += Volume(tap.total("inter"), tap.total("intra"))
    return sent


def bytes_in(state: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(state) if isinstance(leaf, Tensor))


def bytes_kept(model: nn.Module) -> dict[str, int]:
    units = [unit for unit in named_units(model) if isinstance(unit, StrategyUnit)]
    exchanges = [unit.fragment.outer.state_dict() for unit in units if unit.fragment and unit.fragment.outer.names]
    bases = FrozenBase.below(model)
    return {
        "outer": bytes_in([(each["agreed"], each["momentum"]) for each in exchanges]),
        # The fit is two numbers a unit, which are left out.
        "errors of exchanges": bytes_in([(each["errors"], each["errors_back"]) for each in exchanges]),
        "errors of gradients": bytes_in([unit.errors.state_dict() for unit in units if unit.errors is not None]),
        "base": sum(unit.nbytes for base in bases for unit in base.units),
        "gathered": sum(base.units[0]._buffers.nbytes for base in bases),  # which no public name shows
    }


def planned(strategy: Strategy, micro_batches: int) -> dict[str, Any]:
    size = module_size(Model(strategy.frozen is not None))
    resolved = strategy.resolve(Topology(4, strategy.gpus_per_node))
    local_steps, codec = strategy.local_steps, strategy.frozen
    inside = resolved if local_steps is None else resolved.within_node()
    without_base = ModelSize(tuple(replace(unit, frozen=0) for unit in size.units))
    memory, less = (memory_of_units(each, inside, micro_batches, FULL) for each in (size, without_base))
    in_step = step_volume(size, inside, micro_batches, FULL)
    period = period_of(local_steps)
    sent, outer, errors = Volume(period * in_step.inter, period * in_step.intra), 0, 0
    if local_steps is not None:
        assert in_step.inter == 0
        exchanged = exchanges(size, resolved, local_steps, FULL)
        sent += exchanged.moments_sent + exchanged.sent * (local_steps.moments_every or 1)
        outer, errors = exchanged.memory.outer, exchanged.memory.errors
    of_base = memory.parameters + memory.shard - less.parameters - less.shard
    return {
        "sent": sent,
        "outer": outer,
        "errors of exchanges": errors,
        "errors of gradients": memory.errors,
        "base": 0 if codec is None else of_base,
        "gathered": 0 if codec is None else gathers_of(size, codec, resolved).buffers,
    }


@pytest.mark.parametrize("case", CASES)
def test_planned_bytes_are_those_that_are_sent_and_kept(case: str, pool: Callable[[int], Pool]) -> None:
    for found in pool(4).run(counted_and_planned, CASES[case]):
        for letters in CASES[case].letters:
            counted, planned = found[letters]
            assert counted == planned, letters


def held_by_the_host() -> tuple[int, int]:
    """In a worker: the bytes of parameters, gradients and Adam's moments on the CPU, and those that are planned."""
    adapter, sizes = offloading(Fsdp2()), (("width", 16), ("hidden", 32), ("vocabulary", 64))
    case = Training(clip=None, steps=1, model=sizes)
    two: dict[str, Any] = {"nodes": 2, "gpus_per_node": 2, "inter_gbps": 1, "intra_gbps": 1, "host_gbps": 8}
    made = plan(module_size(models.make_net(**dict(sizes))), **two, cpu_offload=True)
    model: Any = adapter.make(case, Strategy("IGG", gpus_per_node=2))
    held: list[Tensor] = []

    def note(step: int, optimizer: torch.optim.Optimizer) -> None:
        for p in model.parameters():
            state = optimizer.state[p]
            held.extend(map(adapter.local, (p, p.grad, state["exp_avg"], state["exp_avg_sq"])))

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    train(adapter, model, case, after_step=note, optimizer=optimizer)
    return sum(each.nbytes for each in held if each.device.type == "cpu"), made["IGG"].memory.host


def test_planned_bytes_on_the_host_are_those_that_are_held(pool: Callable[[int], Pool]) -> None:
    for held, planned in pool(4).run(held_by_the_host):
        assert held == planned


@dataclass(frozen=True)
class Fused(Codec):
    """Allocates payloads and nothing else, as kernels of a GPU do; ``share`` values become a byte."""

    share: int

    def nbytes(self, numel: int) -> int:
        return numel // self.share + 16

    def encode(self, values: Tensor, rows: int, cols: int) -> Tensor:
        chunks = rows * cols
        return torch.zeros(chunks, self.nbytes(values.numel() // chunks), dtype=torch.uint8)

    def decode(self, payload: Tensor, out: Tensor, rows: int, cols: int) -> None:
        out.zero_()

    def decode_sum(self, payload: Tensor, out: Tensor, rows: int, cols: int, scale: float) -> None:
        out.zero_()


class OneWeight(Sharded):
    """A unit of one trained weight."""

    def __init__(self, held: Tensor) -> None:
        self.sharded, self._held = self, held

    def named_shards(self) -> dict[str, Tensor]:
        return {"weight": self._held}

    def trained_names(self) -> list[str]:
        return ["weight"]

    def invalidate(self) -> None: ...


def peaks(gpus_per_node: int, numel: int) -> dict[tuple[str, ...], tuple[int, int]]:
    """In a fake world: most bytes at a time of an exchange's buffers, as counted and as planned."""
    mesh = process_mesh(dist.group.WORLD, gpus_per_node)
    size, found = ModelSize((Unit(numel, count=3),)), {}
    ways = [(None, None), (Fused(2), None), (Fused(8), LoCo())]
    for letters, (codec, feedback), dtype in product(("III", "NNN"), ways, (torch.float32, torch.bfloat16)):
        local_steps = LocalSteps(codec=codec, error_feedback=feedback)
        resolved = Strategy(letters).resolve(mesh.topology)
        replicated = resolved.scopes.optimizer == "N"
        held = torch.ones(numel if replicated else -(-numel // gpus_per_node), dtype=dtype)
        share = NodeShare(mesh.own_node(), Traffic()) if replicated and gpus_per_node > 1 else None
        outer = OuterStep(local_steps, mesh, Traffic())
        fragment = Fragment(local_steps, outer, OneWeight(held), share)
        for _ in range(2):  # the first makes the errors
            fragment.note_trained()
            with LiveBytes(math.inf) as memory:
                fragment.send(1)
                fragment.receive(1.0)
        planned = exchanges(size, resolved, local_steps, Precision(storage=dtype)).memory.working
        found[letters, f"{codec}, {feedback}", str(dtype)] = memory.peak, planned
    return found


# Torch's fake backend keeps no tensor: threads of a true one may, for a moment after a collective.
@pytest.mark.parametrize(("world", "gpus_per_node"), [(4, 1), (24, 4)])
def test_planned_buffers_of_exchanges_are_their_peaks(world: int, gpus_per_node: int) -> None:
    found = in_fake_world(world, gpus_per_node, peaks, gpus_per_node, 100_001)
    assert len(found) == 12
    for key, (counted, planned) in found.items():
        assert counted == planned, key


def test_moments_need_buffers_where_those_of_weights_are_smaller() -> None:
    size, resolved = ModelSize((Unit(1_280_000),)), Strategy("III").resolve(Topology(8, 1))
    plain, averaged, never = (
        exchanges(size, resolved, LocalSteps(moments_every=every), precision).memory.working
        for every, precision in ((None, FULL), (3, FULL), (3, replace(FULL, optimizer_bytes=0)))
    )
    assert plain == never < averaged
    # All moments in fp32, and payloads sent and received of 8 bits with scales of 32 bits for 128 values.
    assert averaged == pytest.approx(1_280_000 * (4 + 2 * (1 + 4 / 128)), rel=0.01)
