"""What a frozen base costs: bytes at rest and on the wire, collectives, memory; and what it says and refuses."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import lora, models
from harness.adapter import STOCK, Adapter, Case
from harness.adapters import over_adapters
from harness.bytes_on_the_wire import sent_in
from harness.logs import collected
from harness.pool import Pool
from harness.refusals import Refusal, Reply, assert_refused, attempt as attempt_refusal
from harness.wiretap import Wiretap
from torch import Tensor, nn

from fsdp_zpp import Int8, Strategy, dequantize_frozen_params, quantize_frozen_params, traffic
from fsdp_zpp.frozen.module import frozen_modules
from fsdp_zpp.hop import Hop

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


# ---- bytes


def bytes_at_rest(adapter: Adapter, letter: str) -> tuple[int, int, int]:
    """In a worker: parameters of the base, and the bytes kept of it, as reported and as they are in storages."""
    net = lora.make_net(**LARGE)
    report = quantize_frozen_params(net, Int8(256), placement=letter, gpus_per_node=2)
    model = adapter.shard(net, Case(), STOCK)
    model(models.batch(0, 0)[:, :-1])
    units = {weight.held for _, _, weight in frozen_modules(model)}
    return lora.total_parameters(lora.make_net(**LARGE)), report.bytes_after, sum(unit.nbytes for unit in units)


@pytest.mark.parametrize(("letter", "share"), [("N", 1), ("I", 1 / 2), ("G", 1 / 4)])
@over_adapters
def test_bytes_at_rest(pool: Callable[[int], Pool], adapter: Adapter, letter: str, share: float) -> None:
    for parameters, reported, held in pool(4).run(bytes_at_rest, adapter, letter):
        assert parameters * share < reported <= 1.02 * parameters * share
        # Under G what the first gather leaves in each node replaces the shard.
        assert held == (2 * reported if letter == "G" else reported)


def sent_in_steps(letter: str) -> list[tuple[Wiretap, dict[str, int]]]:
    """In a worker: what three backwards gather of a base under no FSDP, by the wiretap and by traffic()."""
    net = lora.make_net(**LARGE)
    quantize_frozen_params(net, Int8(256), placement=letter, gpus_per_node=2)
    sent = [sent_in(lambda: models.loss_of(net, models.batch(0, 0)).backward(), net, 2) for _ in range(3)]
    return [(tap, counted["gather"]) for tap, counted in sent]


@pytest.mark.parametrize("letter", ["N", "I", "G"])
def test_no_byte_between_nodes_after_the_first_step(pool: Callable[[int], Pool], letter: str) -> None:
    parameters = lora_parameters()
    for (first, counted), *others in pool(4).run(sent_in_steps, letter):
        assert first.total("inter") == counted["inter"]
        if letter == "G":
            assert parameters / 4 < counted["inter"] <= 1.02 * parameters / 4
        else:
            assert counted["inter"] == 0
        for tap, counted in others:
            assert tap.total("inter") == counted["inter"] == 0
            assert tap.total("intra") == counted["intra"]
            # Each rank sends its half at most twice, once for the forward and once for the backward.
            assert (counted["intra"] > 0) == (letter != "N")
            assert counted["intra"] <= 2 * 1.02 * parameters / 2


def sent_under_a_strategy(adapter: Adapter, letter: str) -> list[tuple[int, int]]:
    """In a worker: bytes between nodes in three steps, of the base and in all gathers."""
    strategy = Strategy(f"{letter}GG", weights=Int8(256), frozen=Int8(256), gpus_per_node=2)
    model, optimizer = trained(adapter, strategy, LARGE)
    base = next(iter(frozen_modules(model)))[2].base
    found = []
    for index in range(3):
        before = base.traffic.sent.get(("gather", "inter"), 0)
        tap, _ = sent_in(lambda index=index: step(model, optimizer, index), model, 2)
        found.append((base.traffic.sent.get(("gather", "inter"), 0) - before, tap.total("inter", "all_gather")))
    return found


@pytest.mark.parametrize("letter", ["N", "I", "G"])
@over_adapters
def test_no_byte_between_nodes_under_a_strategy(pool: Callable[[int], Pool], adapter: Adapter, letter: str) -> None:
    parameters = lora_parameters()
    for first, *others in pool(4).run(sent_under_a_strategy, adapter, letter):
        assert (first[0] > 0) == (letter == "G")
        for of_base, of_all in others:
            assert of_base == 0
            assert 0 < of_all < 0.05 * parameters  # the adapters', and what else FSDP has


def lora_parameters() -> int:
    """Values of the base."""
    net = models.Net(**LARGE)
    return sum(p.numel() for p in net.parameters() if p.dim() == 2)


# ---- collectives and memory


def unit_labels(adapter: Adapter) -> list[tuple[str, int]]:
    """In a worker: units, and how many weights each has, of a model that is wrapped once, inside of another."""
    outer = nn.Sequential(lora.make_net())
    quantize_frozen_params(outer, gpus_per_node=2)
    outer[0] = adapter.shard(outer[0], Case(wrap_blocks=False), Strategy(gpus_per_node=2))
    models.loss_of(outer[0], models.batch(0, 0))
    base = next(iter(frozen_modules(outer)))[2].base
    return [(unit.label, len(unit.weights)) for unit in base.units]


@over_adapters
def test_units_of_a_model_that_is_wrapped_once(pool: Callable[[int], Pool], adapter: Adapter) -> None:
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


# ---- what is quantized, and what it says


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
def test_report_and_second_call(pool: Callable[[int], Pool], adapter: Adapter) -> None:
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
def test_one_line_a_model(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    first, *others = pool(4).run(logged, adapter, True)
    assert others == [[]] * 3
    assert [level for level, _ in first] == ["INFO", "INFO"]
    assert "frozen base as int8(256), sharded inside nodes on 2 nodes x 2: 8 weights" in first[1][1]
    nothing, *_ = pool(4).run(logged, adapter, False)
    assert [line for level, line in nothing if level == "WARNING"] == [
        "Net: frozen=int8(256) is NOT active: no frozen weight was worth it"
    ]


def test_selection() -> None:
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


def test_quantized_module_is_one_of_its_kind() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(101, 64), nn.Linear(64, 96, bias=False)).requires_grad_(False)
    plain = copy.deepcopy(net)
    quantize_frozen_params(net, Int8(64))
    layer, tokens = net[1], torch.arange(101)
    assert isinstance(layer, nn.Linear)
    assert (layer.weight.shape, layer.weight.dtype, layer.weight.device.type) == ((96, 64), torch.float32, "cpu")
    assert list(net.state_dict()) == list(net.parameters()) == list(net.buffers()) == []
    # A step of 1/127 of a block's largest value, rounded.
    bound = plain[1].weight.abs().max().item() / 254 + 1e-6
    torch.testing.assert_close(layer.weight + 0, plain[1].weight.data, rtol=0, atol=bound)
    expected = net(tokens)
    copied = copy.deepcopy(net)
    assert type(copied[1]) is nn.Linear
    assert torch.equal(copied(tokens), expected)
    assert torch.equal(net[1](expected.new_ones(64)), copied[1](expected.new_ones(64)))
    assert net.to(torch.bfloat16)(tokens).dtype == torch.bfloat16
    assert torch.equal(net.to(torch.float32)(tokens), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(net(tokens), copied(tokens))
    assert dequantize_frozen_params(net) == 2
    assert type(net[1]) is nn.Linear
    assert torch.equal(net(tokens), expected)


WRITES: dict[str, tuple[Callable[[nn.Linear], Any], str]] = {
    "in place": (lambda layer: layer.weight.add_(1), "can't be written to"),
    "data": (lambda layer: setattr(layer.weight, "data", torch.zeros(1)), "can't be written to"),
    "merge": (lambda layer: layer.weight.data.__iadd__(torch.zeros(1)), "can't be written to"),
    "assign": (lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros(1))), "can't be written to"),
    "reset": (lambda layer: layer.reset_parameters(), "can't be written to"),
    "unfreeze": (lambda layer: layer.weight.requires_grad_(), "can't be trained"),
    "unfreeze by attribute": (lambda layer: setattr(layer.weight, "requires_grad", True), "can't be trained"),
    "unfreeze the layer": (lambda layer: layer.requires_grad_(), "can't be trained"),
}


@pytest.mark.parametrize(("write", "message"), WRITES.values(), ids=WRITES)
def test_writes_are_refused(write: Callable[[nn.Linear], Any], message: str) -> None:
    net = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)
    quantize_frozen_params(net)
    with pytest.raises(RuntimeError, match=message):
        write(net[0])


# ---- errors


def refusals_of(adapter: Adapter) -> dict[str, Refusal]:
    """Calls that are refused, by name."""

    def quantized(*arguments: Any, net: Callable[[], Any] = lora.make_net, **options: Any) -> Callable[[], Any]:
        return lambda: quantize_frozen_params(net(), *arguments, **{"gpus_per_node": 2} | options)

    def on_meta() -> nn.Module:
        return lora.make_net().to("meta")

    mixzpp = Strategy.mixzpp(gpus_per_node=2)
    return {
        "codec": (quantized(8), TypeError, "codec must be a codec such as Int8(256)"),
        "placement": (quantized(placement="Q"), ValueError, "one of the letters N, I, G, got 'Q'"),
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
            "is sharded by FSDP already; call quantize_frozen_params(model, Int8(block=256)) before you wrap",
        ),
    }


def attempt(adapter: Adapter, name: str) -> Reply:
    """In a worker: how one call is refused."""
    return attempt_refusal(refusals_of(adapter)[name])


@pytest.mark.parametrize("name", list(refusals_of(STOCK)))  # type: ignore[arg-type]  # names alone
@over_adapters
def test_bad_input(pool: Callable[[int], Pool], adapter: Adapter, name: str) -> None:
    assert_refused(pool(4).run(attempt, adapter, name), refusals_of(adapter)[name])


def differently_seeded(letter: str) -> str:
    """In a worker: what the first use of a base says whose weights are others on every rank."""
    net = lora.make_net(seed=dist.get_rank())
    quantize_frozen_params(net, placement=letter, gpus_per_node=2)
    try:
        net(models.batch(0, 0)[:, :-1] % 71)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("letter", ["N", "I"])
def test_replicas_must_be_equal(pool: Callable[[int], Pool], letter: str) -> None:
    for said in pool(4).run(differently_seeded, letter):
        assert "the frozen base of Net: " in said
        assert "they hold different weights" in said


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
def test_weights_that_only_the_first_rank_has(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    assert pool(4).run(from_the_first_rank, adapter) == [True] * 4


def test_traffic_of_a_base_alone() -> None:
    net = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)
    quantize_frozen_params(net)
    assert traffic(net)["gather"] == {"inter": 0, "intra": 0}
