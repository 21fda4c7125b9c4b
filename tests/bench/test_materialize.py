"""Models that get their values a module at a time are those that transformers makes at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_zpp.bench.materialize import materialize
from fsdp_zpp.bench.models import base_of, layer_places, network
from fsdp_zpp.bench.task import Task

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 1},
    "qwen3": {"num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True},
    "gemma3_text": {"num_key_value_heads": 1, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {},
}


def task(model_type: str, lora: int = 0) -> Task:
    """The task of a tiny model of this type."""
    config = AutoConfig.for_model(model_type, **SIZES | MODELS[model_type])
    return Task(config, 1, 1, lora=lora, sequence=8, device="cpu")


def made(of: Task) -> nn.Module:
    """The model, layer by layer."""
    model = network(of)
    base = base_of(model)
    for layers, index in list(layer_places(model)):
        materialize(layers[index], base, of.place)
    return materialize(model, base, of.place)


@pytest.mark.parametrize("model_type", MODELS)
def test_buffers_and_ties_are_those_of_a_model_made_at_once(model_type: str) -> None:
    model, whole = made(task(model_type)), AutoModelForCausalLM.from_config(task(model_type).config)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in whole.named_parameters()}
    buffers, expected = dict(model.named_buffers()), dict(whole.named_buffers())
    assert buffers.keys() == expected.keys()
    for name, buffer in buffers.items():
        torch.testing.assert_close(buffer, expected[name], rtol=0, atol=0)
    tokens = task(model_type).tokens(0)[0]
    # With the same weights, the same loss: nothing else is left without values.
    whole.load_state_dict(model.state_dict())
    whole.eval()
    model.eval()
    assert model(tokens, labels=tokens).loss.item() == whole(tokens, labels=tokens).loss.item()


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_adapters_stand_beside_a_frozen_base_in_bf16(model_type: str) -> None:
    """GPT-2 has none of the projections that adapters are on by name."""
    trainable = {n: p.dtype for n, p in made(task(model_type, lora=2)).named_parameters() if p.requires_grad}
    frozen = {p.dtype for p in made(task(model_type, lora=2)).parameters() if not p.requires_grad}
    assert trainable
    assert all("lora_" in name and dtype == torch.float32 for name, dtype in trainable.items())
    assert frozen == {torch.bfloat16}


def test_layers_are_those_that_the_planner_takes_for_units() -> None:
    model = network(task("llama"))
    assert [index for _, index in layer_places(model)] == [0, 1]
    assert all(layers is model.model.layers for layers, _ in layer_places(model))
