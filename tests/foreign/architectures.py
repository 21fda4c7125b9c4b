"""Small configurations of many of transformers' architectures, with random weights."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

_SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
}
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 128}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "phi3": {},
    "olmo2": {},
    "cohere": {},
    "granite": {},
    "starcoder2": {},
    "stablelm": {},
    "glm": {},
    "nemotron": {},
    "smollm3": {},
    "gpt2": _GPT2,
    "gpt_neox": {},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64, "do_layer_norm_before": True},
    "bloom": {"n_layer": 2, "n_head": 4},
    "phi": {},
    "mixtral": _EXPERTS,
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 64},
    "qwen3_moe": _EXPERTS,
    "deepseek_v3": _DEEPSEEK,
    "ernie4_5_moe": _EXPERTS | {"moe_layer_start_index": 0, "moe_num_shared_experts": 1},
}
"""By the name of the type, what it needs beside the sizes that all have."""
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "ernie4_5_moe")


def config_of(architecture: str, **options: Any) -> PretrainedConfig:
    """The configuration of a small model."""
    dropout = dict.fromkeys(
        ("attention_dropout", "dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop", "hidden_dropout"), 0.0
    )
    return AutoConfig.for_model(architecture, **_SIZES | dropout | ARCHITECTURES[architecture] | options)
