"""A model that is quantized after it was sharded is the same as one that was quantized before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import llama, lora, models
from harness.adapter import STOCK, Adapter, Case, Precision
from harness.covering import ADAPTERS, over_adapters, over_pairs
from harness.fsdp1 import Fsdp1
from harness.pool import Pool
from harness.strategies import quantize
from torch import Tensor
from ways_to_shard import PartlyFrozen

from fsdp_zpp import CodecState, Int4, LoCo, Strategy, fully_shard as zeropp_shard, quantize_frozen_params

BF16 = Precision(torch.bfloat16, torch.float32)


def three_steps(model: Any, adapter: Adapter) -> tuple[list[float], dict[str, Tensor]]:
    """In a worker: losses of three steps, and the detours' weights after them."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for index in range(3):
        loss = models.loss_of(model, models.batch(index, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, lora.trainable(adapter.full_weights(model))


def trained_twice(adapter: Adapter, strategy: Any, case: Case, placement: str) -> bool:
    """In a worker: whether quantizing before and after gives the same."""
    before, after = lora.make_net(), lora.make_net()
    # Without mixed precision a weight's own dtype is what it passes for, so that must be said before wrapping.
    quantize(before, placement=placement, dtype=None if case.precision is None else case.precision.param)
    one = adapter.shard(before, case, strategy)
    other = adapter.shard(after, case, strategy)
    quantize(after, placement=placement)
    (losses, weights), (other_losses, other_weights) = three_steps(one, adapter), three_steps(other, adapter)
    assert losses[0] != losses[-1]
    assert weights.keys() == other_weights.keys() != set()
    return losses == other_losses and all(torch.equal(weights[name], other_weights[name]) for name in weights)


STRATEGIES = {
    "torch's": STOCK,
    "zeropp": Strategy.zeropp(gpus_per_node=2),
    "loco": Strategy.loco(gpus_per_node=2, error_feedback=LoCo(hops="both")),
    **{scopes: Strategy(scopes, gpus_per_node=2) for scopes in ("GGG", "NNG", "III", "NNN")},
}


@over_pairs(adapter=ADAPTERS, name=list(STRATEGIES), wrap_blocks={"by block": True, "once": False})
def test_it_trains_as_if_quantized_before(
    pool: Callable[[int], Pool], adapter: Adapter, name: str, wrap_blocks: bool
) -> None:
    case = Case(wrap_blocks=wrap_blocks)
    assert pool(4).run(trained_twice, adapter, STRATEGIES[name], case, "I") == [True] * 4


@over_pairs(adapter=ADAPTERS, placement=["N", "G"], precision={"fp32": None, "bf16": BF16})
def test_it_trains_as_if_quantized_before_in_any_placement_and_dtype(
    pool: Callable[[int], Pool], adapter: Adapter, placement: str, precision: Precision | None
) -> None:
    case = Case(precision=precision)
    assert pool(4).run(trained_twice, adapter, STRATEGIES["zeropp"], case, placement) == [True] * 4


def given_other_values() -> bool:
    """In a worker: what a parameter was given after it was sharded stays."""
    model = Fsdp1().shard(lora.make_net(), Case(), Strategy(gpus_per_node=2))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.ones_like(parameter)
    quantize(model)
    return all(bool((weight == 1).all()) for weight in lora.trainable(Fsdp1().full_weights(model)).values())


def test_values_given_after_sharding_stay(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(given_other_values) == [True] * 4


def with_an_optimizer(adapter: Adapter) -> bool:
    """In a worker: an optimizer that was made before the base was quantized trains the same parameters."""
    model = adapter.shard(lora.make_net(), Case(), Strategy(gpus_per_node=2))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    quantize(model)
    before = {name: weight.clone() for name, weight in adapter.full_weights(model).items()}
    models.loss_of(model, models.batch(0, 0)).backward()
    optimizer.step()
    after = adapter.full_weights(model)
    moved = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    return moved == set(lora.trainable(after)) != set()


@over_adapters
def test_an_optimizer_made_before_trains_the_same_parameters(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    assert pool(4).run(with_an_optimizer, adapter) == [True] * 4


def peft_after(adapter: Adapter) -> bool:
    """In a worker: a PEFT model that torch's FSDP has sharded, quantized to 4 bits, against one device."""
    codec = Int4(64)
    model = llama.shard(adapter, llama.adapt(llama.make_base(), {"default": "lora"}), STOCK)
    quantize_frozen_params(model, codec, gpus_per_node=2)
    alone = llama.adapt(llama.rounded_base(codec), {"default": "lora"})
    return torch.equal(llama.logits_of(model), llama.logits_of(alone))


@over_adapters
def test_logits_of_a_peft_model_equal_the_dequantized_models(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    assert pool(4).run(peft_after, adapter) == [True] * 4


def names_in_checkpoints(quantize_first: bool) -> list[str]:
    """In a worker: of which units errors are saved."""
    net, strategy = PartlyFrozen(), Strategy.loco(gpus_per_node=2)
    if quantize_first:
        quantize(net)
    for module in (net.first, net.second, net):
        zeropp_shard(module, strategy=strategy)
    if not quantize_first:
        quantize(net)
    net(torch.ones(2, 64, device=models.device())).sum().backward()
    return list(CodecState(net).state_dict())


def test_codec_states_name_the_same_units(pool: Callable[[int], Pool]) -> None:
    first = pool(4).run(names_in_checkpoints, True)
    assert first == pool(4).run(names_in_checkpoints, False)
    assert first[0] != []
