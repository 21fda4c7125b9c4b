"""PEFT works on a quantized and sharded base as its users know it from one GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adapted_llama import CODEC, optimizer_of, oracle, sharded, steps
from harness import llama, models
from harness.adapter import STOCK, Adapter
from harness.covering import ADAPTERS, over_adapters, over_pairs
from harness.llama import greedy_tokens
from harness.pool import Pool
from peft import IA3Config, PeftConfig, PeftModel, PromptTuningConfig, VeraConfig, get_peft_model

from fsdp_zpp import Int8, Strategy, dequantize_frozen_params, quantize_frozen_params, save_adapter

METHODS: dict[str, Callable[[], PeftConfig]] = {
    "prompt tuning": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "vera": lambda: VeraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]),
    "ia3": lambda: IA3Config(
        task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
}


def by_method(adapter: Adapter, method: str, folder: str) -> tuple[list[float], list[float], bool, bool]:
    """In a worker: losses with a base quantized first and by the oracle, whether counts agree, and the saved logits."""
    base = llama.make_base().requires_grad_(False)
    quantize_frozen_params(base, CODEC, gpus_per_node=2)
    made = []
    for each in (base, llama.rounded_base(CODEC)):
        torch.manual_seed(3)
        made.append(get_peft_model(each, METHODS[method]()).to(models.device()))
    counts = [each.get_nb_trainable_parameters() for each in made]
    model, alone = llama.shard(adapter, made[0], Strategy("IGG", gpus_per_node=2), by_layer=False), made[1]
    losses: list[list[float]] = []
    for each in (model, alone):
        optimizer = optimizer_of(each)
        losses.append([])
        for _ in range(2):
            loss = llama.loss_of(each, llama.tokens(0, 0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    save_adapter(model, folder)
    loaded = PeftModel.from_pretrained(llama.rounded_base(CODEC), folder).to(models.device())
    same = torch.equal(llama.logits_of(loaded), llama.logits_of(model))
    return losses[0], losses[1], counts[0] == counts[1], same


@pytest.mark.parametrize("method", METHODS)
@over_adapters
def test_other_methods_of_peft_train_as_on_one_device(
    pool: Callable[[int], Pool], adapter: Adapter, method: str, tmp_path: Path
) -> None:
    for ours, expected, counts_agree, same in pool(4).run(by_method, adapter, method, str(tmp_path)):
        assert ours == pytest.approx(expected, rel=1e-5)
        assert counts_agree
        assert same


def several(adapter: Adapter, folder: str) -> list[bool]:
    """In a worker: whether switching, disabling and saving two adapters does what it does on one device."""
    both = {"default": "lora", "other": "rslora"}
    model, alone = sharded(adapter, both), oracle(both)
    ours = llama.peft_of(model)
    same = []
    for name in ("other", "default"):
        for each in (ours, alone):
            each.set_adapter(name, inference_mode=True)
        same.append(torch.equal(llama.logits_of(model), llama.logits_of(alone)))
    with ours.disable_adapter(), alone.disable_adapter():
        same.append(torch.equal(llama.logits_of(model), llama.logits_of(alone)))
    with alone.disable_adapter():
        same.append(not torch.equal(llama.logits_of(model), llama.logits_of(alone)))
    save_adapter(model, folder)
    loaded = PeftModel.from_pretrained(llama.rounded_base(CODEC), folder)
    loaded.load_adapter(f"{folder}/other", "other")
    for name in ("default", "other"):
        for each in (loaded, alone):
            each.set_adapter(name, inference_mode=True)
        same.append(torch.equal(llama.logits_of(loaded), llama.logits_of(alone)))
    return same


@over_adapters
def test_adapters_are_switched_disabled_and_saved_as_on_one_device(
    pool: Callable[[int], Pool], adapter: Adapter, tmp_path: Path
) -> None:
    for same in pool(4).run(several, adapter, str(tmp_path)):
        assert same == [True] * 6


def generated(adapter: Adapter, tied: bool, strategy: Any, by_layer: bool) -> tuple[list[int], list[int]]:
    """In a worker: greedy tokens, and those of the dequantized model on one device."""
    model = sharded(adapter, {"default": "lora"}, strategy, by_layer, tied=tied)
    alone = oracle({"default": "lora"}, tied=tied)
    steps(model, alone=False, count=1)
    steps(alone, alone=True, count=1)
    return greedy_tokens(model, 12), greedy_tokens(alone, 12)


@over_pairs(adapter=ADAPTERS, wrapped=["by layer", "once"], scope=["I", "G"], tied=[False, True])
def test_generation_equals_the_dequantized_models(
    pool: Callable[[int], Pool], adapter: Adapter, wrapped: str, scope: str, tied: bool
) -> None:
    strategy = Strategy(f"{scope}GG", frozen=CODEC, gpus_per_node=2)
    for ours, expected in pool(4).run(generated, adapter, tied, strategy, wrapped == "by layer"):
        assert ours == expected
        assert len(set(ours)) > 4


ORDERS = ("adapters first", "quantized first")


def in_order(adapter: Adapter, order: str, dtype: torch.dtype) -> bool:
    """In a worker: whether logits are the oracle's, whichever comes first."""
    base = llama.make_base(dtype)
    if order == "quantized first":
        base.requires_grad_(False)
        quantize_frozen_params(base, CODEC, gpus_per_node=2)
    model = llama.adapt(base, {"default": "lora"})
    if order == "adapters first":
        quantize_frozen_params(model, CODEC, gpus_per_node=2)
    model = llama.shard(adapter, model, Strategy("IGG", gpus_per_node=2))
    return torch.equal(llama.logits_of(model), llama.logits_of(oracle({"default": "lora"}, dtype=dtype)))


@over_pairs(adapter=ADAPTERS, order=list(ORDERS), dtype=[torch.float32, torch.bfloat16])
def test_adapters_may_be_added_before_or_after_quantizing(
    pool: Callable[[int], Pool], adapter: Adapter, order: str, dtype: torch.dtype
) -> None:
    assert pool(4).run(in_order, adapter, order, dtype) == [True] * 4


def in_16_bits(adapter: Adapter, strategy: Strategy) -> tuple[list[float], list[float], set[str]]:
    """In a worker: losses on a base in bf16, and by the oracle, of batches that are the same on all ranks."""
    alone = llama.adapt(llama.rounded_base(CODEC, torch.bfloat16), {"default": "lora"})
    model = llama.shard(adapter, llama.adapt(llama.make_base(torch.bfloat16), {"default": "lora"}), strategy)
    losses: list[list[float]] = []
    for each in (model, alone):
        optimizer = optimizer_of(each)
        losses.append([])
        for step in range(3):
            loss = llama.loss_of(each, llama.tokens(step, 0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    return losses[0], losses[1], {str(p.dtype) for p in alone.parameters()}


@over_pairs(adapter=ADAPTERS, scopes=["GGG", "IGG", "NNG", "IIG"])
def test_a_base_in_16_bits_trains_beside_adapters_in_32(
    pool: Callable[[int], Pool], adapter: Adapter, scopes: str
) -> None:
    strategy = Strategy(scopes, weights=Int8(64), gradients=Int8(64), frozen=CODEC, gpus_per_node=2)
    for ours, expected, dtypes in pool(4).run(in_16_bits, adapter, strategy):
        assert dtypes == {"torch.bfloat16", "torch.float32"}  # as PEFT makes them
        assert ours == pytest.approx(expected, rel=0.01)  # adapters and their gradients are rounded to 8 bits
        assert ours[-1] != ours[0]


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_merges_into_a_dequantized_base_alone(kind: str) -> None:
    model = llama.adapt(llama.make_base(), {"default": kind})
    quantize_frozen_params(model, CODEC)
    expected = llama.logits_of(model)
    with pytest.raises(RuntimeError, match=r"call fsdp_zpp\.dequantize_frozen_params"):
        model.merge_adapter()
    assert torch.equal(llama.logits_of(model), expected)
    dequantize_frozen_params(model)
    merged = model.merge_and_unload()
    torch.testing.assert_close(llama.logits_of(merged), expected, rtol=1e-4, atol=1e-4)


def collectives_of_a_block(adapter: Adapter, adapters: dict[str, str]) -> int:
    """In a worker: all-gathers in a warm step."""
    calls = 0
    model = sharded(adapter, adapters, Strategy("IGG", weights=Int8(64), frozen=CODEC, gpus_per_node=2))
    steps(model, alone=False)
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    original = getattr(dist, name)

    def counting(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*arguments, **options)

    setattr(dist, name, counting)
    try:
        steps(model, alone=False, count=1)
    finally:
        setattr(dist, name, original)
    return calls


@over_adapters
def test_more_adapters_take_no_more_collectives(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    one = pool(4).run(collectives_of_a_block, adapter, {"default": "lora"})
    three = pool(4).run(collectives_of_a_block, adapter, {"default": "lora", "b": "lora", "c": "lora"})
    assert one == three
    # Per layer: the base twice; adapters two hops and one; FSDP1 what else is frozen, twice. And the root.
    assert max(one) <= llama.CONFIG["num_hidden_layers"] * (2 + 3 + 2) + 6


def under_stock(adapter: Adapter) -> bool:
    """In a worker: whether logits are the oracle's."""
    model = llama.adapt(llama.make_base(), {"default": "lora"})
    quantize_frozen_params(model, CODEC, gpus_per_node=1)
    model = llama.shard(adapter, model, STOCK)
    return torch.equal(llama.logits_of(model), llama.logits_of(oracle({"default": "lora"})))


@over_adapters
def test_torchs_own_sharding_takes_a_quantized_base(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    assert pool(2).run(under_stock, adapter) == [True] * 2


def with_accelerate(adapter: Adapter) -> tuple[list[float], list[float]]:
    """In a worker: losses of the recipe for accelerate in the README, and without accelerate."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    losses: dict[bool, list[float]] = {True: [], False: []}
    for accelerated in (True, False):
        model = sharded(adapter, {"default": "lora"})
        optimizer: Any = optimizer_of(model)
        batches: Any = torch.utils.data.DataLoader([llama.tokens(0, 0)[0] for _ in range(16)], batch_size=1)
        if accelerated:
            accelerator = Accelerator(cpu=models.device().type == "cpu")
            optimizer, batches = accelerator.prepare(optimizer, batches)  # all but the model
        for batch in list(batches)[:4]:
            loss = llama.loss_of(model, batch)
            accelerator.backward(loss) if accelerated else loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[accelerated].append(loss.item())
        if accelerated:
            AcceleratorState._reset_state(reset_partial_state=True)
    return losses[True], losses[False]


@over_adapters
def test_the_recipe_for_accelerate_trains_as_without_it(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for ours, expected in pool(4).run(with_accelerate, adapter):
        assert ours == expected
        assert ours[-1] < ours[0]
