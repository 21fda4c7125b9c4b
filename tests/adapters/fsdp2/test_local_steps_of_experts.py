"""Nodes that train a mixture on their own, beside expert and tensor parallelism: exchanges leave all copies equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from harness.pool import Pool
from test_other_axes import AXES, WORLD, Training
from torch.distributed.fsdp._fully_shard import _fsdp_common

from fsdp_zpp import Int4, Int8, LocalSteps, LoCo, Strategy, exchange_weights, fully_shard

STEPS = 6
CODED = {
    "int8, moments": LocalSteps(2, codec=Int8(64), moments_every=1),
    "int4, feedback": LocalSteps(2, codec=Int4(32), error_feedback=LoCo(dtype=Int8(128)), overlap=1),
}


def trained(axis_name: str, local_steps: LocalSteps) -> tuple[bool, list[float]]:
    """In a worker: whether copies differ after a training and a last exchange, and the losses."""
    axis = AXES[axis_name]
    strategy = Strategy.diloco(local_steps=local_steps, gpus_per_node=axis.gpus_per_node)

    def wrap(module: Any, **arguments: Any) -> Any:
        return fully_shard(module, strategy=strategy, **arguments)

    training = Training(axis, wrap)
    losses = [loss for step in range(STEPS) for loss in training.step(step)]
    exchange_weights(training.model)
    return training.copies_differ(), losses


@pytest.mark.skipif(not hasattr(_fsdp_common, "ShardPlacementResult"), reason="torch has no mesh for a parameter")
@pytest.mark.parametrize(
    ("axis", "name"),
    [
        ("tp x ep", "int4, feedback"),
        pytest.param("tp x ep", "int8, moments", marks=pytest.mark.wide),
        pytest.param("ep", "int4, feedback", marks=pytest.mark.wide),
    ],
)
def test_all_copies_of_a_mixture_are_equal(pool: Callable[[int], Pool], axis: str, name: str) -> None:
    uncoded = replace(CODED[name], codec=None, error_feedback=None)
    coded, exact = (pool(WORLD).run(trained, axis, local_steps) for local_steps in (CODED[name], uncoded))
    for (differ, losses), (_, expected) in zip(coded, exact, strict=True):
        assert not differ
        assert losses == pytest.approx(expected, rel=2e-2)
        assert losses != expected
