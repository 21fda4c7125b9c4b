"""What a frozen base costs: bytes at rest and on the wire, collectives, memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
from harness import lora, models
from harness.adapter import STOCK, Adapter, Case
from harness.covering import over_adapters
from harness.pool import Pool
from harness.wiretap import Wiretap, sent_in
from torch import Tensor, nn

from fsdp_zpp import Int8, Strategy, quantize_frozen_params, traffic
from fsdp_zpp.collectives.hops import Hop
from fsdp_zpp.frozen.base import FrozenBase
from fsdp_zpp.frozen.modules import frozen_modules

LARGE: dict[str, Any] = {"width": 256, "hidden": 688, "vocabulary": 512, "blocks": 4}


def step(model: Any, optimizer: Any, index: int = 0) -> None:
    """In a worker: one optimizer step."""
    models.loss_of(model, models.batch(index, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(adapter: Adapter, strategy: Any, sizes: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """In a worker: a sharded net and its optimizer."""
    net = lora.make_net(**sizes)
    if options:
        quantize_frozen_params(net, Int8(256), **options)
    model = adapter.shard(net, Case(), strategy)
    return model, models.make_optimizer("sgd", [p for p in model.parameters() if p.requires_grad])


def bytes_at_rest(adapter: Adapter, scope: str) -> tuple[int, int, int]:
    """In a worker: parameters of the base, and the bytes kept of it, as reported and as they are in storages."""
    net = lora.make_net(**LARGE)
    report = quantize_frozen_params(net, Int8(256), placement=scope, gpus_per_node=2)
    model = adapter.shard(net, Case(), STOCK)
    model(models.batch(0, 0)[:, :-1])
    units = {weight.holder for _, _, weight in frozen_modules(model)}
    return lora.total_parameters(lora.make_net(**LARGE)), report.bytes_after, sum(unit.nbytes for unit in units)


@pytest.mark.parametrize(("scope", "share"), [("N", 1), ("I", 1 / 2), ("G", 1 / 4)])
@over_adapters
def test_a_base_at_rest_takes_its_scopes_share(
    pool: Callable[[int], Pool], adapter: Adapter, scope: str, share: float
) -> None:
    for parameters, reported, held in pool(4).run(bytes_at_rest, adapter, scope):
        assert parameters * share < reported <= 1.02 * parameters * share
        # Under G what the first gather leaves in each node replaces the shard.
        assert held == (2 * reported if scope == "G" else reported)


def sent_in_steps(scope: str) -> list[tuple[Wiretap, dict[str, int]]]:
    """In a worker: what three backwards gather of a base under no FSDP, by the wiretap and by traffic()."""
    net = lora.make_net(**LARGE)
    quantize_frozen_params(net, Int8(256), placement=scope, gpus_per_node=2)
    sent = [sent_in(lambda: models.loss_of(net, models.batch(0, 0)).backward(), net, 2) for _ in range(3)]
    return [(tap, counted["gather"]) for tap, counted in sent]


@pytest.mark.parametrize("scope", ["N", "I", "G"])
def test_no_byte_between_nodes_after_the_first_step(pool: Callable[[int], Pool], scope: str) -> None:
    parameters = lora_parameters()
    for (first, counted), *others in pool(4).run(sent_in_steps, scope):
        assert first.total("inter") == counted["inter"]
        if scope == "G":
            assert parameters / 4 < counted["inter"] <= 1.02 * parameters / 4
        else:
            assert counted["inter"] == 0
        for tap, counted in others:
            assert tap.total("inter") == counted["inter"] == 0
            assert tap.total("intra") == counted["intra"]
            # Each rank sends its half at most twice, once for the forward and once for the backward.
            assert (counted["intra"] > 0) == (scope != "N")
            assert counted["intra"] <= 2 * 1.02 * parameters / 2


def sent_under_a_strategy(adapter: Adapter, scope: str) -> list[tuple[int, int]]:
    """In a worker: bytes between nodes in three steps, of the base and in all gathers."""
    strategy = Strategy(f"{scope}GG", weights=Int8(256), frozen=Int8(256), gpus_per_node=2)
    model, optimizer = trained(adapter, strategy, LARGE)
    base = next(iter(frozen_modules(model)))[2].base
    found = []
    for index in range(3):
        before = base.traffic.sent.get(("gather", "inter"), 0)
        tap, _ = sent_in(lambda index=index: step(model, optimizer, index), model, 2)
        found.append((base.traffic.sent.get(("gather", "inter"), 0) - before, tap.total("inter", "all_gather")))
    return found


@pytest.mark.parametrize("scope", ["N", "I", "G"])
@over_adapters
def test_no_byte_between_nodes_under_a_strategy(pool: Callable[[int], Pool], adapter: Adapter, scope: str) -> None:
    parameters = lora_parameters()
    for first, *others in pool(4).run(sent_under_a_strategy, adapter, scope):
        assert (first[0] > 0) == (scope == "G")
        for of_base, of_all in others:
            assert of_base == 0
            assert 0 < of_all < 0.05 * parameters  # the adapters', and what else FSDP has


def lora_parameters() -> int:
    """Values of the base."""
    net = models.Net(**LARGE)
    return sum(p.numel() for p in net.parameters() if p.dim() == 2)


def unit_labels(adapter: Adapter) -> list[tuple[str, int]]:
    """In a worker: units, and how many weights each has, of a model that is wrapped once, inside of another."""
    outer = nn.Sequential(lora.make_net())
    quantize_frozen_params(outer, gpus_per_node=2)
    outer[0] = adapter.shard(outer[0], Case(wrap_blocks=False), Strategy(gpus_per_node=2))
    models.loss_of(outer[0], models.batch(0, 0))
    (base,) = FrozenBase.below(outer)
    return [(unit.label, len(unit.weights)) for unit in base.units]


@over_adapters
def test_layers_of_a_model_that_is_wrapped_once_are_units_of_the_base(
    pool: Callable[[int], Pool], adapter: Adapter
) -> None:
    for labels in pool(4).run(unit_labels, adapter):
        assert sorted(labels) == [("frozen 0", 2), *((f"frozen 0.blocks.{index}", 2) for index in range(3))]


def gathers_in_a_step(adapter: Adapter, strategy: Strategy) -> tuple[int, int]:
    """In a worker: all-gathers of a warm step, of the frozen base and of everything."""
    model, optimizer = trained(adapter, strategy, LARGE)
    step(model, optimizer, 0)
    step(model, optimizer, 1)
    labels: list[str] = []
    all_gather = Hop.all_gather

    def counting(self: Hop, payload: Tensor, label: str, out: Tensor | None = None) -> Tensor:
        labels.append(label)
        return all_gather(self, payload, label, out)

    Hop.all_gather = counting  # type: ignore[method-assign]
    try:
        step(model, optimizer, 2)
    finally:
        Hop.all_gather = all_gather  # type: ignore[method-assign]
    return sum(label.startswith("frozen ") and "frozen of" not in label for label in labels), len(labels)


@over_adapters
def test_one_gather_a_unit_and_pass(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    strategy = Strategy("IGG", weights=Int8(256), frozen=Int8(256), gpus_per_node=2)
    blocks, others = LARGE["blocks"], 2  # embedding and head
    for frozen, every in pool(4).run(gathers_in_a_step, adapter, strategy):
        assert blocks <= frozen <= 2 * (blocks + others)
        # A unit of adapters takes two hops in the forward and one in the backward, and FSDP1 has a unit of what else
        # is frozen (norms, biases), whose secondary shard stays: two in all. Four adapters a block don't count.
        assert every - frozen <= blocks * (3 + 2) + 4


def floats_alive(adapter: Adapter) -> tuple[list[int], list[str]]:
    """In a worker: sizes of what is alive in floating point after a step, and gradients of what is frozen."""
    model, _ = trained(adapter, Strategy("IGG", frozen=Int8(256), gpus_per_node=2), LARGE)
    largest = 256 * 512

    def alive() -> list[int]:
        tensors = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter) and t.is_floating_point()]
        return [t.numel() for t in tensors if t.numel() >= largest and t.untyped_storage().nbytes() > 0]

    gc.collect()
    before = len(alive())
    loss = models.loss_of(model, models.batch(0, 0))
    during = alive()[before:]
    loss.backward()
    gc.collect()
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad and p.grad is not None]
    return during + alive()[before:], frozen


@over_adapters
def test_no_full_precision_copy_and_no_gradient(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    assert pool(4).run(floats_alive, adapter) == [([], [])] * 4


def test_traffic_counts_a_base_without_fsdp() -> None:
    net = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)
    quantize_frozen_params(net)
    assert traffic(net)["gather"] == {"inter": 0, "intra": 0}
