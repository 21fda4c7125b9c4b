"""A frozen base computes what the dequantized model does, under both FSDPs, wherever it is placed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from harness import lora, models
from harness.adapter import STOCK, Adapter, Case
from harness.covering import ADAPTERS, over_each
from harness.pool import Pool
from torch import Tensor

from fsdp_zpp import NF4, Int4, Int8, Strategy, quantize_frozen_params
from fsdp_zpp.codecs.base import Codec


def build(adapter: Adapter, strategy: Strategy | None, case: Case, before: Codec | None = None, **options: Any) -> Any:
    """In a worker: a net with detours, quantized before it is wrapped or by its strategy."""
    net = lora.make_net(**dict(case.model))
    if case.checkpointing.startswith("inside"):
        models.recompute(net, case.checkpointing, lambda module: isinstance(module, models.Block))
    if before is not None:
        quantize_frozen_params(net, before, **options)
    return adapter.shard(net, case, strategy)


def logits_of(model: Any) -> Tensor:
    """Logits of one batch, the same on every rank."""
    return model(models.batch(99, 0, rank=0)[:, :-1] % model.embedding.num_embeddings).detach().cpu()


def same_logits(model: Any, codec: Codec) -> list[bool]:
    """In a worker: whether logits are the oracle's bit for bit, three times in a row."""
    with torch.no_grad():
        expected = logits_of(lora.rounded_net(codec))
        same = [torch.equal(logits_of(model), expected) for _ in range(2)]
    return [*same, torch.equal(logits_of(model), expected)]


def by_strategy(adapter: Adapter, scopes: str, codec: Codec) -> list[bool]:
    """In a worker: the same of a net that its strategy quantizes."""
    return same_logits(build(adapter, Strategy(scopes, frozen=codec, gpus_per_node=2), Case()), codec)


@over_each(adapter=ADAPTERS, scopes=["IGG", "GGG", "NNN"], codec=[Int8(256), Int8(64), Int4(32), NF4(64)])
def test_forward_equals_the_dequantized_model(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str, codec: Codec
) -> None:
    assert pool(4).run(by_strategy, adapter, scopes, codec) == [[True] * 3] * 4


def on_nodes(adapter: Adapter, strategy: Strategy | None, placement: str) -> list[bool]:
    """In a worker: the same of nets that are quantized before, on nodes of all sizes."""
    codec = Int8(256)
    same = []
    for gpus_per_node in (1, 2, 4):
        options = {"placement": placement, "gpus_per_node": gpus_per_node}
        same += same_logits(build(adapter, strategy, Case(), codec, **options), codec)
    return same


@over_each(
    adapter=ADAPTERS,
    placement=["N", "I", "G"],
    strategy={"stock": STOCK, "IIG": Strategy("IIG", gpus_per_node=2), "GGG": Strategy("GGG", gpus_per_node=2)},
)
def test_forward_is_the_same_quantized_before_wrapping_and_on_any_placement(
    pool: Callable[[int], Pool], adapter: Adapter, strategy: Any, placement: str
) -> None:
    assert pool(4).run(on_nodes, adapter, strategy, placement) == [[True] * 9] * 4


# ---- gradients and training


CASES = {
    "plain": Case(),
    "accumulated": Case(micro_batches=2),
    "one unit": Case(wrap_blocks=False),
    "tied": Case(model=(("tied", True),)),
    "twice": Case(model=(("twice", True),)),
    "inside reentrant": Case(checkpointing="inside reentrant"),
    "inside no_reentrant": Case(checkpointing="inside no_reentrant"),
    "outside reentrant": Case(checkpointing="outside reentrant"),
    "outside no_reentrant": Case(checkpointing="outside no_reentrant"),
}
STEPS = 4


def distances(adapter: Adapter, strategy: Strategy, case: Case) -> tuple[float, float]:
    """In a worker: how far the first gradients and the last weights are from the oracle's."""
    assert strategy.frozen is not None
    model, net = build(adapter, strategy, case), lora.rounded_net(strategy.frozen, **dict(case.model))
    optimizers = [models.make_optimizer("sgd", [p for p in m.parameters() if p.requires_grad]) for m in (model, net)]
    of_gradients = []
    for step in range(STEPS):
        for micro_batch in range(case.micro_batches):
            with adapter.micro_batch(model, micro_batch == case.micro_batches - 1, False):
                (models.loss_of(model, models.batch(step, micro_batch)) / case.micro_batches).backward()
        lora.mean_gradients(net, step, case.micro_batches)
        if step == 0:
            ours = lora.trainable(adapter.full_gradients(model))
            of_gradients.append(models.distance(ours, lora.gradients_of(net)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = lora.trainable(adapter.full_weights(model))
    return of_gradients[0], models.distance(weights, lora.values_of(net))


def _rows() -> list[Any]:
    """Each case under one adapter, and under the other where wide tests run; scopes in turn."""
    rows, scopes = [], cycle(["IGG", "GGG", "III", "NNG", "NNN"])
    for number, (name, case) in enumerate(CASES.items()):
        # fully_shard leaves it to the user in which order modules are wrapped, and tests always checkpoint inside.
        takes = [adapter for adapter in ADAPTERS if adapter.torch_name != "fully_shard" or "outside" not in name]
        for adapter in takes:
            marks = [] if adapter is takes[number % len(takes)] else [pytest.mark.wide]
            each = next(scopes)
            rows.append(pytest.param(adapter, each, case, id=f"{adapter} {each} {name}", marks=marks))
    return rows


@pytest.mark.parametrize(("adapter", "scopes", "case"), _rows())
def test_it_trains_as_the_dequantized_model(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str, case: Case
) -> None:
    strategy = Strategy(scopes, frozen=Int8(256), gpus_per_node=2)
    for gradients, weights in pool(4).run(distances, adapter, strategy, case):
        assert gradients <= 1e-5
        assert weights <= 1e-5  # rounding of sums in another order
