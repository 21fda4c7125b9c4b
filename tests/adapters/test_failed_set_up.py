"""A first forward whose checks fail raises the same again when it is retried, until what is wrong is mended."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist
from harness import models
from harness.adapter import Adapter, Case
from harness.covering import over_adapters
from harness.pool import Pool
from harness.training import train
from torch import Tensor, nn

from fsdp_zpp import Strategy

CASE = Case(steps=2, micro_batches=2, clip=None)
REPLICAS = Strategy("III", gpus_per_node=2)


def with_torchs_own_last(adapter: Adapter) -> nn.Module:
    """A net whose nodes are replicas; torch alone manages its last block, which is initialized after the others."""
    net = models.make_net()
    for i, block in enumerate(net.blocks):
        net.blocks[i] = adapter.wrap(block, REPLICAS if i < len(net.blocks) - 1 else None)
    model: nn.Module = adapter.wrap(net, REPLICAS)
    return model


def retried(adapter: Adapter) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    """In a worker: what forwards raise while a node holds other weights; the weights after training once it holds the
    same, and those of a model that has never failed."""
    model = with_torchs_own_last(adapter)
    changed = adapter.local(next(p for p in model.parameters() if adapter.local(p).numel())).detach()
    right = changed.clone()
    changed.add_(dist.get_rank() // 2)
    texts = []
    for _ in range(3):
        with pytest.raises(ValueError, match="different weights") as caught:
            models.loss_of(model, models.batch(0, 0)).backward()
        texts.append(str(caught.value))
    changed.copy_(right)
    train(adapter, model, CASE)
    never_failed = with_torchs_own_last(adapter)
    train(adapter, never_failed, CASE)
    return texts, adapter.full_weights(model), adapter.full_weights(never_failed)


@over_adapters
def test_a_retry_raises_the_same_until_the_cause_is_mended(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    results = pool(4).run(retried, adapter)
    for texts, mended, never_failed in results:
        assert texts == [results[0][0][0]] * 3
        assert models.distance(mended, never_failed) == 0
