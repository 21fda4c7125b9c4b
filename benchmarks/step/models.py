"""Models that benchmarks train: Llamas and mixtures of experts with random weights, made layer by layer.

With ``lora`` the base is frozen and in bf16, beside trainable adapters on q, k, v and o.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

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


@dataclass(frozen=True)
class Task:
    """Model and the data that all strategies of a run train on.

    Attributes:
        nodes: Number of nodes.
        gpus_per_node: Ranks of each.
        size: One of ``SIZES``.
        lora: Rank of the adapters; 0 trains the whole model.
        micro_batch: Sequences a rank in a micro-batch.
        micro_batches: Micro-batches a step, all but the last without synchronization.
        sequence: Tokens a sequence.
        checkpointing: Whether the activations of each layer are recomputed.
        compile: Whether torch.compile compiles each layer.
        generate: Tokens to generate after training.
        device: ``cuda``, or ``cpu`` to try things out.
    """

    nodes: int
    gpus_per_node: int
    size: str
    lora: int = 0
    micro_batch: int = 1
    micro_batches: int = 1
    sequence: int = 1024
    checkpointing: bool = False
    compile: bool = False
    generate: int = 0
    device: str = "cuda"

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Task:
        """Make the task that a command line describes; options that it lacks have their defaults."""
        options = vars(arguments)
        return cls(**{field.name: options[field.name] for field in fields(cls) if field.name in options})

    @property
    def place(self) -> torch.device:
        """Return this rank's device."""
        return torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")

    def tokens(self, rank: int) -> torch.Tensor:
        """Return the tokens of ``rank``, [micro-batches, sequences, tokens], the same for every strategy."""
        shape = (self.micro_batches, self.micro_batch, self.sequence)
        return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(rank)).to(self.place)


def network(task: Task, one_dtype: bool = False) -> nn.Module:
    """Build the model without values, on the meta device.

    Args:
        task: Task that is trained.
        one_dtype: Whether LoRA's adapters are in bf16 as the base is, not in fp32.

    Returns:
        The transformers model in fp32, or a PEFT model around one in bf16.
    """
    size = SIZES[task.size] | {"vocab_size": VOCABULARY, "max_position_embeddings": task.sequence + task.generate}
    with torch.device("meta"):
        base: PreTrainedModel
        if "num_experts" in size:
            base = Qwen3MoeForCausalLM(Qwen3MoeConfig(**size, use_cache=False))
        else:
            base = LlamaForCausalLM(LlamaConfig(**size, use_cache=False))
        model: nn.Module = adapted(base.to(torch.bfloat16), task.lora) if task.lora else base
        if task.lora and one_dtype:
            model.to(torch.bfloat16)
    return model


def adapted(base: nn.Module, rank: int) -> nn.Module:
    """Freeze ``base`` and add adapters of ``rank`` on the projections of attention."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return get_peft_model(base, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))


def base_of(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside of ``model``, which may be PEFT's."""
    return model if isinstance(model, PreTrainedModel) else model.get_base_model()


def materialize(module: nn.Module, device: torch.device) -> nn.Module:
    """Give values to the parameters that have none, the same on every rank that has the same seed."""
    for inner in module.modules():
        if "inv_freq" in inner._buffers and inner.inv_freq.is_meta:
            # Its buffers are computed from the configuration, which the meta device has skipped.
            inner.__init__(inner.config)
            inner.to(device)
        for name, parameter in list(inner._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            values = torch.empty_like(parameter, device=device)
            nn.init.ones_(values) if parameter.ndim == 1 else nn.init.normal_(values, std=0.02)
            inner._parameters[name] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    return module


def prepare(task: Task, layers: nn.ModuleList, index: int) -> None:
    """Wrap one layer before it is sharded: recompute its activations, and compile it, if the task says so."""
    layer = layers[index]
    if task.checkpointing:
        apply_activation_checkpointing(layers, check_fn=lambda module: module is layer)
    if task.compile:
        layers[index].compile()


def whole(task: Task) -> nn.Module:
    """Build the model in bf16 with values on this rank's device, for peers that shard it themselves."""
    torch.manual_seed(0)
    return materialize(network(task, one_dtype=True).to(torch.bfloat16), task.place)
