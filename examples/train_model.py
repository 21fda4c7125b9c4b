"""The model and its optimizer."""

from __future__ import annotations

import math

import torch
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from train_options import Options
from transformers import LlamaConfig, LlamaForCausalLM


def build(options: Options, vocab: int) -> LlamaForCausalLM:
    """A Llama with random weights, the same on every rank and for every strategy."""
    torch.manual_seed(options.seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=options.hidden,
        # Two thirds of the usual 4 x, since a gated MLP has three matrices; multiples of 64 suit GPUs.
        intermediate_size=64 * math.ceil(options.hidden * 8 / 3 / 64),
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        max_position_embeddings=options.sequence,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def optimizer_and_schedule(model: torch.nn.Module, options: Options) -> tuple[Optimizer, LambdaLR]:
    """AdamW, with a linear warmup and a cosine decay to a tenth of the learning rate."""

    def factor(step: int) -> float:
        if step < options.warmup:
            return (step + 1) / (options.warmup + 1)
        progress = (step - options.warmup) / max(1, options.steps - options.warmup)
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    optimizer = AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    return optimizer, LambdaLR(optimizer, factor)
