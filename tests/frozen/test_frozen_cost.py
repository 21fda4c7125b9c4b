"""The cost of a frozen base: bytes at rest and on the wire, gathers, decodes, memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import llama, lora, models
from harness.adapter import Adapter, Case
from harness.covering import ADAPTERS, over_each
from harness.pool import Pools
from harness.wiretap import Wiretap, sent_in
from torch import Tensor, nn

from fsdp_zpp import NF4, Int4, Int8, Strategy, quantize_frozen_params
from fsdp_zpp.codecs.base import Codec
from fsdp_zpp.collectives.hops import Hop
from fsdp_zpp.frozen.base import FrozenBase
from fsdp_zpp.frozen.modules import frozen_modules
from fsdp_zpp.frozen.weight import FrozenWeight
from fsdp_zpp.kernels import dequantize_nf4_rows, dequantize_rows, reference
from fsdp_zpp.kernels.nf4 import LEVELS, levels_on

LARGE: dict[str, Any] = {"width": 256, "hidden": 688, "vocabulary": 512}
SHARES = {"N": 1.0, "I": 1 / 2, "G": 1 / 4}


@contextmanager
def gathers() -> Iterator[list[str]]:
    """In a worker: the labels of what is gathered in this context, one a hop."""
    labels: list[str] = []
    all_gather = Hop.all_gather

    def noting(self: Hop, payload: Tensor, label: str, out: Tensor | None = None) -> Tensor:
        labels.append(label)
        return all_gather(self, payload, label, out)

    with patch.object(Hop, "all_gather", noting):
        yield labels


# ---- bytes


def sent_in_steps(scope: str) -> tuple[int, int, int, list[tuple[Wiretap, dict[str, int]]]]:
    """In a worker: the size of a base under no FSDP, as reported and held, and what three backwards gather of it."""
    net = lora.make_net(**LARGE)
    parameters = sum(p.numel() for p in net.parameters() if p.dim() == 2 and not p.requires_grad)
    report = quantize_frozen_params(net, Int8(256), placement=scope, gpus_per_node=2)
    sent = [sent_in(lambda: models.loss_of(net, models.batch(0, 0)).backward(), net, 2) for _ in range(3)]
    held = sum(unit.nbytes for unit in {weight.holder for _, _, weight in frozen_modules(net)})
    return parameters, report.bytes_after, held, [(tap, counted["gather"]) for tap, counted in sent]


@pytest.mark.parametrize(("scope", "share"), SHARES.items())
def test_a_base_takes_its_scopes_share_and_crosses_nodes_once(pool: Pools, scope: str, share: float) -> None:
    for parameters, reported, held, ((first, counted), *others) in pool(4).run(sent_in_steps, scope):
        assert parameters * share < reported <= 1.02 * parameters * share
        # Under G what the first gather leaves in each node replaces the shard.
        assert held == (2 * reported if scope == "G" else reported)
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


def large_floats() -> list[int]:
    """In a worker: sizes of what is alive in floating point and as large as the base's largest weights."""
    tensors = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter) and t.is_floating_point()]
    largest = LARGE["width"] * LARGE["vocabulary"]
    return [t.numel() for t in tensors if t.numel() >= largest and t.untyped_storage().nbytes() > 0]


def under_a_strategy(adapter: Adapter, scope: str) -> dict[str, Any]:
    """In a worker: what three steps under a strategy that quantizes send, gather and keep."""
    net = lora.make_net(**LARGE)
    strategy = Strategy(f"{scope}GG", weights=Int8(256), frozen=Int8(256), gpus_per_node=2)
    model = adapter.shard(net, Case(), strategy)
    optimizer = models.make_optimizer("sgd", [p for p in model.parameters() if p.requires_grad])
    base = next(iter(frozen_modules(model)))[2].base
    found: dict[str, Any] = {"sent": [], "dense": []}
    gc.collect()
    before = len(large_floats())

    def step() -> None:
        loss = models.loss_of(model, models.batch(len(found["sent"]), 0))
        is_last = len(found["sent"]) == 2
        found["dense"] += large_floats()[before:] if is_last else []
        loss.backward()
        if is_last:
            gc.collect()
            found["dense"] += large_floats()[before:]
        found["gradients"] = [n for n, p in model.named_parameters() if not p.requires_grad and p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        crossed = base.traffic.sent.get(("gather", "inter"), 0)
        with gathers() as labels:
            tap, _ = sent_in(step, model, 2)
        crossed = base.traffic.sent.get(("gather", "inter"), 0) - crossed
        found["sent"].append((crossed, tap.total("inter", "all_gather")))
    of_base = sum(label.startswith("frozen ") and "frozen of" not in label for label in labels)
    return found | {"gathers of the base": of_base, "gathers": len(labels)}


@over_each(rest=False, adapter=ADAPTERS, scope=["G", "I"])
def test_a_strategy_gathers_a_unit_once_a_pass_and_keeps_no_copy_in_full_precision(
    pool: Pools, adapter: Adapter, scope: str
) -> None:
    parameters = sum(p.numel() for p in models.Net(**LARGE).parameters() if p.dim() == 2)
    blocks, others = 2, 2  # embedding and head
    for found in pool(4).run(under_a_strategy, adapter, scope):
        assert (found["dense"], found["gradients"]) == ([], [])
        (first, _), *later = found["sent"]
        assert (first > 0) == (scope == "G")
        for of_base, of_all in later:
            assert of_base == 0
            assert 0 < of_all < 0.05 * parameters  # the adapters', and what else FSDP has
        of_base, of_all = found["gathers of the base"], found["gathers"]
        assert blocks <= of_base <= 2 * (blocks + others)
        # A unit of adapters takes two hops in the forward and one in the backward, and FSDP1 has a unit of what else
        # is frozen (norms, biases), whose secondary shard stays: two in all. Four adapters a block don't count.
        if scope == "I":
            assert of_all - of_base <= blocks * (3 + 2) + 4


# ---- launches: on a GPU a step of LoRA waits for the CPU if a weight takes more than a decode and little beside

DECODES = {"dequantize_rows": dequantize_rows, "dequantize_nf4_rows": dequantize_nf4_rows}
on_cpus = pytest.mark.skipif(torch.cuda.is_available(), reason="counts decodes in the backend of CPUs")


@contextmanager
def decodes() -> Iterator[list[int]]:
    """In a worker: the sizes of what is decoded in this context; ops prepare their calls anew, before and after."""
    sizes: list[int] = []

    def noting(prepare: Callable[..., Callable[..., None]]) -> Callable[..., Callable[..., None]]:
        def prepared(*arguments: Any) -> Callable[..., None]:
            decode = prepare(*arguments)
            return lambda payload, out: sizes.append(out.numel()) or decode(payload, out)  # type: ignore[func-returns-value]

        return prepared

    for op in DECODES.values():
        op._prepared.clear()
    with patch.multiple(reference, **{name: noting(getattr(reference, name)) for name in DECODES}):
        yield sizes
    for op in DECODES.values():
        op._prepared.clear()


def adapted(adapter: Adapter, codec: Codec, checkpointing: str) -> Any:
    """In a worker: a Llama of two layers on a base that two ranks share."""
    model = llama.adapt(llama.make_base(llama.ADAPTED), {"a": "lora"})
    if checkpointing != "off":
        options = {"use_reentrant": checkpointing == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        model.enable_input_require_grads()
    quantize_frozen_params(model, codec, gpus_per_node=2)
    # FullyShardedDataParallel takes reentrant checkpoints inside of what it wraps only if each is in a unit of its own.
    return llama.shard(adapter, model, Strategy.zeropp(gpus_per_node=2), by_layer=checkpointing == "reentrant")


def step_of(model: Any) -> None:
    llama.loss_of(model, llama.tokens(0)).backward()
    model.zero_grad()


def launched_in_a_step(adapter: Adapter, codec: Codec, checkpointing: str) -> tuple[Any, ...]:
    """In a worker: the units that a warm step gathers, decodes and uses of weights, the weights, and a forward's."""
    model = adapted(adapter, codec, checkpointing.removeprefix("compiled "))
    for layer in llama.layers_of(model) if checkpointing.startswith("compiled") else []:
        layer.compile(backend="aot_eager")  # others build code, which takes long and launches the same
    for _ in range(2):
        step_of(model)
    (base,) = FrozenBase.below(model)
    uses: list[FrozenWeight] = []
    dense = FrozenWeight.dense

    def using(self: FrozenWeight, *args: Any) -> Tensor:
        uses.append(self)
        return dense(self, *args)

    with gathers() as labels, patch.object(FrozenWeight, "dense", using), decodes() as decoded:
        step_of(model)
    for _ in range(3):
        with gathers() as of_forward:
            llama.logits_of(model)
    units = {unit.label for unit in base.units}
    of_step, of_forward = ([label for label in each if label in units] for each in (labels, of_forward))
    return of_step, len(decoded), len(uses), len(base.weights), sorted(of_forward)


# Layers are units of the base also where a model is wrapped once.
LAUNCHES = [
    (ADAPTERS[0], Int8(256), "off"),
    (ADAPTERS[1], Int4(32), "reentrant"),
    (ADAPTERS[1], NF4(4096), "no_reentrant"),
    pytest.param(ADAPTERS[0], NF4(64), "compiled no_reentrant", marks=pytest.mark.wide),
]


@on_cpus
@pytest.mark.parametrize(("adapter", "codec", "checkpointing"), LAUNCHES, ids=str)
def test_one_gather_a_unit_and_pass_and_one_decode_a_use(
    pool: Pools, adapter: Adapter, codec: Codec, checkpointing: str
) -> None:
    for labels, decoded, uses, weights, of_forward in pool(2).run(launched_in_a_step, adapter, codec, checkpointing):
        # Embedding, two layers, head. The forward's last two are still there when the backward comes to them, and so
        # is a layer that has just been recomputed. What remains are two gathers in each direction.
        assert len(labels) == 4, labels
        assert decoded == uses
        assert uses <= weights * (2 if checkpointing == "off" else 3)
        assert len(of_forward) == len(set(of_forward)) == 4  # in a row of forwards


def test_levels_are_those_of_the_paper_whatever_mode_asks_first() -> None:
    levels_on.cache_clear()
    with torch.inference_mode():
        levels = levels_on(torch.device("cpu"))
    assert not levels.is_inference()
    torch.testing.assert_close(levels, torch.tensor(LEVELS), rtol=0, atol=0)
