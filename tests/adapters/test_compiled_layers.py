"""Layers compiled before they are sharded train as eager ones: a strategy or a frozen base breaks no graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import llama, models
from harness.adapter import STOCK, Adapter, Case, Fsdp1, Fsdp2
from harness.covering import ADAPTERS, over_adapters, over_each
from harness.messages import Reply, attempt
from harness.pool import Pools
from harness.training import train, trained_weights
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fsdp_zpp import Int8, Strategy, quantize_frozen_params


def compiled(adapter: Adapter, case: Case, strategy: Strategy | None) -> tuple[dict[str, Tensor], int]:
    """In a worker: every block compiled, then sharded; the weights, and how many graphs that came to."""
    torch._dynamo.reset()
    counters.clear()
    net = models.make_net()
    for block in net.blocks:
        block.compile(backend="aot_eager")
    model = adapter.shard(net, case, strategy)
    train(adapter, model, case)
    return adapter.full_weights(model), counters["stats"]["unique_graphs"]


@over_each(rest=False, adapter=ADAPTERS, scopes=["IGG", "NNG"])
def test_compiled_blocks_train_as_stock_in_as_many_graphs(pool: Pools, adapter: Adapter, scopes: str) -> None:
    case = Case(steps=2, micro_batches=2)
    strategy = Strategy(scopes, gpus_per_node=2)
    ours, stock = pool(4).run(compiled, adapter, case, strategy), pool(4).once(compiled, adapter, case, STOCK)
    for (our_weights, our_graphs), (weights, graphs) in zip(ours, stock, strict=True):
        assert models.distance(our_weights, weights) <= 1e-6
        assert our_graphs == graphs > 0


@over_adapters
def test_compiled_blocks_with_codecs_train_as_eager_ones(pool: Pools, adapter: Adapter) -> None:
    """A compiled layer may add up in another order, on which a rounding can depend: far less than codecs round."""
    case, strategy = Case(steps=1), Strategy.zeropp(gpus_per_node=2)
    ours, _ = pool(4).run(compiled, adapter, case, strategy)[0]
    eager, stock = (pool(4).run(trained_weights, adapter, case, other)[0] for other in (strategy, STOCK))
    assert models.distance(ours, eager) <= 0.05 * models.distance(eager, stock)


def losses(compiled: bool) -> list[float]:
    """In a worker: the losses of a few steps and the norm of logits."""
    torch._dynamo.reset()
    base = llama.make_base()
    base.model.layers = base.model.layers[:1]
    model = llama.adapt(base, {"default": "dora"})
    quantize_frozen_params(model, Int8(256), gpus_per_node=2)
    if compiled:
        for layer in llama.layers_of(model):
            layer.compile(backend="aot_eager")
    # Without codecs for what is trained: rounding to 4 bits would make steps of the last bits.
    model = llama.shard(Fsdp2(), model, Strategy("IGG", gpus_per_node=2))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    return [*llama.train(model, optimizer), llama.logits_of(model).double().norm().item()]


def test_compiled_layers_on_a_frozen_base_train_as_eager_ones(pool: Pools) -> None:
    compiled, eager = (pool(2).run(losses, which) for which in (True, False))
    for ours, expected in zip(compiled, eager, strict=True):
        # A compiled backward adds up in another order, which on some CPUs changes the last bits of fp32.
        assert ours == pytest.approx(expected, rel=1e-5)


# ---- whole models


def _around(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.compile(lambda tokens: model(tokens) * 1.0, backend="aot_eager")


def _itself(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


def refusal_of_a_whole_model(adapter: Adapter, compiled: Callable[[nn.Module], Any]) -> Reply:
    """In a worker: how the first forward of a compiled model is refused."""
    torch._dynamo.reset()
    forward = compiled(adapter.make(Case(), Strategy("IGG", gpus_per_node=2)))
    return attempt((lambda: forward(models.batch(0, 0)), RuntimeError, ""))


@over_each(rest=False, adapter=[Fsdp1(), Fsdp1(use_orig_params=False)], compiled=[_itself, _around])
def test_a_whole_fsdp1_model_is_refused_on_every_rank(
    pool: Pools, adapter: Adapter, compiled: Callable[[nn.Module], Any]
) -> None:
    for kind, text, sent in pool(4).run(refusal_of_a_whole_model, adapter, compiled):
        assert kind in ("RuntimeError", "Unsupported")
        assert "compile each layer before you wrap the model" in text
        assert sent == 0


def losses_of_a_whole_model(compiled: bool) -> list[float]:
    torch._dynamo.reset()
    case = Case(steps=2)
    model = Fsdp2().make(case, Strategy("IGG", gpus_per_node=2))
    if compiled:
        model.compile(backend="aot_eager")
    return train(Fsdp2(), model, case)


def test_a_whole_fsdp2_model_trains_as_the_eager_one(pool: Pools) -> None:
    compiled, eager = (pool(4).run(losses_of_a_whole_model, each) for each in (True, False))
    for ours, expected in zip(compiled, eager, strict=True):
        assert ours == pytest.approx(expected, rel=1e-5)
