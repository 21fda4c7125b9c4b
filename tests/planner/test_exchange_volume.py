"""Planned local steps against what training with them sends and keeps, counted on real collectives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.covering import over_each
from harness.launch import in_fake_world
from harness.models import device
from harness.pool import Pool
from harness.wiretap import wiretap
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_zpp import Codec, Int4, Int8, LocalSteps, LoCo, Strategy, TopK
from fsdp_zpp.collectives.hops import Traffic
from fsdp_zpp.collectives.mesh import process_mesh
from fsdp_zpp.collectives.moment_average import MomentAverage
from fsdp_zpp.collectives.node_share import NodeShare
from fsdp_zpp.collectives.outer_step import OuterStep
from fsdp_zpp.config.local_steps import MOMENT_CODEC
from fsdp_zpp.config.topology import Topology
from fsdp_zpp.planner.config import MemoryBudget, Precision
from fsdp_zpp.planner.exchange import exchange_memory, exchange_volume, moment_buffers, moment_volume
from fsdp_zpp.planner.memory import memory_per_gpu
from fsdp_zpp.planner.model_size import ModelSize, Unit, module_size
from fsdp_zpp.planner.volume import Volume, step_volume
from fsdp_zpp.runtime.fragment import Fragment
from fsdp_zpp.runtime.unit import StrategyUnit, named_units

LETTERS = "NNN NNI NII INI III".split()
"""Those that can have local steps."""
FULL = Precision(compute=torch.float32, reduce=torch.float32)


def blocks_of_a_model() -> nn.ModuleDict:
    """Two frozen layers, two that are trained, and a head."""
    torch.manual_seed(0)
    # Without biases: codecs leave them as they are, which plans don't count.
    layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
    model = nn.ModuleDict({"layers": layers, "head": nn.Linear(64, 2, bias=False)})
    model["layers"][:2].requires_grad_(False)
    return model


def bytes_in(state: Any) -> int:
    """Bytes of the tensors somewhere in a state."""
    return sum(leaf.nbytes for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor))


def counted_and_planned(
    gpus_per_node: int, micro_batches: int, local_steps: LocalSteps, codecs: dict[str, Any]
) -> dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """In a worker, by letters: bytes sent until all repeats, and kept as outer state and as errors of either kind."""
    found = {}
    for letters in LETTERS:
        strategy = Strategy(letters, gpus_per_node=gpus_per_node, local_steps=local_steps, **codecs)
        blocks = blocks_of_a_model()
        size, layers = module_size(blocks), set(blocks["layers"])
        model = FullyShardedDataParallel(
            nn.Sequential(*blocks["layers"], blocks["head"]),
            sharding_strategy=strategy,
            device_id=device(),
            auto_wrap_policy=partial(lambda_auto_wrap_policy, lambda_fn=layers.__contains__),
            use_orig_params=False,  # with it, FSDP pads each parameter
        )
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        sent = Volume()
        # By then, each step of a round has an exchange of the round before behind it, all of them with moments or none.
        period = local_steps.every * (local_steps.moments_every or 1)
        for step in range(2 * local_steps.every + period):
            with wiretap(gpus_per_node) as tap:
                for micro_batch in range(micro_batches):
                    with model.no_sync() if micro_batch < micro_batches - 1 else nullcontext():
                        model(torch.ones(2, 64, device=device(), requires_grad=True)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step >= 2 * local_steps.every:
                sent += Volume(tap.total("inter"), tap.total("intra"))
        resolved = strategy.resolve(Topology(4, gpus_per_node))
        inside, exchange = resolved.within_node(), (size, resolved, local_steps, FULL)
        in_step, exchanged = step_volume(size, inside, micro_batches, FULL), exchange_volume(*exchange)
        memory, moments = exchange_memory(*exchange), moment_volume(*exchange)
        in_period = Volume(*(period * getattr(in_step, hop) for hop in ("inter", "intra"))) + moments
        for _ in range(local_steps.moments_every or 1):
            in_period += exchanged
        found[letters] = (
            (sent, *bytes_kept(model)),
            (
                in_period,
                memory.outer,
                memory.errors,
                memory_per_gpu(size, inside, micro_batches, FULL, MemoryBudget()).errors,
            ),
        )
        assert in_step.inter == 0
    return found


def bytes_kept(model: nn.Module) -> tuple[int, int, int]:
    """Bytes of the outer state, of the errors of exchanges, and of those of gradients."""
    units = [unit for unit in named_units(model) if isinstance(unit, StrategyUnit)]
    exchanges = [unit.fragment.outer.state_dict() for unit in units if unit.fragment and unit.fragment.outer.names]
    outer = bytes_in([(each["agreed"], each["momentum"]) for each in exchanges])
    errors = bytes_in([(each["errors"], each["errors_back"]) for each in exchanges])  # the fit is two numbers a unit
    gradients = [unit.errors.state_dict() for unit in units if unit.errors is not None]
    return outer, errors, bytes_in(gradients)


CASES = {
    "as by default": (LocalSteps(every=3), {}),
    "unencoded, at once": (LocalSteps(every=2, codec=None, spread=False), {"weights": Int8(64)}),
    "encoded, with feedback, on the way": (
        LocalSteps(every=2, codec=Int4(32), error_feedback=LoCo(dtype=Int8(32)), overlap=1),
        {"weights": Int8(64), "intra_gradients": Int8(32), "error_feedback": LoCo(hops="both")},
    ),
    "the largest alone": (LocalSteps(every=2, codec=TopK(0.1, 4, 256), error_feedback=LoCo(beta=0, decay=0.9)), {}),
    "with moments": (LocalSteps(every=2, moments_every=2), {}),
}


@over_each(gpus_per_node=[1, 2], micro_batches=[1, 3])
@pytest.mark.parametrize("case", CASES)
def test_planned_bytes_are_those_that_are_sent_and_kept(
    gpus_per_node: int, micro_batches: int, case: str, pool: Callable[[int], Pool]
) -> None:
    for found in pool(4).run(counted_and_planned, gpus_per_node, micro_batches, *CASES[case]):
        assert list(found) == LETTERS
        assert {letters: counted for letters, (counted, _) in found.items()} == {
            letters: planned for letters, (_, planned) in found.items()
        }


class PeakOfNewMemory(TorchDispatchMode):
    """The most bytes of new tensors that live at a time in the context."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(storage) for storage in self._storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in self._storages(out):
            if id(storage) not in given and id(storage) not in self._live:
                self._live[id(storage)] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, id(storage))
        self.peak = max(self.peak, sum(self._live.values()))
        return out

    @staticmethod
    def _storages(of: Any) -> list[torch.UntypedStorage]:
        # A storage's Python object lives as long as its memory.
        return [leaf.untyped_storage() for leaf in tree_leaves(of) if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True)
class Fused(Codec):
    """Allocates payloads and nothing else, as kernels of a GPU do; ``share`` values become a byte."""

    share: int
    share_back: int = 0

    def for_sum_of(self, peers: int) -> Codec:
        return Fused(self.share_back) if self.share_back else self

    def nbytes(self, numel: int) -> int:
        return numel // self.share + 16

    def encode(self, values: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
        chunks = rows * cols
        return torch.zeros(chunks, self.nbytes(values.numel() // chunks), dtype=torch.uint8)

    def decode(self, payload: torch.Tensor, out: torch.Tensor, rows: int, cols: int) -> None:
        out.zero_()

    def decode_sum(self, payload: torch.Tensor, out: torch.Tensor, rows: int, cols: int, scale: float) -> None:
        out.zero_()


def peaks_of_exchanges(gpus_per_node: int, numel: int) -> dict[tuple[str, str, str], tuple[int, int]]:
    """In a fake world, by letters, codec and dtype: most bytes of an exchange's buffers at a time, and as planned."""
    mesh = process_mesh(dist.group.WORLD, gpus_per_node)
    size, found = ModelSize((Unit(numel, count=3),)), {}
    ways = [(None, None), (Fused(2), None), (Fused(8), None), (Fused(8, 1), None), (Fused(8), LoCo())]
    for letters, (codec, feedback), dtype in product(("III", "NNN"), ways, (torch.float32, torch.bfloat16)):
        local_steps = LocalSteps(codec=codec, error_feedback=feedback)
        resolved = Strategy(letters).resolve(mesh.topology)
        replicated = resolved.scopes.optimizer == "N"
        held = torch.ones(numel if replicated else -(-numel // gpus_per_node), dtype=dtype)
        share = NodeShare(mesh.own_node(), Traffic()) if replicated and gpus_per_node > 1 else None
        outer = OuterStep(local_steps, mesh, Traffic())
        fragment = Fragment(local_steps, outer, share, partial(dict, weight=held), dict, partial(list, ["weight"]), int)
        for _ in range(2):  # the first makes the errors
            fragment.note_trained()
            with PeakOfNewMemory() as memory:
                fragment.send(1)
                fragment.receive(1.0)
        planned = exchange_memory(size, resolved, local_steps, Precision(storage=dtype)).working
        found[letters, f"{codec}, {feedback}", str(dtype)] = memory.peak, planned
    return found


# Torch's fake backend keeps no tensor: threads of a true one may, for a moment after a collective.
@pytest.mark.parametrize(("world", "gpus_per_node"), [(4, 1), (4, 2), (32, 8), (24, 4)])
def test_planned_buffers_of_an_exchange_are_its_peak(world: int, gpus_per_node: int) -> None:
    found = in_fake_world(world, gpus_per_node, peaks_of_exchanges, gpus_per_node, 100_001)
    assert len(found) == 20
    assert {key: counted for key, (counted, _) in found.items()} == {
        key: planned for key, (_, planned) in found.items()
    }


class FusedInt8(Fused):
    """Allocates payloads of the size of those of moments, and nothing else."""

    block_numel = 128

    def nbytes(self, numel: int) -> int:
        return MOMENT_CODEC.nbytes(numel)


def peak_of_moments(gpus_per_node: int, numel: int) -> int:
    """In a fake world: most bytes of buffers at a time while a moment is averaged."""
    average = MomentAverage(process_mesh(dist.group.WORLD, gpus_per_node), FusedInt8(1), Traffic(), "unit")
    moment = torch.ones(numel)
    with PeakOfNewMemory() as memory:
        average.average({"weight": moment}, {"weight": ()})
    return memory.peak


@pytest.mark.parametrize(("world", "gpus_per_node"), [(4, 1), (4, 2), (32, 8), (24, 4)])
def test_planned_buffers_of_moments_are_their_peak(world: int, gpus_per_node: int) -> None:
    nodes = world // gpus_per_node
    peak = in_fake_world(world, gpus_per_node, peak_of_moments, gpus_per_node, 100_001)
    assert peak == pytest.approx(moment_buffers(-(-100_001 // nodes), nodes), rel=0.05)


def test_moments_need_buffers_where_those_of_weights_are_smaller() -> None:
    size, resolved = ModelSize((Unit(1_280_000),)), Strategy("III").resolve(Topology(8, 1))
    plain, averaged, never = (
        exchange_memory(size, resolved, LocalSteps(moments_every=every), precision).working
        for every, precision in ((None, FULL), (3, FULL), (3, replace(FULL, optimizer_bytes=0)))
    )
    assert plain == never < averaged == moment_buffers(160_000, 8)


def test_offloaded_state_takes_no_memory_of_the_gpu_but_a_copy_on_the_way() -> None:
    size, resolved = ModelSize((Unit(8000, count=3), Unit(0, 8000))), Strategy("III").resolve(Topology(8, 2))
    kept, offloaded = (
        exchange_memory(size, resolved, LocalSteps(offload=offload, error_feedback=LoCo()), FULL)
        for offload in (False, True)
    )
    assert (kept.outer, offloaded.outer) == (3 * 4 * (4000 + 1000), 0)
    # The chunks of four nodes there and one back, in fp32; and of one unit, its change and the agreed weights.
    assert kept.errors == offloaded.errors == 3 * 4 * (4000 + 1000)
    assert offloaded.working == 2 * 4 * 4000 > kept.working
