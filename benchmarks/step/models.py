"""Models that benchmarks train: Llamas and mixtures of experts with random weights."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from fsdp_zpp.bench.contenders import base_of, materialize, network
from fsdp_zpp.bench.results import Task

CONFIGS = Path(__file__).parent / "configs"
"""A folder for each size, which ``fsdp_zpp bench --model`` takes, too. qwen3-moe-2.7B is half as deep as 2.6B, with
layers as wide as those of Qwen3-30B-A3B, and two thirds of its experts' width."""


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options of a model, its data and the steps on them."""
    parser.add_argument("--size", choices=sorted(path.name for path in CONFIGS.iterdir()), default="1.35B")
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences a GPU in a micro-batch")
    parser.add_argument(
        "--micro-batches", type=int, default=1, help="micro-batches a step, all but the last not synchronized"
    )
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=8, help="timed steps, after --warmup others")
    parser.add_argument("--warmup", type=int, default=3)


def config_of(size: str, positions: int) -> Any:
    """Return the configuration of a size for sequences of up to this many tokens."""
    config = AutoConfig.from_pretrained(CONFIGS / size)
    config.max_position_embeddings = positions
    return config


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
