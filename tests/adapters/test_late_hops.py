"""Hops that take long change no weights: nothing reads what another stream has yet to make, or reuses its memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import models
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, over_pairs
from harness.fsdp2 import Fsdp2
from harness.late_hops import CYCLES, late_hops
from harness.pool import Pools, device_type
from harness.strategies import FOURTEEN, PRESETS
from harness.training import train
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_zpp import Strategy, fully_shard, invalidate

pytestmark = pytest.mark.skipif(device_type() == "cpu", reason="on a CPU all is done in turn")

WITHOUT_CODECS = {scopes: Strategy(scopes, gpus_per_node=2) for scopes in FOURTEEN}
STRATEGIES = WITHOUT_CODECS | {name: replace(preset, gpus_per_node=2) for name, preset in PRESETS.items()}
ZEROPP = Strategy.zeropp(gpus_per_node=2)
CASE = Case(micro_batches=2, steps=3)


def compared(adapter: Adapter, strategy: Strategy, level: str) -> list[str]:
    """In a worker: the weights that differ once hops of a level have taken long."""
    weights: list[dict[str, Any]] = []
    for levels in ((), (level,)):
        model = adapter.make(CASE, strategy)
        with late_hops(*levels):
            train(adapter, model, CASE)
        weights.append(adapter.full_weights(model))
    return [name for name, value in weights[0].items() if not torch.equal(value, weights[1][name])]


@over_pairs(rest=False, adapter=ADAPTERS, strategy=STRATEGIES, level=("inter", "intra"))
def test_late_hops_change_no_weights(pool: Pools, adapter: Adapter, strategy: Strategy, level: str) -> None:
    assert pool(4).run(compared, adapter, strategy, level) == [[]] * 4


# ---- what torch lets a user of fully_shard do


def with_a_hook_in_a_stream(levels: tuple[str, ...]) -> dict[str, Tensor]:
    """In a worker: weights of a training whose all-reduce hooks run in a stream of the user's."""
    model = Fsdp2().make(CASE, ZEROPP)
    stream = torch.cuda.Stream()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(lambda gradient: None, stream=stream)
    with late_hops(*levels):
        train(Fsdp2(), model, CASE)
    return Fsdp2().full_weights(model)


def test_a_hook_may_have_a_stream_of_its_own(pool: Pools) -> None:
    in_time, late = (pool(4).run(with_a_hook_in_a_stream, levels) for levels in ((), ("inter",)))
    for ours, theirs in zip(in_time, late, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def with_slow_layers(cycles: int) -> list[float]:
    """In a worker: losses of a frozen bf16 base with trained layers in fp32, whose layers compute for long."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256).bfloat16().requires_grad_(False), Cast(cycles)) for _ in range(4)]
    model = nn.Sequential(*layers).to(models.device())
    for layer in model:
        fully_shard(layer, strategy=ZEROPP)
    fully_shard(model, strategy=ZEROPP)
    losses = []
    for step in range(3):
        x = torch.randn(8, 256, generator=torch.Generator().manual_seed(step)).bfloat16().to(models.device())
        loss = model(x).float().square().mean()
        loss.backward()
        invalidate(model)  # after which torch's own copy of what was gathered is made once more
        losses.append(loss)
    return [loss.item() for loss in losses]


class Cast(nn.Module):
    """A trained layer in fp32 between others in bf16, which computes for long."""

    def __init__(self, cycles: int) -> None:
        super().__init__()
        self.layer, self.cycles = nn.Linear(256, 256), cycles

    def forward(self, x: Tensor) -> Tensor:
        torch.cuda._sleep(self.cycles)
        return self.layer(x.float()).bfloat16()


def test_slow_layers_compute_with_their_own_weights(pool: Pools) -> None:
    assert pool(4).run(with_slow_layers, CYCLES) == pool(4).run(with_slow_layers, 1)
