"""Experts of mixture-of-experts models, stacks of matrices, are quantized, sharded and adapted like other weights."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import moe
import pytest
import torch
from accelerate import init_empty_weights
from harness import llama, models
from harness.adapter import Adapter
from harness.covering import ADAPTERS, over_each
from harness.lora import refused
from harness.pool import Pools
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from fsdp_zpp import (
    NF4,
    Int4,
    Int8,
    Strategy,
    dequantize_frozen_params,
    gathered_weights,
    load_frozen_params,
    quantize_frozen_params,
    save_adapter,
    save_frozen_params,
)
from fsdp_zpp.frozen._torch_modules import FrozenTensor

CODEC = Int8(64)
MIXZPP = Strategy("IGG", frozen=CODEC, gpus_per_node=2)


# ---- what is computed


def computes(adapter: Adapter, kind: str) -> None:
    for scopes, codec, experts in (("IGG", NF4(64), "eager"), ("GGG", Int4(32), "batched_mm")):
        model = moe.make_base(kind, experts=experts).requires_grad_(False)
        model.lm_head.requires_grad_(True)
        oracle = moe.rounded_base(codec, kind, experts=experts)
        oracle.lm_head = moe.make_base(kind).lm_head
        model = moe.shard(adapter, model, Strategy(scopes, frozen=codec, gpus_per_node=2))
        assert torch.equal(llama.logits_of(model), llama.logits_of(oracle)), scopes


@over_each(rest=False, adapter=ADAPTERS, kind=moe.KINDS)
def test_forward_equals_the_dequantized_model(pool: Pools, adapter: Adapter, kind: str) -> None:
    pool(4).run(computes, adapter, kind)


def adapted(adapter: Adapter, kind: str, quantized_first: bool, folder: str) -> None:
    base = moe.make_base(kind)
    if quantized_first:
        quantize_frozen_params(base.requires_grad_(False), CODEC, gpus_per_node=2)
    model = moe.shard(adapter, moe.adapt(base), MIXZPP)
    alone = moe.adapt(moe.rounded_base(CODEC, kind))
    assert torch.equal(llama.logits_of(model), llama.logits_of(alone))
    tokens = llama.greedy_tokens(model, 8)
    assert tokens == llama.greedy_tokens(alone, 8)
    assert len(set(tokens)) > 4
    moe.backward(model, alone=False)
    assert models.distance(adapter.full_gradients(model), moe.backward(alone, alone=True)) <= 1e-5
    logits = llama.logits_of(model)
    save_frozen_params(model, f"{folder}/base")
    save_adapter(model, f"{folder}/adapter")
    assert torch.equal(llama.logits_of(loaded(adapter, kind, folder)), logits)
    merged, expected = dict(gathered_weights(model, merged=True)), alone.merge_and_unload().state_dict()
    assert merged.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(merged[name], value)] == []


def loaded(adapter: Adapter, kind: str, folder: str) -> Any:
    base = moe.make_base(kind).requires_grad_(False)
    for parameter in base.parameters():
        parameter.data.zero_()
    load_frozen_params(base, f"{folder}/base", gpus_per_node=1)
    model = PeftModel.from_pretrained(base, f"{folder}/adapter", is_trainable=True)
    return moe.shard(adapter, model, Strategy("GGG", gpus_per_node=1))


@over_each(
    rest=False, adapter=ADAPTERS, case={"adapters first": ("qwen3", False), "quantized first": ("deepseek", True)}
)
def test_adapters_generate_train_merge_and_are_saved_as_on_the_dequantized_model(
    pool: Pools, adapter: Adapter, case: tuple[str, bool], tmp_path: Path
) -> None:
    pool(4).run(adapted, adapter, *case, str(tmp_path))


@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
@pytest.mark.parametrize("kind", moe.KINDS)
def test_nothing_dense_is_kept_for_the_backward(kind: str, experts: str) -> None:
    model = moe.make_base(kind, experts=experts).requires_grad_(False)
    smallest = min(p[0].numel() for p in moe.chosen(model).values() if p.dim() == 3)
    quantize_frozen_params(model, CODEC)
    model = moe.adapt(model, parameters=())
    plain = {p.data_ptr() for p in model.parameters()}
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        loss = llama.loss_of(model, torch.arange(4, device=models.device())[None])
    dense = [tensor for tensor in kept if not isinstance(tensor, FrozenTensor) and tensor.data_ptr() not in plain]
    assert max(tensor.numel() for tensor in dense) < smallest
    loss.backward()


# ---- files that have experts one by one


def learned(kind: str) -> Any:
    """A frozen model whose routers have learned a bias, if they have one, which is a buffer."""
    torch.manual_seed(0)
    mixtral = MixtralConfig(**llama.CONFIG | {"num_local_experts": 4})
    model: Any = MixtralForCausalLM(mixtral) if kind == "mixtral" else moe.construct(kind)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape))
    return model.to(models.device()).requires_grad_(False)


@pytest.mark.parametrize("kind", ["deepseek", "qwen3", "mixtral"])
def test_experts_are_stacked_as_files_are_read(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    learned(kind).save_pretrained(tmp_path / "base")
    assert any(".experts.3." in key for key in load_file(tmp_path / "base" / "model.safetensors"))
    base = learned(kind)
    quantize_frozen_params(base, CODEC)
    expected = llama.logits_of(base)
    save_frozen_params(base, tmp_path / "quantized")
    with init_empty_weights():
        from_checkpoint, from_base = (type(base)(base.config).requires_grad_(False) for _ in range(2))
    quantize_frozen_params(from_checkpoint, CODEC, checkpoint=tmp_path / "base")
    load_frozen_params(from_base, tmp_path / "quantized")
    for model in (from_checkpoint, from_base):
        assert torch.equal(llama.logits_of(model.to(models.device())), expected)
    assert "no place for" not in caplog.text


def test_an_expert_that_is_missing_or_of_another_shape_is_named(tmp_path: Path) -> None:
    learned("qwen3").save_pretrained(tmp_path)
    path, part = tmp_path / "model.safetensors", "model.layers.0.mlp.experts.2.up_proj.weight"
    others = {key: value.clone() for key, value in load_file(path).items() if key != part}
    for change, messages in (
        ({}, ["has no model.layers.0.mlp.experts.gate_up_proj"]),
        ({part: torch.zeros(1, 64)}, ["experts of ", "gate_up_proj differ in shape"]),
    ):
        save_file(others | change, path)
        refused(learned("qwen3"), lambda net: quantize_frozen_params(net, CODEC, checkpoint=path), *messages)


# ---- one stack


def rows_alone() -> None:
    codecs = ((Int8(64), 64), (Int8(64), 33), (Int4(128), 64), (NF4(64), 64))
    for scope, (codec, rows) in product("NI", codecs):
        torch.manual_seed(0)
        net = nn.Module()
        net.stack = nn.Parameter(torch.randn(5, rows, 40, device=models.device()), requires_grad=False)
        whole = net.stack.detach().clone()
        quantize_frozen_params(net, codec, placement=scope, gpus_per_node=2)
        dense = net.stack + 0
        for index in (0, 1, 2, -2, torch.tensor(4)):
            assert torch.equal(net.stack[index] + 0, dense[index])
        assert torch.equal(net.stack.transpose(1, 2)[3] + 0, dense[3].T)
        assert (dense - whole).norm() < 0.2 * whole.norm()
        dequantize_frozen_params(net)
        assert type(net) is nn.Module
        assert torch.equal(net.stack, dense)


def test_one_matrix_of_a_stack_is_dequantized_alone(pool: Pools) -> None:
    pool(4).run(rows_alone)
