"""Copies, ties, transformers' save_pretrained and inference mode work on a model with a quantized base."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moe
import pytest
import torch
from harness import llama, models
from harness.pool import Pool
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from fsdp_zpp import Int8, dequantize_frozen_params, quantize_frozen_params

CODEC = Int8(64)


def quantized(tied: bool = True) -> LlamaForCausalLM:
    """A Llama whose base is quantized."""
    model = llama.make_base(tied=tied).requires_grad_(False)
    quantize_frozen_params(model, CODEC)
    return model


def logits_of(model: nn.Module) -> Tensor:
    """Logits of a fixed batch, without ranks."""
    with torch.no_grad():
        return model(input_ids=torch.arange(14, device=models.device()).view(2, 7)).logits


# ---- ties


def test_tied_modules_show_one_tensor() -> None:
    model = quantized()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert isinstance(model.lm_head.weight, nn.Parameter)
    model.to(torch.bfloat16)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.dtype is torch.bfloat16
    assert quantized(tied=False).lm_head.weight is not quantized(tied=False).model.embed_tokens.weight


def test_a_copy_is_tied_as_its_original() -> None:
    model = quantized()
    copied = copy.deepcopy(model)
    assert type(copied.lm_head) is nn.Linear
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert torch.equal(logits_of(copied), logits_of(model))
    assert copied.num_parameters() == llama.make_base(tied=True).num_parameters()


def test_tie_weights_ties_quantized_modules() -> None:
    model = quantized()
    expected = logits_of(model)
    model.tie_weights()
    assert torch.equal(logits_of(model), expected)
    untied = quantized(tied=False)
    untied.config.tie_word_embeddings = True
    untied.tie_weights()
    assert untied.lm_head.weight is untied.model.embed_tokens.weight
    oracle = llama.rounded_base(CODEC)
    oracle.lm_head.weight = oracle.model.embed_tokens.weight
    assert torch.equal(logits_of(untied), logits_of(oracle))


# ---- saving


def test_save_pretrained_refuses_to_leave_the_base_out(tmp_path: Path) -> None:
    model = quantized()
    expected = logits_of(model)
    with pytest.raises(RuntimeError, match=r"15 weights of this LlamaForCausalLM .*save_frozen_params\(model, path\)"):
        model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="15 weights of this LlamaModel"):
        model.model.save_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []
    adapted = llama.adapt(model, {"default": "lora"})
    adapted.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    copy.deepcopy(adapted.unload()).save_pretrained(tmp_path / "copy")
    dequantize_frozen_params(model)
    model.save_pretrained(tmp_path / "model")
    for folder in ("copy", "model"):
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / folder).to(models.device())
        assert torch.equal(logits_of(loaded), expected)


# ---- inference mode


# Under either FSDP a first forward in inference mode is torch's to refuse: its own parameters are made there, too.


def trained_after(kind: str, scope: str, inference: bool) -> tuple[Tensor, list[float]]:
    """In a worker: logits of a first forward in inference mode, or without gradients, and losses from then on."""
    if kind == "moe":
        model: Any = moe.adapt(moe.make_base("qwen3"))
    else:
        model = llama.adapt(llama.make_base(tied=True), {"default": kind})
    quantize_frozen_params(model, CODEC, placement=scope, gpus_per_node=2)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    with torch.inference_mode() if inference else torch.no_grad():
        logits = model(input_ids=llama.tokens(99, 0)).logits.cpu()
    return logits, llama.train(model, optimizer)


def trained_after_inference(kind: str, scope: str) -> tuple[bool, list[float], list[float]]:
    """In a worker: whether logits agree, and losses, with inference mode and without."""
    ours, losses = trained_after(kind, scope, True)
    theirs, expected = trained_after(kind, scope, False)
    return torch.equal(ours, theirs), losses, expected


@pytest.mark.parametrize(("kind", "scope"), [("lora", "I"), ("dora", "G"), ("moe", "I")])
def test_a_first_forward_in_inference_mode_changes_nothing_in_training(
    pool: Callable[[int], Pool], kind: str, scope: str
) -> None:
    for same, ours, expected in pool(4).run(trained_after_inference, kind, scope):
        assert same
        assert ours == expected
