"""Plans against what training sends and keeps, counted on real collectives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from harness import models
from harness.pool import Pool
from harness.wiretap import wiretap
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils._pytree import tree_leaves

from fsdp_zpp import Int4, Int8, LoCo, Strategy
from fsdp_zpp.frozen.frozen_base import FrozenBase
from fsdp_zpp.frozen.weight import FrozenUnit
from fsdp_zpp.planner.cluster import Precision
from fsdp_zpp.planner.memory import Volume, gathers_of, memory_of_units, step_volume
from fsdp_zpp.planner.model_size import ModelSize, module_size
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
    """A training on four ranks."""

    gpus_per_node: int
    micro_batches: int
    options: dict[str, Any]


LETTERS = ["NNI", "III", "NGG", "IGG", "GGG"]
ENCODED = {"weights": Int8(64), "gradients": Int4(32)}
CASES = {
    "encoded": Case(2, 3, ENCODED),
    "one node encoded inside": Case(4, 3, ENCODED | {"intra_gradients": Int8(64)}),
    "quantized base": Case(2, 2, {"frozen": Int8(256)}),
    "with feedback": Case(2, 3, ENCODED | {"error_feedback": LoCo(hops="both", dtype=Int8(32))}),
}


def counted_and_planned(case: Case) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """In a worker, by letters: what a step sends, and bytes of a base and of errors."""
    found = {}
    for letters in LETTERS:
        strategy = Strategy(letters, gpus_per_node=case.gpus_per_node, **case.options)
        model = FullyShardedDataParallel(
            Model(strategy.frozen is not None).to(models.device()),
            sharding_strategy=strategy,
            device_id=models.device(),
            auto_wrap_policy=ModuleWrapPolicy({Layer}),
            use_orig_params=False,  # with it, FSDP pads each parameter
        )
        sent = {"sent": sent_in_a_step(model, strategy, case.micro_batches)}
        found[letters] = sent | bytes_kept(model), planned(strategy, case.micro_batches)
    return found


def sent_in_a_step(model: Any, strategy: Strategy, micro_batches: int) -> Volume:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):  # the first step gathers what nodes keep from then on
        with wiretap(strategy.gpus_per_node) as tap:
            for micro_batch in range(micro_batches):
                with model.no_sync() if micro_batch < micro_batches - 1 else nullcontext():
                    model().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Volume(tap.total("inter"), tap.total("intra"))


def bytes_in(state: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(state) if isinstance(leaf, Tensor))


def bytes_kept(model: nn.Module) -> dict[str, int]:
    units = [unit for unit in named_units(model) if isinstance(unit, StrategyUnit)]
    bases = [
        [unit for unit in {weight.holder for weight in base.weights} if isinstance(unit, FrozenUnit)]
        for base in FrozenBase.below(model)
    ]
    return {
        "errors": bytes_in([unit.errors.state_dict() for unit in units if unit.errors is not None]),
        "base": sum(unit.nbytes for units_of_base in bases for unit in units_of_base),
        "gathered": sum(buffer_nbytes(units_of_base[0]) for units_of_base in bases),
    }


def buffer_nbytes(unit: FrozenUnit) -> int:
    """Return the bytes of the two buffers that all units of a base take turns in, which no public name shows."""
    buffers = unit._buffers._current, unit._buffers._other
    return sum(buffer.memory.nbytes for buffer in buffers if buffer.memory is not None)


def planned(strategy: Strategy, micro_batches: int) -> dict[str, Any]:
    size = module_size(Model(strategy.frozen is not None))
    resolved = strategy.resolve(Topology(4, strategy.gpus_per_node))
    codec = strategy.frozen
    without_base = ModelSize(tuple(replace(unit, frozen=0) for unit in size.units))
    memory, less = (memory_of_units(each, resolved, micro_batches, FULL) for each in (size, without_base))
    of_base = memory.parameters + memory.shard - less.parameters - less.shard
    return {
        "sent": step_volume(size, resolved, micro_batches, FULL),
        "errors": memory.errors,
        "base": 0 if codec is None else of_base,
        "gathered": 0 if codec is None else gathers_of(size, codec, resolved).buffers,
    }


@pytest.mark.parametrize("case", CASES)
def test_planned_bytes_are_those_that_are_sent_and_kept(case: str, pool: Callable[[int], Pool]) -> None:
    for found in pool(4).run(counted_and_planned, CASES[case]):
        for letters in LETTERS:
            counted, planned = found[letters]
            assert counted == planned, letters
