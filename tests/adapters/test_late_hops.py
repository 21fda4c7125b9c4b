"""Hops that take long change no weights: nothing reads what another stream has yet to make, or reuses its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, over_pairs
from harness.late_hops import late_hops
from harness.pool import Pool, device_type
from harness.strategies import FOURTEEN, PRESETS
from harness.training import train

from fsdp_zpp import Strategy

pytestmark = pytest.mark.skipif(device_type() == "cpu", reason="on a CPU all is done in turn")

WITHOUT_CODECS = {scopes: Strategy(scopes, gpus_per_node=2) for scopes in FOURTEEN}
STRATEGIES = WITHOUT_CODECS | {name: replace(preset, gpus_per_node=2) for name, preset in PRESETS.items()}
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
def test_late_hops_change_no_weights(
    pool: Callable[[int], Pool], adapter: Adapter, strategy: Strategy, level: str
) -> None:
    assert pool(4).run(compared, adapter, strategy, level) == [[]] * 4
