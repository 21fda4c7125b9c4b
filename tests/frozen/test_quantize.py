"""quantize_frozen_params: what it takes, what it says, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import lora, models
from harness.adapter import STOCK, Adapter, Case
from harness.covering import over_adapters
from harness.messages import Refusal, Reply, assert_refused, attempt as attempt_refusal, collected
from harness.pool import Pool
from torch import nn

from fsdp_zpp import Int8, Strategy, quantize_frozen_params
from fsdp_zpp.frozen.modules import frozen_modules


def frozen_in_two_goes(adapter: Adapter) -> tuple[list[Any], list[tuple[str, str]]]:
    """In a worker: reports of a model whose head is frozen later, and what was logged."""
    net = lora.make_net(tied=False)
    net.head.requires_grad_(True)
    with collected() as records:
        first = quantize_frozen_params(net, Int8(256), gpus_per_node=2)
        net.head.requires_grad_(False)
        second = quantize_frozen_params(net, Int8(256), gpus_per_node=2)
        model = adapter.shard(net, Case(), STOCK)
        expected = lora.rounded_net(Int8(256))(models.batch(0, 0)[:, :-1] % 71)
        assert torch.equal(model(models.batch(0, 0)[:, :-1] % 71), expected)
    return [(r.weights, r.parameters, r.bytes_before, sorted(r.left)) for r in (first, second)], records


@over_adapters
def test_a_second_call_quantizes_what_was_frozen_since(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    (reports, records), *others = pool(4).run(frozen_in_two_goes, adapter)
    block, table = 66 * 91, 66 * 71
    assert reports == [
        (7, 6 * block + table, 4 * (6 * block + table), ["1-D"]),
        (1, table, 4 * table, ["1-D"]),
    ]
    assert [level for level, _ in records] == ["INFO", "INFO"]
    assert records[0][1].startswith(
        "Net: frozen base as int8(256), sharded inside nodes on 2 nodes x 2: 7 weights, 40,"
    )
    assert "left as they are: 9 1-D (blocks.0.norm.weight, ...)" in records[0][1]
    assert all(logged == [] for _, logged in others)


def logged(adapter: Adapter, frozen: bool) -> list[tuple[str, str]]:
    """In a worker: what a model that is quantized by its strategy logs."""
    with collected() as records:
        net = lora.make_net() if frozen else models.make_net()
        model = adapter.shard(net, Case(), Strategy.mixzpp(gpus_per_node=2))
        for _ in range(2):
            models.loss_of(model, models.batch(0, 0)).backward()
    return records


@over_adapters
def test_quantizing_by_a_strategy_logs_one_line(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    first, *others = pool(4).run(logged, adapter, True)
    assert others == [[]] * 3
    assert [level for level, _ in first] == ["INFO", "INFO"]
    assert "frozen base as int8(256), sharded inside nodes on 2 nodes x 2: 8 weights" in first[1][1]
    nothing, *_ = pool(4).run(logged, adapter, False)
    assert [line for level, line in nothing if level == "WARNING"] == [
        "Net: frozen=auto is NOT active: no frozen weight can or should be quantized"
    ]


def test_large_matrices_of_linear_and_embedding_are_quantized_and_the_rest_is_named() -> None:
    net = nn.Module()
    net.small, net.large = nn.Linear(8, 8), nn.Linear(64, 64)
    net.trainable, net.kernel = nn.Linear(64, 64), nn.Conv2d(16, 16, 5)
    net.bounded, net.double = nn.Embedding(64, 64, max_norm=1.0), nn.Linear(64, 64).double()
    net.parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64, bias=False))
    net.requires_grad_(False)
    net.trainable.requires_grad_(True)
    net.also = nn.Linear(64, 64, bias=False)
    net.also.weight = net.large.weight
    report = quantize_frozen_params(net)
    assert (report.weights, report.parameters) == (1, 4096)
    assert net.also.weight.frozen is net.large.weight.frozen
    assert {reason: names[0] for reason, names in report.left.items()} == {
        "smaller than 4096 values": "small.weight",
        "1-D": "small.bias",
        "of Conv2d, not nn.Linear or nn.Embedding": "kernel.weight",
        "an nn.Embedding with max_norm, which writes to it": "bounded.weight",
        "a Parameter of torch.float64": "double.weight",
        "of ParametrizationList, not nn.Linear or nn.Embedding": "parametrized.parametrizations.weight.original0",
    }


def refusals_of(adapter: Adapter) -> dict[str, Refusal]:
    """Calls that are refused, by name."""

    def quantized(*arguments: Any, net: Callable[[], Any] = lora.make_net, **options: Any) -> Callable[[], Any]:
        return lambda: quantize_frozen_params(net(), *arguments, **{"gpus_per_node": 2} | options)

    def on_meta() -> nn.Module:
        return lora.make_net().to("meta")

    mixzpp = Strategy.mixzpp(gpus_per_node=2)
    return {
        "codec": (quantized(8), TypeError, "codec must be a codec such as Int8(256)"),
        "placement": (quantized(placement="Q"), ValueError, "one of the scopes N, I, G, got 'Q'"),
        "nodes": (quantized(gpus_per_node=3), ValueError, "allowed are [1, 2, 4]"),
        "min_numel": (quantized(min_numel=0), ValueError, "min_numel must be a positive int, got 0"),
        "dtype": (quantized(dtype=torch.int8), ValueError, "dtype must be one of torch.float32"),
        "meta": (quantized(net=on_meta), ValueError, "embedding.weight is on the meta device"),
        "meta by strategy": (lambda: adapter.apply(on_meta(), mixzpp), ValueError, "is on the meta device"),
        "no such file": (quantized(checkpoint="nowhere.safetensors"), ValueError, "there is no nowhere.safetensors"),
        "wrapped": (
            quantized(
                net=lambda: adapter.shard(lora.make_net(), Case(), Strategy(gpus_per_node=2)), sync_module_states=True
            ),
            ValueError,
            "is sharded by FSDP already; call quantize_frozen_params(model, 'auto') before you wrap",
        ),
    }


def attempt(adapter: Adapter, name: str) -> Reply:
    """In a worker: how one call is refused."""
    return attempt_refusal(refusals_of(adapter)[name])


@pytest.mark.parametrize("name", list(refusals_of(STOCK)))  # type: ignore[arg-type]  # names alone
@over_adapters
def test_bad_input_is_refused_on_every_rank(pool: Callable[[int], Pool], adapter: Adapter, name: str) -> None:
    assert_refused(pool(4).run(attempt, adapter, name), refusals_of(adapter)[name])


def differently_seeded(scope: str) -> list[str]:
    """In a worker: what the first use of a base says whose weights are others on every rank, and a second try."""
    net = lora.make_net(seed=dist.get_rank())
    quantize_frozen_params(net, placement=scope, gpus_per_node=2)
    said = []
    for _ in range(2):
        with pytest.raises(ValueError, match="frozen base") as caught:
            net(models.batch(0, 0)[:, :-1] % 71)
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("scope", ["N", "I"])
def test_replicas_of_a_base_must_be_equal(pool: Callable[[int], Pool], scope: str) -> None:
    for first, retried in pool(4).run(differently_seeded, scope):
        assert "the frozen base of Net: " in first
        assert "they hold different weights" in first
        assert retried == first


def from_the_first_rank(adapter: Adapter) -> bool:
    """In a worker: whether a base that only rank 0 has comes out as rank 0's everywhere."""
    net = lora.make_net(seed=dist.get_rank())
    quantize_frozen_params(net, gpus_per_node=2, sync_module_states=True)
    weight = dict(frozen_modules_by_path(net))["blocks.0.up.base"].dequantize()
    oracle = lora.rounded_net(Int8(256)).blocks[0].up.base.weight
    return torch.equal(weight, oracle)


def frozen_modules_by_path(net: nn.Module) -> list[tuple[str, Any]]:
    """Frozen weights with their modules' paths."""
    return [(path, weight) for path, _, weight in frozen_modules(net)]


@over_adapters
def test_sync_module_states_takes_the_weights_of_rank_0(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    assert pool(4).run(from_the_first_rank, adapter) == [True] * 4
