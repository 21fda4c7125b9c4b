"""A small Llama with PEFT's adapters on a quantized base, sharded; and the dequantized one on one device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from harness import llama
from harness.adapter import Adapter
from peft import PeftModel
from torch import Tensor

from fsdp_zpp import Int8, Strategy, quantize_frozen_params

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
