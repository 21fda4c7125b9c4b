"""PEFT on a quantized and sharded base: trained, saved and merged as its users know it from one GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bitsandbytes as bnb
import moe
import pytest
import torch
import torch.distributed as dist
from harness import llama, models
from harness.adapter import Adapter, Fsdp1
from harness.covering import ADAPTERS, over_adapters, over_each
from harness.live_bytes import LiveBytes
from harness.messages import attempt
from harness.models import device
from harness.pool import Pools
from peft import (
    IA3Config,
    LNTuningConfig,
    PeftConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    TrainableTokensConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaForCausalLM

from fsdp_zpp import Int8, Strategy, dequantize_frozen_params, gathered_weights, quantize_frozen_params, save_adapter

CODEC = Int8(64)
MIXZPP = Strategy("IGG", frozen=CODEC, gpus_per_node=2)
EXACT = Strategy("IGG", gpus_per_node=2)
LORA = {"default": "lora"}
TIED = ("tokens", "embedding trained")
"""Adapters that PEFT ties where it finds that embedding and head are."""


def oracle(adapters: dict[str, str], **options: Any) -> PeftModel:
    """The dequantized model on one device."""
    return llama.adapt(llama.rounded_base(CODEC, **options), adapters)


def quantized(tied: bool = False, placement: str = "I") -> LlamaForCausalLM:
    """In a worker: the base, quantized before any adapter is added."""
    base = llama.make_base(tied=tied).requires_grad_(False)
    quantize_frozen_params(base, CODEC, placement=placement, gpus_per_node=2)
    return base


def sharded(adapter: Adapter, adapters: dict[str, str], strategy: Strategy = MIXZPP, tied: bool = False) -> Any:
    """In a worker: the model under a strategy that implies quantizing."""
    # PEFT computes the magnitudes that it starts with from the weights, and copies what it is to train.
    first = set(adapters.values()) & {"dora", "head trained", *TIED}
    base = quantized(tied, strategy.parameters.replace("G", "I")) if first else llama.make_base(tied=tied)
    return llama.shard(adapter, llama.adapt(base, adapters), strategy)


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """In a worker: an optimizer of what is trained; to be made before a forward leaves parts of it gathered."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def step(model: Any, alone: bool, optimizer: Any = None) -> dict[str, Tensor]:
    """In a worker: train; ``alone`` takes all ranks' batches. Returns trainable weights, if they are whole."""
    optimizer = optimizer or optimizer_of(model)
    moe.backward(model, alone)
    optimizer.step()
    optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


# ---- trained


def losses_on_one_batch(model: Any) -> list[float]:
    """In a worker: losses of two steps, of batches that are the same on all ranks."""
    optimizer, losses = optimizer_of(model), []
    for step in range(2):
        loss = llama.loss_of(model, llama.tokens(step, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


METHODS: dict[str, Callable[[], PeftConfig]] = {
    "prompt tuning": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "ia3": lambda: IA3Config(
        task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "norms": lambda: LNTuningConfig(task_type="CAUSAL_LM", target_modules=["input_layernorm", "norm"]),
    "tokens": lambda: TrainableTokensConfig(
        task_type="CAUSAL_LM", target_modules=["embed_tokens"], token_indices=[1, 3, 5]
    ),
}


def by_method(adapter: Adapter, method: str, folder: str) -> None:
    made = []
    for each in (quantized(), llama.rounded_base(CODEC)):
        torch.manual_seed(3)
        made.append(get_peft_model(each, METHODS[method]()).to(device()))
    assert made[0].get_nb_trainable_parameters() == made[1].get_nb_trainable_parameters()
    model, alone = llama.shard(adapter, made[0], EXACT, by_layer=False), made[1]
    assert losses_on_one_batch(model) == pytest.approx(losses_on_one_batch(alone), rel=1e-5)
    model.requires_grad_(False)  # as of an adapter that is not active, or was loaded for inference
    save_adapter(model, folder)
    loaded = PeftModel.from_pretrained(llama.rounded_base(CODEC), folder).to(device())
    assert torch.equal(llama.logits_of(loaded), llama.logits_of(model))


@over_each(rest=False, adapter=ADAPTERS, method=list(METHODS))
def test_other_methods_of_peft_train_as_on_one_device(
    pool: Pools, adapter: Adapter, method: str, tmp_path: Path
) -> None:
    pool(4).run(by_method, adapter, method, str(tmp_path))


def in_16_bits(adapter: Adapter, strategy: Strategy) -> None:
    alone = oracle(LORA, dtype=torch.bfloat16)
    assert {p.dtype for p in alone.parameters()} == {torch.bfloat16, torch.float32}  # as PEFT makes them
    model = llama.shard(adapter, llama.adapt(llama.make_base(torch.bfloat16), LORA), strategy)
    ours = losses_on_one_batch(model)
    assert ours == pytest.approx(losses_on_one_batch(alone), rel=0.01)  # adapters and gradients are rounded to 8 bits
    assert ours[-1] != ours[0]


@over_each(rest=False, adapter=ADAPTERS, scopes=["GGG", "NNG"])
def test_a_base_in_16_bits_trains_beside_adapters_in_32(pool: Pools, adapter: Adapter, scopes: str) -> None:
    pool(4).run(in_16_bits, adapter, Strategy(scopes, weights=CODEC, gradients=CODEC, frozen=CODEC, gpus_per_node=2))


def gathers_of_adapters(adapter: Adapter) -> None:
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    counts = []
    for adapters in (LORA, {"default": "lora", "b": "lora", "c": "lora"}):
        model = sharded(adapter, adapters, Strategy("IGG", weights=Int8(64), frozen=CODEC, gpus_per_node=2))
        step(model, alone=False)
        with patch.object(dist, name, wraps=getattr(dist, name)) as gather:
            step(model, alone=False)
        counts.append(gather.call_count)
    assert counts[0] == counts[1]
    # Per layer: the base twice; adapters two hops and one; FSDP1 what else is frozen, twice. And the root.
    assert 0 < counts[0] <= llama.CONFIG["num_hidden_layers"] * (2 + 3 + 2) + 6


@over_adapters
def test_more_adapters_take_no_more_collectives(pool: Pools, adapter: Adapter) -> None:
    pool(4).run(gathers_of_adapters, adapter)


# ---- saved, and merged


def assert_same(ours: dict[str, Any], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    for name, expected in theirs.items():
        assert ours[name].dtype == expected.dtype, name
        assert torch.equal(ours[name].cpu(), expected.cpu()), name


def assert_handed_out(model: Any, alone: PeftModel, folder: str) -> None:
    weights = dict(gathered_weights(model, merged=True))
    of_one = dict(gathered_weights(model, merged=True, dtype=torch.bfloat16, rank=1))
    active = alone.active_adapter
    saved = Path(folder, "" if active == "default" else active, "adapter_model.safetensors")
    assert_same(dict(gathered_weights(model, adapters_only=True)), load_file(saved))
    expected = {name: value.clone() for name, value in alone.to(device()).merge_and_unload().state_dict().items()}
    assert_same(weights, expected)
    if dist.get_rank() == 1:
        assert_same(of_one, {name: value.bfloat16() for name, value in expected.items()})
    else:
        assert set(of_one.values()) == {None}
        assert of_one.keys() == expected.keys()


def saved_and_loaded(adapter: Adapter, kind: str, scopes: str, tied: bool, folder: str) -> None:
    adapters = {"default": kind} | ({} if tied else {"other": "lora"})
    model = sharded(adapter, adapters, Strategy(scopes, frozen=CODEC, gpus_per_node=2), tied=tied)
    alone = oracle(adapters, tied=tied)
    optimizer = optimizer_of(model)
    step(model, alone=False, optimizer=optimizer)
    trained = step(alone, alone=True)
    before = llama.logits_of(model)
    save_adapter(model, folder, adapters=["default"])
    assert torch.equal(llama.logits_of(model), before)
    loaded = PeftModel.from_pretrained(llama.rounded_base(CODEC, tied=tied), folder).to(device())
    assert torch.equal(llama.logits_of(loaded), before)
    named = dict(loaded.named_parameters())
    assert models.distance({name: named[name].detach() for name in trained}, trained) <= 1e-4
    if kind == "lora":
        tokens = llama.greedy_tokens(model, 8)
        assert tokens == llama.greedy_tokens(loaded, 8)
        assert len(set(tokens)) > 4
    if not tied:
        assert_handed_out(model, loaded, folder)
    step(model, alone=False, optimizer=optimizer)
    step(alone, alone=True)
    ours, theirs = llama.logits_of(model), llama.logits_of(alone)
    assert (ours - theirs).norm() <= 1e-4 * theirs.norm()


@over_each(
    rest=False,
    adapter=ADAPTERS,
    case={
        **{kind: (kind, "IGG", False) for kind in ("lora", "dora", "head trained", "tokens")},
        "embedding trained, tied": ("embedding trained", "GGG", True),
        "replicas": ("lora", "NNN", False),
    },
)
def test_a_saved_adapter_loads_on_one_device_and_merges_bit_for_bit(
    pool: Pools, adapter: Adapter, case: tuple[str, str, bool], tmp_path: Path
) -> None:
    pool(4).run(saved_and_loaded, adapter, *case, str(tmp_path))


def in_full_precision(adapter: Adapter, kind: str, folder: str) -> None:
    adapters = {"chosen": kind, "other": "rslora"}
    dtype = torch.float32 if adapter == ADAPTERS[0] else llama.ADAPTED  # PEFT's adapters are in fp32
    model = llama.shard(adapter, llama.adapt(llama.make_base(dtype), adapters), EXACT)
    save_adapter(model, folder, adapters=["chosen"])
    dist.barrier()
    assert_handed_out(model, llama.adapt(llama.make_base(dtype), adapters), folder)


@over_each(rest=False, adapter=ADAPTERS, kind=["lora", "dora", "embedding", "tokens"])
def test_adapters_are_merged_into_full_precision_as_peft_merges_them(
    pool: Pools, adapter: Adapter, kind: str, tmp_path: Path
) -> None:
    pool(4).run(in_full_precision, adapter, kind, str(tmp_path))


class Communicated(TorchDispatchMode):
    """Counts the bytes of tensors that this rank gives to collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.nbytes += sum(each.nbytes for each in tree_leaves(args) if isinstance(each, Tensor))
        return func(*args, **(kwargs or {}))


def nbytes_of_merging(model: Any) -> int:
    with Communicated() as communicated:
        dict(gathered_weights(model, merged=True))
    return communicated.nbytes


def several(adapter: Adapter, folder: str) -> None:
    both = {"default": "lora", "other": "rslora"}
    model, alone = sharded(adapter, both), oracle(both)
    ours = llama.peft_of(model)
    for name in ("default", "other", "default"):
        for each in (ours, alone):
            each.set_adapter(name)
        assert torch.equal(llama.logits_of(model), llama.logits_of(alone))
        of_adapter = get_peft_model_state_dict(alone, adapter_name=name)
        assert_same(dict(gathered_weights(model, adapters_only=True)), of_adapter)
        merged = oracle(both)
        merged.set_adapter(name)
        assert_same(dict(gathered_weights(model, merged=True)), merged.merge_and_unload().state_dict())
    fresh = [sharded(adapter, adapters) for adapters in (both, {"default": "lora"})]
    assert nbytes_of_merging(fresh[0]) == nbytes_of_merging(fresh[1])  # what is not active is not read
    with ours.disable_adapter(), alone.disable_adapter():
        assert torch.equal(llama.logits_of(model), llama.logits_of(alone))
    with alone.disable_adapter():
        assert not torch.equal(llama.logits_of(model), llama.logits_of(alone))
    save_adapter(model, folder)
    loaded = PeftModel.from_pretrained(llama.rounded_base(CODEC), folder)
    loaded.load_adapter(f"{folder}/other", "other")
    for name in both:
        for each in (loaded, alone):
            each.set_adapter(name, inference_mode=True)
        assert torch.equal(llama.logits_of(loaded), llama.logits_of(alone))


@over_adapters
def test_adapters_are_switched_disabled_saved_and_merged_as_on_one_device(
    pool: Pools, adapter: Adapter, tmp_path: Path
) -> None:
    pool(4).run(several, adapter, str(tmp_path))


def test_an_adapter_merges_into_a_dequantized_base_alone() -> None:
    model = llama.adapt(llama.make_base(), {"default": "dora"})
    quantize_frozen_params(model, CODEC)
    expected = llama.logits_of(model)
    with pytest.raises(RuntimeError, match=r"call fsdp_zpp\.dequantize_frozen_params"):
        model.merge_adapter()
    assert torch.equal(llama.logits_of(model), expected)
    dequantize_frozen_params(model)
    merged = model.merge_and_unload()
    torch.testing.assert_close(llama.logits_of(merged), expected, rtol=1e-4, atol=1e-4)


def refused_ties() -> None:
    """In a worker: adapters that are views of one memory work where nothing is sharded, and are refused elsewhere."""
    adapters = {"default": "tied embedding"}
    model = llama.adapt(quantized(tied=True), adapters)
    assert torch.equal(llama.logits_of(model), llama.logits_of(oracle(adapters, tied=True)))
    model = sharded(Fsdp1(), adapters, tied=True)
    with pytest.raises(ValueError, match="'default' has ensure_weight_tying=True and targets a tied embedding"):
        llama.logits_of(model)


# fully_shard itself refuses parameters that are not contiguous.
def test_ties_that_sharding_loses_are_refused(pool: Pools) -> None:
    pool(4).run(refused_ties)


def saved_where_it_can_not_be(path: str) -> None:
    with pytest.raises(RuntimeError, match=f"^the adapter could not be saved to {path}"):
        save_adapter(llama.adapt(llama.make_base(), LORA), path)


def test_a_failure_to_save_is_an_error_on_all_ranks(pool: Pools, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    pool(2).run(saved_where_it_can_not_be, str(path))


def test_what_can_not_be_saved_or_handed_out_is_refused() -> None:
    base = llama.make_base()
    with pytest.raises(ValueError, match="no PeftModel in this LlamaForCausalLM"):
        save_adapter(base, "nowhere")
    with pytest.raises(ValueError, match=r"no adapter \['missing'\] in this model; choose from \['default'\]"):
        save_adapter(llama.adapt(llama.make_base(), LORA), "nowhere", adapters=["missing"])
    with pytest.raises(ValueError, match="there is no PeftModel in this LlamaForCausalLM"):
        gathered_weights(base, merged=True)
    prompts = get_peft_model(llama.make_base(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match="'default' is a PREFIX_TUNING adapter, which changes none"):
        gathered_weights(prompts, merged=True)
    with pytest.raises(ValueError, match="tensors that PEFT computes from its parameters"):
        gathered_weights(prompts, adapters_only=True)
    model = llama.adapt(base, {"default": "lora", "other": "lora"})
    with pytest.raises(ValueError, match="pass one"):
        gathered_weights(model, adapters_only=True, merged=True)
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match=r"\['default', 'other'\] are active; choose one"):
        gathered_weights(model, adapters_only=True)
    expected = model.merge_and_unload().state_dict()
    both = llama.adapt(llama.make_base(), {"default": "lora", "other": "lora"})
    both.base_model.set_adapter(["default", "other"])
    assert_same(dict(gathered_weights(both, merged=True)), expected)

    base = llama.make_base()
    base.model.layers[0].mlp.up_proj = bnb.nn.Linear4bit(64, 112, bias=False)
    packed = llama.adapt(base, LORA)
    for argument in ({"dtype": torch.bfloat16}, {"merged": True}):
        with pytest.raises(ValueError, match=r"up_proj\.weight is packed by another quantizer"):
            gathered_weights(packed, **argument)


# ---- save_pretrained, transformers' and PEFT's


def refused_and_saved(adapter: Adapter, scopes: str, adapted: bool, folder: str) -> None:
    """In a worker: calls without a state dict are refused and leave nothing; one with it saves all."""
    model: Any = llama.make_base()
    if adapted:
        model = llama.adapt(model, LORA)
    model = llama.shard(adapter, model, Strategy(scopes, gpus_per_node=2))
    inner, is_first = llama.peft_of(model), dist.get_rank() == 0
    for given in ({}, {"is_main_process": is_first}, {"state_dict": None}):
        kind, text, sent = attempt((partial(inner.save_pretrained, folder, **given), RuntimeError, ""))
        assert (kind, sent) == ("RuntimeError", 0)
        assert "is sharded, and save_pretrained would write what one rank holds" in text
        assert "fsdp_zpp.save_adapter(model, path)" in text
        assert "full state dict" in text
    dist.barrier()
    assert not list(Path(folder).glob("*.safetensors"))
    dist.barrier()
    if not adapted:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if is_first:
            inner.save_pretrained(folder, state_dict=state)
        dist.barrier()
        assert_same(LlamaForCausalLM.from_pretrained(folder).state_dict(), llama.make_base().state_dict())


@over_each(rest=False, adapter=ADAPTERS, adapted={"whole": False, "adapted": True}, scopes=["IGG", "NNG"])
def test_save_pretrained_of_a_sharded_model_is_refused_on_every_rank(
    pool: Pools, adapter: Adapter, adapted: bool, scopes: str, tmp_path: Path
) -> None:
    pool(4).run(refused_and_saved, adapter, scopes, adapted, str(tmp_path))


def saved_where_weights_are_whole(folder: str) -> None:
    for scopes in ("NNN", "IGG"):
        model = llama.shard(Fsdp1(), llama.make_base(), Strategy(scopes, gpus_per_node=2))
        with nullcontext() if scopes == "NNN" else FullyShardedDataParallel.summon_full_params(model, writeback=False):
            # On all ranks: state dicts are collective, and transformers' takes one.
            model.module.save_pretrained(f"{folder}/{dist.get_rank()} {scopes}")
        dist.barrier()
        loaded = LlamaForCausalLM.from_pretrained(f"{folder}/0 {scopes}").state_dict()
        assert_same(loaded, llama.make_base().state_dict())


def test_save_pretrained_works_where_ranks_hold_whole_weights(pool: Pools, tmp_path: Path) -> None:
    pool(4).run(saved_where_weights_are_whole, str(tmp_path))


# ---- the memory that merging takes

COPIES = {"lora": 2, "dora": 4, "two adapters": 3}
"""Copies that PEFT makes of the weight that it merges into, in the dtype of the adapters."""


def make(adapter: Adapter, kind: str, is_quantized: bool) -> Any:
    """In a worker: a model whose adapters are in fp32, and its base in bf16 where the adapter takes both."""
    adapters = {"one": "lora", "two": "lora"} if kind == "two adapters" else {"one": kind}
    if is_quantized:
        model = sharded(adapter, adapters)
    else:
        dtype = torch.float32 if adapter == ADAPTERS[0] else llama.ADAPTED
        model = llama.shard(adapter, llama.adapt(llama.make_base(dtype), adapters), EXACT)
    llama.peft_of(model).base_model.set_adapter(list(adapters))
    llama.logits_of(model)  # a quantized base makes its buffers at the first forward
    return model


def taken(adapter: Adapter, kind: str, is_quantized: bool, dtype: torch.dtype | None) -> None:
    model = make(adapter, kind, is_quantized)
    full = dict(gathered_weights(model, merged=True, dtype=dtype))
    units: dict[str, int] = {}
    for name, weight in full.items():
        unit = ".".join(name.split(".")[:3])  # a layer, or one of the modules beside them
        units[unit] = units.get(unit, 0) + weight.nbytes
    # A tensor that the caller has may be there beside the next one, which is merged in fp32, and then cast.
    held = max(weight.nbytes for weight in full.values())
    allowed = max(*units.values(), 2 * held) + COPIES[kind] * 4 * max(weight.numel() for weight in full.values())
    del full, weight
    with LiveBytes(allowed) as live:
        for _ in gathered_weights(model, merged=True, dtype=dtype):
            pass
    assert 0 < live.peak <= allowed


MERGED = [
    (ADAPTERS[0], "lora", True, None),
    (ADAPTERS[1], "dora", True, torch.bfloat16),
    (ADAPTERS[1], "two adapters", False, torch.bfloat16),
]


@pytest.mark.parametrize(("adapter", "kind", "is_quantized", "dtype"), MERGED, ids=str)
def test_merging_takes_one_unit_and_the_copies_that_peft_makes(
    pool: Pools, adapter: Adapter, kind: str, is_quantized: bool, dtype: torch.dtype | None
) -> None:
    pool(4).run(taken, adapter, kind, is_quantized, dtype)
