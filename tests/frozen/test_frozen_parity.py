"""A frozen base computes what the dequantized model does, under both FSDPs, wherever it is placed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import lora, models
from harness.adapter import STOCK, Adapter, Case
from harness.covering import ADAPTERS, over_each, over_pairs
from harness.pool import Pool
from torch import Tensor

from fsdp_zpp import NF4, Int4, Int8, Strategy, quantize_frozen_params
from fsdp_zpp.codecs.base import Codec

CODECS = [Int8(256), Int8(64), Int4(32), NF4(64)]


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


# ---- forward, bit for bit


def same_logits(adapter: Adapter, strategy: Strategy | None, codec: Codec, before: bool, options: Any) -> list[bool]:
    """In a worker: whether logits are the oracle's, three times in a row."""
    model = build(adapter, strategy, Case(), codec if before else None, **options)
    with torch.no_grad():
        expected = logits_of(lora.rounded_net(codec))
        same = [torch.equal(logits_of(model), expected) for _ in range(2)]
    return [*same, torch.equal(logits_of(model), expected)]


@over_pairs(adapter=ADAPTERS, scopes=["IGG", "GGG", "NNN"], codec=CODECS)
def test_forward_equals_the_dequantized_model(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str, codec: Codec
) -> None:
    strategy = Strategy(scopes, frozen=codec, gpus_per_node=2)
    for same in pool(4).run(same_logits, adapter, strategy, codec, False, {}):
        assert all(same)


@over_pairs(
    adapter=ADAPTERS,
    strategy={"stock": STOCK, "IIG": Strategy("IIG", gpus_per_node=2)},
    placement=["N", "I", "G"],
    gpus_per_node=[1, 2, 4],
)
def test_forward_is_the_same_quantized_before_wrapping_and_on_any_placement(
    pool: Callable[[int], Pool], adapter: Adapter, strategy: Any, placement: str, gpus_per_node: int
) -> None:
    options = {"placement": placement, "gpus_per_node": gpus_per_node}
    for same in pool(4).run(same_logits, adapter, strategy, Int8(256), True, options):
        assert all(same)


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


def distances(adapter: Adapter, strategy: Strategy, case: Case, steps: int) -> tuple[float, float]:
    """In a worker: how far the first gradients and the last weights are from the oracle's."""
    assert strategy.frozen is not None
    model, net = build(adapter, strategy, case), lora.rounded_net(strategy.frozen, **dict(case.model))
    optimizers = [models.make_optimizer("sgd", [p for p in m.parameters() if p.requires_grad]) for m in (model, net)]
    of_gradients = []
    for step in range(steps):
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


# fully_shard leaves it to the user in which order modules are wrapped, and tests always checkpoint inside.
OVER_CASES = [
    pytest.param(adapter, case, id=f"{adapter} {name}")
    for adapter in ADAPTERS
    for name, case in CASES.items()
    if adapter.torch_name != "fully_shard" or not name.startswith("outside")
]


@pytest.mark.parametrize(("adapter", "case"), OVER_CASES)
def test_gradients_equal_the_dequantized_models(pool: Callable[[int], Pool], adapter: Adapter, case: Case) -> None:
    strategy = Strategy("IGG", frozen=Int8(256), gpus_per_node=2)
    for gradients, weights in pool(4).run(distances, adapter, strategy, case, 2):
        assert gradients <= 1e-5
        assert weights <= 1e-5


@over_each(adapter=ADAPTERS, scopes=["IGG", "GGG", "III", "NNG", "NNN"])
def test_trains_as_the_dequantized_model(pool: Callable[[int], Pool], adapter: Adapter, scopes: str) -> None:
    strategy = Strategy(scopes, frozen=Int8(256), gpus_per_node=2)
    for gradients, weights in pool(4).run(distances, adapter, strategy, Case(), 8):
        assert gradients <= 1e-5
        assert weights <= 1e-5  # rounding of sums in another order, over eight steps
