"""Optimizers in the backward: nodes send what they send with a step after it, and weights end equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import models
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, over_pairs
from harness.offload import offloading, without_pinning
from harness.pool import Pool
from harness.steps_in_backward import make
from harness.wiretap import sent_in
from torch import Tensor

from fsdp_zpp import Int4, Int4Delta, LocalSteps, Strategy

TWO: Any = {"gpus_per_node": 2}
STRATEGIES = {
    **{scopes: Strategy(scopes, **TWO) for scopes in ("IGG", "IIG", "NNG", "NNN")},
    "zeropp": Strategy.zeropp(**TWO),
    "deltas": Strategy("IGG", weights=Int4Delta(), **TWO),
    "errors": Strategy.loco(**TWO),
    "local steps": Strategy("III", local_steps=LocalSteps(2, codec=Int4(64)), **TWO),
    "overlapped local steps": Strategy("NNN", local_steps=LocalSteps(2, overlap=1), **TWO),
}

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


@over_pairs(rest=False, adapter=ADAPTERS, strategy=STRATEGIES, offloads=[False, True])
def test_steps_in_the_backward_send_what_others_do(
    pool: Callable[[int], Pool], adapter: Adapter, strategy: Strategy, offloads: bool
) -> None:
    for sent, expected, distance in pool(4).run(compared, adapter, strategy, offloads):
        assert sent == expected
        assert distance == 0.0
