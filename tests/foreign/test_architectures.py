"""transformers' architectures train under fully_shard with a strategy as they do with stock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import models
from harness.adapter import STOCK, Fsdp2
from harness.covering import over_each
from harness.pool import Pool
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from fsdp_zpp import Strategy
from fsdp_zpp.strategy.strategy import LEGAL_LEVELS

pytestmark = pytest.mark.wide

ARCHITECTURES = (
    "llama gemma2 gemma3_text phi3 gpt2 gpt_neox opt bloom mixtral qwen3_moe deepseek_v3 ernie4_5_moe".split()
)
DROPOUTS = ("attention_dropout", "dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop", "hidden_dropout")
SIZES: dict[str, Any] = {
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    **dict.fromkeys(DROPOUTS, 0.0),
    **dict.fromkeys(("hidden_size", "n_embd", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 2),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("head_dim", "v_head_dim", "kv_lora_rank", "query_pre_attn_scalar"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("num_experts_per_tok", "n_group"), 2),
    **dict.fromkeys(("topk_group", "first_k_dense_replace", "moe_num_shared_experts"), 1),
    "vocab_size": 256,
    "q_lora_rank": 24,
    "moe_intermediate_size": 32,
    "moe_layer_start_index": 0,
    "do_layer_norm_before": True,
}
"""Sizes by all names that architectures have for them; each ignores those of others."""


def config_of(architecture: str) -> PretrainedConfig:
    return AutoConfig.for_model(architecture, **SIZES | ({"head_dim": 8} if architecture == "deepseek_v3" else {}))


STEPS = 6
TOLERANCE = 1e-5
"""Relative and absolute, of losses, norms and weights, as in transformers' comparison with DDP."""
CLEAR = 20.0
"""The factor of routers: at random, experts are nearly tied, and any rounding of weights routes anew."""


def make(architecture: str, strategy: Strategy | None) -> nn.Module:
    """A model with random weights, the same on every rank, whose layers are units."""
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config_of(architecture)).to(models.device())
    for name, parameter in model.named_parameters():
        if name.endswith(("mlp.gate.weight", "mlp.router.weight", "block_sparse_moe.gate.weight")):
            parameter.data.mul_(CLEAR)
    for name, module in list(model.named_modules()):
        is_list = isinstance(module, nn.ModuleList) and len(module) == 2 and type(module[0]) is not nn.Linear
        for layer in module if is_list and "experts" not in name else []:
            Fsdp2().apply(layer, strategy)
    return Fsdp2().apply(model, strategy)


def batch() -> Tensor:
    return torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(0)).to(models.device())


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def trained(architecture: str, strategy: Strategy | None) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and norms of the gradient in all steps on one batch, and the weights in the end."""
    model: Any = make(architecture, strategy)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    tokens, values = batch(), []
    for _ in range(STEPS):
        loss = loss_of(model, tokens)
        loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        values += [loss.item(), norm.full_tensor().item()]
        optimizer.step()
        optimizer.zero_grad()
    return values, Fsdp2().full_weights(model)


_stock: dict[str, Any] = {}


def check_training(architecture: str, strategy: Strategy) -> None:
    """In a worker: fail unless a strategy trains as stock does, on the same tokens on every rank."""
    if architecture not in _stock:
        _stock.clear()
        _stock[architecture] = trained(architecture, STOCK)
    values, weights = trained(architecture, strategy)
    expected_values, expected_weights = _stock[architecture]
    torch.testing.assert_close(torch.tensor(values), torch.tensor(expected_values), rtol=TOLERANCE, atol=TOLERANCE)
    for name, expected in expected_weights.items():
        torch.testing.assert_close(weights[name], expected, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


@over_each(rest=False, architecture=ARCHITECTURES, levels=LEGAL_LEVELS)
def test_exact_strategies_train_as_stock(pool: Callable[[int], Pool], architecture: str, levels: str) -> None:
    pool(4).run(check_training, architecture, Strategy(levels, gpus_per_node=2))
