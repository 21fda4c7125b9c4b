"""Models that benchmarks train: Llamas and mixtures of experts with random weights."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, Qwen3MoeConfig

from fsdp_zpp.bench.materialize import materialize
from fsdp_zpp.bench.models import base_of, network
from fsdp_zpp.bench.task import Task

VOCABULARY = 32000
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8},
    "1.35B": {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 24, "num_attention_heads": 16},
    "6.7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "tiny-moe": {
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3-moe-2.6B": {
        "hidden_size": 1024,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    "qwen3-moe-2.7B": {  # half as deep: layers as wide as those of Qwen3-30B-A3B, with two thirds of its experts' width
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
}
"""Arguments of the configurations: of Llama, and of Qwen3-MoE if they have experts."""


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options of a model, its data and the steps on them."""
    parser.add_argument("--size", choices=SIZES, default="1.35B")
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences a GPU in a micro-batch")
    parser.add_argument(
        "--micro-batches", type=int, default=1, help="micro-batches a step, all but the last not synchronized"
    )
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=8, help="timed steps, after --warmup others")
    parser.add_argument("--warmup", type=int, default=3)


def config_of(size: str, positions: int) -> Any:
    """Return the configuration of a model of :data:`SIZES` for sequences of up to this many tokens."""
    options = SIZES[size] | {"vocab_size": VOCABULARY, "max_position_embeddings": positions}
    return Qwen3MoeConfig(**options) if "num_experts" in options else LlamaConfig(**options)


def task_of(arguments: argparse.Namespace) -> Task:
    """Return the task that a command line describes; options that it lacks have their defaults."""
    options = vars(arguments)
    own = {field.name: options[field.name] for field in fields(Task) if field.name in options}
    return Task(config_of(arguments.size, arguments.sequence + options.get("generate", 0)), **own)


def whole(task: Task) -> nn.Module:
    """Build the model in bf16 with values on this rank's device, for peers that shard it themselves."""
    torch.manual_seed(0)
    model = network(task, one_dtype=True).to(torch.bfloat16)
    return materialize(model, base_of(model), task.place)
