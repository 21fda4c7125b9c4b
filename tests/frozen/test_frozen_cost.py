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
from harness.wiretap import sent_in, wiretap
from torch import Tensor, nn

from fsdp_zpp import NF4, Int4, Int8, Strategy, quantize_frozen_params
from fsdp_zpp.codecs import Codec
from fsdp_zpp.comm.hops import Hop
from fsdp_zpp.frozen._torch_modules import frozen_sites
from fsdp_zpp.frozen.frozen_base import FrozenBase
from fsdp_zpp.frozen.weight import FrozenUnit, FrozenWeight
from fsdp_zpp_kernels import dequantize_nf4_rows, dequantize_rows, reference
from fsdp_zpp_kernels.reference import LEVELS, levels_on

LARGE: dict[str, Any] = {"width": 256, "hidden": 688, "vocabulary": 512}


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


def gathered_in_backwards(scope: str, share: float) -> None:
    net = lora.make_net(**LARGE)
    parameters = sum(p.numel() for p in net.parameters() if p.dim() == 2 and not p.requires_grad)
    reported = quantize_frozen_params(net, Int8(256), placement=scope, gpus_per_node=2).bytes_after
    assert parameters * share < reported <= 1.02 * parameters * share
    sends = [
        sent_in(lambda: models.loss_of(net, models.batch(0, 0)).backward(), net, gpus_per_node=2) for _ in range(3)
    ]
    assert sum(unit.nbytes for unit in {weight.holder for *_, weight in frozen_sites(net)}) == reported
    for tap, counted in sends:
        assert tap.total("inter") == counted["gather"]["inter"] == 0
        assert tap.total("intra") == counted["gather"]["intra"]
        # Each rank sends its half at most twice, once for the forward and once for the backward.
        assert (counted["gather"]["intra"] > 0) == (scope != "N")
        assert counted["gather"]["intra"] <= 2 * 1.02 * parameters / 2


@pytest.mark.parametrize(("scope", "share"), [("N", 1.0), ("I", 1 / 2)])
def test_a_base_takes_its_scopes_share_and_never_crosses_nodes(pool: Pools, scope: str, share: float) -> None:
    pool(4).run(gathered_in_backwards, scope, share)


def gathered_ahead() -> None:
    net = lora.make_net()
    quantize_frozen_params(net, lora.CODEC, gpus_per_node=2)
    for step in range(2):
        models.loss_of(net, models.batch(step, 0)).backward()
    with gathers() as seen:
        for i, block in enumerate(net.blocks):
            block.register_forward_hook(lambda *unused, i=i: seen.append(f"end of blocks.{i}"))
        models.loss_of(net, models.batch(2, 0))
    # The last backward has left the first block gathered.
    assert seen == ["frozen blocks.1", "end of blocks.0", "frozen head", "end of blocks.1"]


def test_a_unit_is_gathered_while_the_one_before_it_computes(pool: Pools) -> None:
    pool(4).run(gathered_ahead)


def large_floats() -> list[int]:
    """In a worker: sizes of what is alive in floating point and as large as the base's largest weights."""
    tensors = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter) and t.is_floating_point()]
    largest = LARGE["width"] * LARGE["vocabulary"]
    return [t.numel() for t in tensors if t.numel() >= largest and t.untyped_storage().nbytes() > 0]


def under_a_strategy(adapter: Adapter, scope: str) -> None:
    net = lora.make_net(**LARGE)
    parameters = sum(p.numel() for p in net.parameters() if p.dim() == 2)
    strategy = Strategy(f"{scope}GG", weights=Int8(256), frozen=Int8(256), gpus_per_node=2)
    model = adapter.shard(net, Case(), strategy)
    optimizer = models.make_optimizer("sgd", [p for p in model.parameters() if p.requires_grad])
    sent = next(iter(frozen_sites(model)))[3].base.traffic.sent
    gc.collect()
    before = len(large_floats())
    for step in range(3):
        crossed = sent.get(("gather", "inter"), 0)
        with wiretap(2) as tap:
            loss = models.loss_of(model, models.batch(step, 0))
            in_forward = large_floats()[before:]
            loss.backward()
        gc.collect()
        after_backward = large_floats()[before:]
        assert not [name for name, p in model.named_parameters() if not p.requires_grad and p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        crossed = sent.get(("gather", "inter"), 0) - crossed
        assert crossed == 0
        if step > 0:  # the adapters', and what else FSDP has
            assert 0 < tap.total("inter", "all_gather") < 0.05 * parameters
    assert in_forward == after_backward == []


@over_each(rest=False, adapter=ADAPTERS, scope=["G", "I"])
def test_under_a_strategy_a_base_never_crosses_nodes_and_has_no_copy_in_full_precision(
    pool: Pools, adapter: Adapter, scope: str
) -> None:
    pool(4).run(under_a_strategy, adapter, scope)


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


def launched_in_a_step(adapter: Adapter, codec: Codec, checkpointing: str) -> None:
    """In a worker: gathers, decodes and uses of weights in a warm step, and gathers in a row of forwards."""
    model = adapted(adapter, codec, checkpointing)
    for _ in range(2):
        step_of(model)
    (base,) = FrozenBase.below(model)
    units = {weight.holder.label for weight in base.weights if isinstance(weight.holder, FrozenUnit)}
    uses: list[FrozenWeight] = []
    dense = FrozenWeight.dense

    def using(self: FrozenWeight, *args: Any) -> Tensor:
        uses.append(self)
        return dense(self, *args)

    with gathers() as of_step, patch.object(FrozenWeight, "dense", using), decodes() as decoded:
        step_of(model)
    for _ in range(3):
        with gathers() as of_forward:
            llama.logits_of(model)
    # Embedding, two layers, head. The forward's last two are still there when the backward comes to them, and so
    # is a layer that has just been recomputed. What remains are two gathers in each direction.
    assert len([label for label in of_step if label in units]) == 4, of_step
    assert len(decoded) == len(uses) <= len(base.weights) * (2 if checkpointing == "off" else 3)
    assert sorted(label for label in of_forward if label in units) == sorted(units)


# Layers are units of the base also where a model is wrapped once.
LAUNCHES = [
    (ADAPTERS[0], Int8(256), "off"),
    (ADAPTERS[1], Int4(32), "reentrant"),
    (ADAPTERS[1], NF4(4096), "no_reentrant"),
]


@on_cpus
@pytest.mark.parametrize(("adapter", "codec", "checkpointing"), LAUNCHES, ids=str)
def test_one_gather_a_unit_and_pass_and_one_decode_a_use(
    pool: Pools, adapter: Adapter, codec: Codec, checkpointing: str
) -> None:
    pool(2).run(launched_in_a_step, adapter, codec, checkpointing)


def test_levels_are_those_of_the_paper_whatever_mode_asks_first() -> None:
    levels_on.cache_clear()
    with torch.inference_mode():
        levels = levels_on(torch.device("cpu"))
    assert not levels.is_inference()
    torch.testing.assert_close(levels, torch.tensor(LEVELS), rtol=0, atol=0)
