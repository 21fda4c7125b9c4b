"""The recipe for models that don't fit: constructed without values, quantized from files, adapted, saved, loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from harness import frozen_files as files, llama, models
from peft import LoraConfig, PromptTuningConfig, VeraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from fsdp_zpp import load_frozen_params, quantize_frozen_params, save_frozen_params

TIED = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


def empty(tied: bool, tie: bool = True) -> nn.Module:
    """The base without values, as accelerate makes it."""
    with init_empty_weights():
        model = LlamaForCausalLM(LlamaConfig(**llama.CONFIG, tie_word_embeddings=tied))
    if tie:
        model.tie_weights()
    return model.requires_grad_(False)


def logits_of(model: nn.Module) -> Tensor:
    """Logits of a fixed batch, without ranks."""
    with torch.no_grad():
        return model.to(models.device())(input_ids=torch.arange(14, device=models.device()).view(2, 7)).logits.cpu()


@TIED
def test_the_recipe_computes_what_the_dequantized_model_does(tmp_path: Path, tied: bool) -> None:
    llama.make_base(tied=tied).save_pretrained(tmp_path / "base")
    expected = logits_of(llama.rounded_base(files.CODEC, tied=tied))
    model = empty(tied)
    quantize_frozen_params(model, files.CODEC, checkpoint=tmp_path / "base")
    save_frozen_params(model, tmp_path / "quantized")
    other = empty(tied)
    load_frozen_params(other, tmp_path / "quantized")
    for one in (model, other):
        assert torch.equal(logits_of(one), expected)
        adapted = llama.adapt(one, {"default": "lora"})
        oracle = llama.adapt(llama.rounded_base(files.CODEC, tied=tied), {"default": "lora"})
        assert torch.equal(logits_of(adapted), logits_of(oracle))


def test_a_broken_tie_is_named(tmp_path: Path) -> None:
    base = llama.make_base(tied=True)
    base.save_pretrained(tmp_path / "base")
    model = empty(tied=True, tie=False)
    before = files.snapshot(model)
    said = r"has no lm_head\.weight; .* ties lm_head\.weight to model\.embed_tokens\.weight, .* model\.tie_weights\(\)"
    with pytest.raises(ValueError, match=said):
        quantize_frozen_params(model, checkpoint=tmp_path / "base")
    quantize_frozen_params(base.requires_grad_(False), files.CODEC)
    save_frozen_params(base, tmp_path / "quantized")
    with pytest.raises(ValueError, match=said):
        load_frozen_params(model, tmp_path / "quantized")
    assert files.snapshot(model) == before


def test_buffers_without_values_are_refused(tmp_path: Path) -> None:
    llama.make_base().save_pretrained(tmp_path)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**llama.CONFIG)).requires_grad_(False)
    with pytest.raises(ValueError, match=r"rotary_emb\.inv_freq is on the meta device .* init_empty_weights"):
        quantize_frozen_params(model, checkpoint=tmp_path)


# ---- names of the base, whatever has been put around it

KINDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "lora": lambda base: llama.adapt(base, {"default": "lora", "other": "rslora"}),
    "dora": lambda base: llama.adapt(base, {"default": "dora"}),
    "embedding": lambda base: llama.adapt(base, {"default": "embedding"}),
    "head trained": lambda base: llama.adapt(base, {"default": "lora", "other": "head trained"}),
    "tokens": lambda base: get_peft_model(base, LoraConfig(target_modules=llama.TARGETS, trainable_token_indices=[3])),
    "vera": lambda base: get_peft_model(base, VeraConfig(target_modules=["q_proj", "v_proj"], r=4)),
    "prompt": lambda base: get_peft_model(
        base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2, num_layers=2, token_dim=64)
    ),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_adapters_are_no_part_of_the_base(tmp_path: Path, make: Callable[[nn.Module], nn.Module]) -> None:
    model = make(llama.make_base())
    quantize_frozen_params(model, files.CODEC)
    save_frozen_params(model, tmp_path)
    plain = llama.make_base().requires_grad_(False)
    names = {name for name, _ in plain.named_parameters()}
    index = json.loads((tmp_path / files.INDEX).read_text())
    assert {key.removesuffix(".codes").removesuffix(".scales") for key in index["weight_map"]} == names
    load_frozen_params(plain, tmp_path)
    assert torch.equal(logits_of(plain), logits_of(llama.rounded_base(files.CODEC)))
    adapted = make(llama.make_base().requires_grad_(False))
    load_frozen_params(adapted, tmp_path)
    of_adapter = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
    expected = {n: p for n, p in make(llama.make_base()).named_parameters() if p.requires_grad}
    assert all(torch.equal(of_adapter[name], value) for name, value in expected.items())


# ---- models with routers and experts


def experts(kind: str) -> Any:
    """A small MoE model whose routers have learned a bias, if they have one, which is a buffer."""
    torch.manual_seed(0)
    sizes = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    grouped = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    routed = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
    model: Any
    if kind == "deepseek":
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**llama.CONFIG | sizes | grouped | routed))
    elif kind == "qwen":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**llama.CONFIG | routed | {"num_experts": 4, "head_dim": 16}))
    else:
        model = MixtralForCausalLM(MixtralConfig(**llama.CONFIG | {"num_local_experts": 4}))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape))
    return model.to(models.device()).requires_grad_(False)


@pytest.mark.parametrize("kind", ["deepseek", "qwen", "mixtral"])
def test_experts_are_stacked_as_files_are_read(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    experts(kind).save_pretrained(tmp_path / "base")  # which has experts one by one
    assert any(".experts.3." in key for key in files.load_file(tmp_path / "base" / "model.safetensors"))
    base = experts(kind)
    quantize_frozen_params(base, files.CODEC)
    expected = logits_of(base)
    save_frozen_params(base, tmp_path / "quantized")
    for call in (
        lambda model: quantize_frozen_params(model, files.CODEC, checkpoint=tmp_path / "base"),
        lambda model: load_frozen_params(model, tmp_path / "quantized"),
    ):
        with init_empty_weights():
            model = type(base)(base.config)
        call(model.requires_grad_(False))
        assert torch.equal(logits_of(model), expected)
    assert "no place for" not in caplog.text


def test_an_expert_that_is_missing_or_of_another_shape_is_named(tmp_path: Path) -> None:
    experts("qwen").save_pretrained(tmp_path)
    path, part = tmp_path / "model.safetensors", "model.layers.0.mlp.experts.2.up_proj.weight"
    state = files.load_file(path)
    for value, message in (
        (None, r"has no model\.layers\.0\.mlp\.experts\.gate_up_proj"),
        (torch.zeros(1, 64), "experts of .*gate_up_proj differ in shape"),
    ):
        files.write_checkpoint(path, state, **{part.replace(".", "__"): value})
        model = experts("qwen")
        before = files.snapshot(model)
        with pytest.raises(ValueError, match=message):
            quantize_frozen_params(model, files.CODEC, checkpoint=path)
        assert files.snapshot(model) == before
