"""Optimizers in the backward: weights cross nodes as often as with a step after it, and are the same."""

from __future__ import annotations

from collections.abc import Callable

import torch
from harness import models
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, SCOPES, over_each
from harness.offload import offloading, without_pinning
from harness.pool import Pool
from harness.steps_in_backward import make
from harness.wiretap import sent_in
from torch import Tensor

from fsdp_zpp import Int4Delta, Int8, Strategy

STRATEGIES = {scopes: Strategy(scopes, gpus_per_node=2) for scopes in SCOPES}
STRATEGIES["zeropp"] = Strategy.zeropp(gpus_per_node=2)
STRATEGIES["deltas"] = Strategy("IGG", weights=Int4Delta(), gpus_per_node=2)
STRATEGIES["encoded, kept whole"] = Strategy("NGG", weights=Int8(64), gpus_per_node=2)

Sent = dict[tuple[str, str], int]


def trained(adapter: Adapter, strategy: Strategy, in_backward: bool) -> tuple[list[Sent], dict[str, Tensor]]:
    """Return what each step sends, by collective and hop, and the weights at the end."""
    optimizer = None
    if in_backward:
        model = make(adapter, strategy, torch.optim.SGD, lr=0.125)
    else:
        model = adapter.make(Case(), strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)

    def step(number: int) -> None:
        models.loss_of(model, models.batch(number, 0)).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    sent = [sent_in(lambda number=number: step(number), model, gpus_per_node=2)[0].sent for number in range(4)]
    return sent, adapter.full_weights(model)


def compared(adapter: Adapter, strategy: Strategy, offloads: bool) -> tuple[list[Sent], list[Sent], float]:
    """In a worker: what steps in the backward and those after it send, and the distance of their weights."""
    with without_pinning():
        used = offloading(adapter) if offloads else adapter
        (sent, weights), (expected, after) = (trained(used, strategy, in_backward) for in_backward in (True, False))
    return sent, expected, models.distance(weights, after)


@over_each(2, adapter=ADAPTERS, strategy=STRATEGIES, offloads=[False, True])
def test_weights_cross_nodes_once_a_step(
    pool: Callable[[int], Pool], adapter: Adapter, strategy: Strategy, offloads: bool
) -> None:
    for sent, expected, distance in pool(4).run(compared, adapter, strategy, offloads):
        assert sent == expected
        assert distance == 0.0
