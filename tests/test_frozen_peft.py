"""PEFT on a frozen base that is quantized and sharded: as its users know it on one GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import llama, models
from harness.adapter import STOCK, Adapter
from harness.adapters import ADAPTERS, over_adapters
from harness.covering import over_pairs
from harness.fsdp1 import Fsdp1
from harness.pool import Pool
from peft import IA3Config, PeftConfig, PeftModel, PromptTuningConfig, VeraConfig, get_peft_model
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, register_fsdp_forward_method

from fsdp_zpp import Int8, Strategy, dequantize_frozen_params, quantize_frozen_params, save_adapter

CODEC = Int8(64)
MIXZPP = Strategy("IGG", frozen=CODEC, gpus_per_node=2)
TIED = ("tokens", "embedding trained")
"""Adapters that PEFT ties where it finds that embedding and head are."""


def oracle(adapters: dict[str, str], **options: Any) -> PeftModel:
    """In a worker: the dequantized model on one device."""
    return llama.adapt(llama.rounded_base(CODEC, **options), adapters)


def sharded(
    adapter: Adapter, adapters: dict[str, str], strategy: Any = MIXZPP, by_layer: bool = True, **options: Any
) -> Any:
    """In a worker: the model under a strategy that implies quantizing."""
    base = llama.make_base(**options)
    if set(adapters.values()) & {"dora", "head trained", *TIED}:
        # PEFT computes the magnitudes that it starts with from the weights, and copies what it is to train.
        base.requires_grad_(False)
        quantize_frozen_params(base, CODEC, placement=strategy.parameters, gpus_per_node=2)
    return llama.shard(adapter, llama.adapt(base, adapters), strategy, by_layer)


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """In a worker: an optimizer of what is trained; to be made before a forward leaves parts of it gathered."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def steps(model: Any, alone: bool, count: int = 2, optimizer: Any = None) -> dict[str, Tensor]:
    """In a worker: train; ``alone`` takes all ranks' batches. Returns trainable weights, if they are whole."""
    optimizer = optimizer or optimizer_of(model)
    ranks = range(dist.get_world_size()) if alone else [dist.get_rank()]
    for step in range(count):
        for rank in ranks:
            (llama.loss_of(model, llama.tokens(step, rank)) / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def saved_and_loaded(
    adapter: Adapter, kind: str, folder: str, **options: Any
) -> tuple[float, float, bool, bool, float]:
    """In a worker: how far a saved adapter is from the one in memory, and what saving changed."""
    model, alone = sharded(adapter, {"default": kind}, **options), oracle({"default": kind}, **options)
    optimizer = optimizer_of(model)
    steps(model, alone=False, optimizer=optimizer)
    trained = steps(alone, alone=True)
    before = llama.logits_of(model)
    save_adapter(model, folder)
    unchanged = torch.equal(llama.logits_of(model), before)
    loaded = PeftModel.from_pretrained(llama.rounded_base(CODEC, **options), folder)
    same = torch.equal(llama.logits_of(loaded), before)
    named = dict(loaded.named_parameters())
    weights = models.distance({name: named[name].detach() for name in trained}, trained)
    steps(model, alone=False, count=1, optimizer=optimizer)  # training goes on
    steps(alone, alone=True, count=1)
    ours, theirs = llama.logits_of(model), llama.logits_of(alone)
    after = ((ours - theirs).norm() / theirs.norm()).item()
    difference = ((llama.logits_of(loaded) - before).norm() / before.norm()).item()
    return difference, weights, unchanged, same, after


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora", "embedding", "head trained"])
@over_adapters
def test_round_trip(pool: Callable[[int], Pool], adapter: Adapter, kind: str, tmp_path: Path) -> None:
    for logits, weights, unchanged, same, after in pool(4).run(saved_and_loaded, adapter, kind, str(tmp_path)):
        assert unchanged
        assert same, logits
        assert weights <= 1e-4
        assert after <= 1e-4


def tied_and_saved(adapter: Adapter, kind: str, folder: str) -> tuple[float, float, bool, bool, float]:
    """In a worker: as above, with embedding and head tied."""
    return saved_and_loaded(adapter, kind, folder, tied=True)


@pytest.mark.parametrize("kind", TIED)
@over_adapters
def test_round_trip_with_ties(pool: Callable[[int], Pool], adapter: Adapter, kind: str, tmp_path: Path) -> None:
    for logits, weights, unchanged, same, after in pool(4).run(tied_and_saved, adapter, kind, str(tmp_path)):
        assert unchanged
        assert same, logits
        assert weights <= 1e-4
        assert after <= 1e-4


def one_by_one(model: Any) -> torch.optim.Optimizer:
    """In a worker: an optimizer for views of one memory, which a kernel for several parameters updates in no order."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, foreach=False, fused=False)


def refused_ties(adapter: Adapter) -> str:
    """In a worker: what is said to adapters that are views of one memory, which works where nothing is sharded."""
    base = llama.make_base(tied=True).requires_grad_(False)
    quantize_frozen_params(base, CODEC, gpus_per_node=2)
    model, alone = llama.adapt(base, {"default": "tied embedding"}), oracle({"default": "tied embedding"}, tied=True)
    assert torch.equal(llama.logits_of(model), llama.logits_of(alone))
    trained = [steps(each, alone=True, optimizer=one_by_one(each)) for each in (model, alone)]
    assert models.distance(*trained) <= 1e-5
    base = llama.make_base(tied=True)
    model = llama.shard(adapter, llama.adapt(base, {"default": "tied embedding"}), MIXZPP)
    try:
        llama.logits_of(model)
    except ValueError as error:
        return str(error)
    return ""


# fully_shard itself refuses parameters that are not contiguous.
def test_ties_that_sharding_loses_are_refused(pool: Callable[[int], Pool]) -> None:
    for said in pool(4).run(refused_ties, Fsdp1()):
        assert said.startswith("the adapter 'default' has ensure_weight_tying=True and targets a tied embedding")


# ---- other methods of PEFT's


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
def test_methods_on_a_base_quantized_first(
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
def test_several_adapters(pool: Callable[[int], Pool], adapter: Adapter, tmp_path: Path) -> None:
    for same in pool(4).run(several, adapter, str(tmp_path)):
        assert same == [True] * 6


def generated(adapter: Adapter, tied: bool, strategy: Any, by_layer: bool) -> tuple[list[int], list[int]]:
    """In a worker: greedy tokens, and those of the dequantized model on one device."""
    model = sharded(adapter, {"default": "lora"}, strategy, by_layer, tied=tied)
    alone = oracle({"default": "lora"}, tied=tied)
    steps(model, alone=False, count=1)
    steps(alone, alone=True, count=1)
    prompt = torch.arange(5, 11, device=models.device())[None]
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "use_cache": True}
    context: Any = nullcontext()
    if isinstance(model, FullyShardedDataParallel):
        context = FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False)
    else:
        register_fsdp_forward_method(model, "generate")
    with context:
        ours = model.generate(input_ids=prompt, **options)
    return ours[0].tolist(), alone.generate(input_ids=prompt, **options)[0].tolist()


@over_pairs(adapter=ADAPTERS, wrapped=["by layer", "once"], letter=["I", "G"], tied=[False, True])
def test_generation(pool: Callable[[int], Pool], adapter: Adapter, wrapped: str, letter: str, tied: bool) -> None:
    strategy = Strategy(f"{letter}GG", frozen=CODEC, gpus_per_node=2)
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
def test_adapters_before_and_after(
    pool: Callable[[int], Pool], adapter: Adapter, order: str, dtype: torch.dtype
) -> None:
    assert pool(4).run(in_order, adapter, order, dtype) == [True] * 4


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_merging_through_dequantization(kind: str) -> None:
    model = llama.adapt(llama.make_base(), {"default": kind})
    quantize_frozen_params(model, CODEC)
    expected = llama.logits_of(model)
    with pytest.raises(RuntimeError, match=r"call fsdp_zpp\.dequantize_frozen_params"):
        model.merge_adapter()
    assert torch.equal(llama.logits_of(model), expected)
    dequantize_frozen_params(model)
    merged = model.merge_and_unload()
    torch.testing.assert_close(llama.logits_of(merged), expected, rtol=1e-4, atol=1e-4)


def saved_where_it_can_not_be(path: str) -> str:
    """In a worker: what saving to a file says."""
    try:
        save_adapter(llama.adapt(llama.make_base(), {"default": "lora"}), path)
    except RuntimeError as error:
        return str(error)
    return ""


def test_all_ranks_hear_of_a_failure(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    for said in pool(2).run(saved_where_it_can_not_be, str(path)):
        assert said.startswith(f"the adapter could not be saved to {path}")


def test_what_is_no_peft_model() -> None:
    with pytest.raises(ValueError, match="no PeftModel in this LlamaForCausalLM"):
        save_adapter(llama.make_base(), "nowhere")
    with pytest.raises(ValueError, match=r"no adapter \['missing'\] in this model; there are \['default'\]"):
        save_adapter(llama.adapt(llama.make_base(), {"default": "lora"}), "nowhere", adapters=["missing"])


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
def test_more_adapters_are_no_more_collectives(pool: Callable[[int], Pool], adapter: Adapter) -> None:
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
def test_quantized_before_torchs_own_sharding(pool: Callable[[int], Pool], adapter: Adapter) -> None:
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
def test_recipe_for_accelerate(pool: Callable[[int], Pool], adapter: Adapter) -> None:
    for ours, expected in pool(4).run(with_accelerate, adapter):
        assert ours == expected
        assert ours[-1] < ours[0]
