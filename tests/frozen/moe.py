"""Small mixture-of-experts models, whose experts are stacks of matrices, and the same as a codec leaves them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from harness import llama, lora, models
from harness.adapter import Adapter
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssDecoderLayer
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

from fsdp_zpp.codecs import Codec

_SIZES: dict[str, Any] = {
    "vocab_size": llama.VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
KINDS = ("qwen3", "deepseek")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
LAYERS = (Qwen3MoeDecoderLayer, DeepseekV3DecoderLayer, GptOssDecoderLayer)


def construct(kind: str, experts: str = "grouped_mm", **options: Any) -> Any:
    """The model as its constructor leaves it; ``deepseek``'s first layer has no experts."""
    model: Any
    if kind == "gpt_oss":
        sizes = {"num_local_experts": 4, "intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 16}
        model = GptOssForCausalLM(GptOssConfig(**_SIZES | sizes | options))
    elif kind == "qwen3":
        sizes = {"num_experts": 5, "num_key_value_heads": 2, "head_dim": 16}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES | sizes | options))
    else:
        sizes = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16}
        sizes |= {"num_key_value_heads": 4, "v_head_dim": 16, "q_lora_rank": 24}
        sizes |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**_SIZES | sizes | options))
    model.set_experts_implementation(experts)
    return model


def make_base(kind: str, experts: str = "grouped_mm", **options: Any) -> Any:
    """The base, the same on every rank; ``experts`` is transformers' implementation of them."""
    torch.manual_seed(0)
    model = construct(kind, experts, **options)
    for parameter in model.parameters():
        parameter.data.mul_(3)  # logits that are far apart, so that greedy tokens are clear
    return model.to(models.device())


def chosen(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of a base that are quantized, by name: all matrices but the routers, and stacks of them."""
    return {
        name: p
        for name, p in model.named_parameters()
        if (p.dim() == 3 or (p.dim() == 2 and not name.endswith("mlp.gate.weight"))) and p.numel() >= 4096
    }


def rounded_base(codec: Codec, kind: str, **options: Any) -> Any:
    """The oracle: those weights as ``codec`` gives them back."""
    model = make_base(kind, **options)
    for parameter in chosen(model).values():
        lora.round_weight(parameter, codec)
    return model


def adapt(base: nn.Module, module: str = "o_proj", parameters: Sequence[str] = EXPERTS) -> PeftModel:
    """Add an adapter to some modules, and to parameters, whose B is not zero."""
    torch.manual_seed(1)
    options: dict[str, Any] = {"target_modules": [module], "r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}
    model = get_peft_model(base, LoraConfig(target_parameters=list(parameters), **options))
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def backward(model: Any, alone: bool) -> dict[str, Tensor]:
    """In a worker: leave the mean gradient of all ranks' batches on ``model``; ``alone`` takes them all itself."""
    ranks = range(dist.get_world_size()) if alone else [dist.get_rank()]
    for rank in ranks:
        (llama.loss_of(model, llama.tokens(0, rank)) / len(ranks)).backward()
    return lora.gradients_of(model)


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, LAYERS)]


def shard(adapter: Adapter, model: nn.Module, strategy: Any) -> Any:
    if adapter.torch_name == "fully_shard":
        for layer in layers_of(model):
            adapter.apply(layer, strategy)
        return adapter.apply(model, strategy)
    policy = ModuleWrapPolicy(set(LAYERS))
    return adapter.apply(model, strategy, use_orig_params=True, device_id=models.device(), auto_wrap_policy=policy)
