"""After an exception in a backward, and with its gradients cleared, training goes on as if it had not been."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import models
from harness.adapter import Adapter, Case
from harness.covering import SCOPES, WITH_FLAT, over_each
from harness.pool import Pool
from harness.training import train
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_zpp import Strategy


def fail(module: nn.Module, gradients: Any) -> None:
    raise FloatingPointError


def trained_around_a_failure(adapter: Adapter, scopes: str, micro_batches: int) -> float:
    """In a worker: the distance from a training without the step whose backward fails in some block."""
    case, weights = Case(steps=1, micro_batches=micro_batches), []
    for failing in (None, 0, 2):
        model = adapter.make(case, Strategy(scopes, gpus_per_node=2))
        optimizer = models.make_optimizer("sgd", model.parameters())
        for step in range(3):
            if failing is not None and step == 1:
                handle = model.blocks[failing].up.register_full_backward_pre_hook(fail)
                with adapter.micro_batch(model, micro_batches == 1, False), pytest.raises(FloatingPointError):
                    models.loss_of(model, models.batch(9, 9)).backward()
                handle.remove()
                if isinstance(model, FSDPModule):
                    model.reset_iter_state()
                else:
                    models.loss_of(model, models.batch(8, 8))  # or torch refuses no_sync()
                optimizer.zero_grad()
            train(adapter, model, case, optimizer=optimizer, first_step=step)
        weights.append(adapter.full_weights(model))
    return max(models.distance(each, weights[0]) for each in weights[1:])


@over_each(adapter=WITH_FLAT, scopes=SCOPES, micro_batches=[1, 3])
def test_training_goes_on_after_an_exception_in_a_backward(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str, micro_batches: int
) -> None:
    if adapter.torch_name == "fully_shard" and not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("torch's fully_shard recovers from exceptions since 2.13")
    assert pool(4).run(trained_around_a_failure, adapter, scopes, micro_batches) == [0.0] * 4
