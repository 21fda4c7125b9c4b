"""What a model sends, by the wiretap and by traffic(), whichever adapter shards it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from fsdp_zpp import Int4, Int8, Strategy, invalidate, traffic

from . import models
from .wiretap import Wiretap, wiretap

# Large enough for scales and padding to weigh what they do in a real model. The root has no weight to speak of.
LARGE = (("blocks", 6), ("width", 128), ("hidden", 512), ("vocabulary", 3))

STRATEGIES = {
    "GGG": Strategy("GGG"),
    "hpZ": Strategy("IGG"),
    "qwZ": Strategy("GGG", weights=Int8(64)),
    "qgZ": Strategy("GGG", gradients=Int4(32)),
    "qgZ-full-inside": Strategy("GGG", gradients=Int8(256), intra_gradients=None),
    "zeropp": Strategy.zeropp(),
}

Sent = tuple[Wiretap, dict[str, dict[str, int]]]


def sent_in(step: Callable[[], object], model: nn.Module, gpus_per_node: int, counts: bool = True) -> Sent:
    """In a worker: what ``step()`` sends, by the wiretap and, where ours ``counts``, by traffic()."""
    before: Any = traffic(model) if counts else {}
    with wiretap(gpus_per_node) as tap:
        step()
    after: Any = traffic(model) if counts else {}
    return tap, {kind: {hop: n - before[kind][hop] for hop, n in hops.items()} for kind, hops in after.items()}


def assert_counted(results: list[Sent], strategy: Strategy, world: int, gpus_per_node: int) -> None:
    """traffic() equals the wiretap for all that is ours to send."""
    gathers = gpus_per_node < world or strategy.weights is not None
    reduces = gpus_per_node < world or strategy.gradient_codecs[0] is not None
    for tap, own in results:
        for level in ("inter", "intra"):
            # On one node without a codec, torch's own collectives do it all.
            assert own["gather"][level] == (tap.total(level, "all_gather") if gathers else 0)
            assert own["reduce"][level] == tap.total(level, "all_to_all")
        assert bool(tap.total("intra", "reduce_scatter") + tap.total("inter", "reduce_scatter")) != reduces


def taps_of_phases(
    model: nn.Module, micro_batch_context: Callable[[int], AbstractContextManager[Any]]
) -> dict[str, Wiretap]:
    """In a worker: what each phase of a step with two micro-batches sends, and evaluations after it."""
    taps = {}
    for micro_batch in range(2):
        with micro_batch_context(micro_batch):
            with wiretap(2) as taps[f"forward {micro_batch}"]:
                loss = models.loss_of(model, models.batch(1, micro_batch))
            with wiretap(2) as taps[f"backward {micro_batch}"]:
                loss.backward()
    for phase in ("eval", "eval again"):
        with torch.no_grad(), wiretap(2) as taps[phase]:
            models.loss_of(model, models.batch(2, 0))
    invalidate(model)
    with torch.no_grad(), wiretap(2) as taps["invalidated"]:
        models.loss_of(model, models.batch(2, 0))
    return taps
