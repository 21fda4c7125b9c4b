"""The recipe of "Scaling Laws for DiLoCo" (arXiv 2503.09799, section 3 and table 10) for its smallest model.

Transformer with QK-norm and z-loss, AdamW (0.9, 0.99) with a weight decay of 1 / steps, clipping at 1, a thousand steps
of warmup and a cosine to 5 %, 20 tokens a parameter. Ours reads bytes, so that it has 8 layers of the paper's width
where the paper has 6 and an embedding of 32,768 tokens: 34 M parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from configurations import local_steps
from corpus import Corpus
from diloco_table import SYNCHRONOUS
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from training import Settings, Trainee, train
from transformers import PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from fsdp_zpp import Strategy

PARAMETERS = 34e6
WARMUP_STEPS = 1000
Z_LOSS = 1e-4


@dataclass(frozen=True)
class RecipeSettings(Settings):
    """Settings that runs must have in common to be compared, but for batches and learning rates.

    Args:
        compiled: Whether layers and the loss are compiled.
    """

    final_lr: ClassVar[float] = 0.05

    compiled: bool


def fitted_lr(replicas: int) -> float:
    """Return the peak learning rate that the paper's fit gives (table 10)."""
    return 22256 * PARAMETERS**-0.8827 * replicas**0.2929


def fitted_batch(replicas: int) -> int:
    """Return the sequences of 2,048 tokens of a replica's step that the paper's fit gives (table 10)."""
    return round(0.00709 * PARAMETERS**0.4695 * replicas**0.3399 / replicas)


def model_of(settings: Settings) -> Qwen3Config:
    """Make the configuration of the model: bytes, and heads of their own for keys and values."""
    return Qwen3Config(
        vocab_size=256,
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        head_dim=settings.hidden // settings.heads,
        max_position_embeddings=settings.sequence,
        tie_word_embeddings=False,
        use_cache=False,
    )


def with_z_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy, and a penalty on the logarithm of the softmax's denominator."""
    logits = logits.float().flatten(0, 1)
    normalizer = logits.logsumexp(dim=-1)
    return F.cross_entropy(logits, targets.flatten()) + Z_LOSS * normalizer.square().mean()


def train_by_recipe(
    settings: RecipeSettings, name: str, seed: int, corpus: Corpus, device: torch.device
) -> dict[str, Any]:
    """Train a configuration once. Collective."""
    loss = torch.compile(with_z_loss) if settings.compiled else with_z_loss

    def objective(model: nn.Module, batch: Tensor) -> Tensor:
        return loss(model(batch[:, :-1]).logits, batch[:, 1:])

    def prepare(model: PreTrainedModel, device: torch.device) -> Trainee:
        is_local = name != SYNCHRONOUS
        if settings.compiled:
            for layer in model.model.layers:
                layer.compile()
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        sharded = FullyShardedDataParallel(
            model,
            # fsdp_zpp teaches FSDP to take a Strategy, which torch's annotation doesn't know.
            sharding_strategy=_strategy(name, settings),  # type: ignore[arg-type]
            auto_wrap_policy=ModuleWrapPolicy({Qwen3DecoderLayer}),
            mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=dtype),
            device_id=device,
            use_orig_params=True,
        )
        decay = 1 / settings.steps
        optimizer = torch.optim.AdamW(
            sharded.parameters(), settings.lr, betas=(0.9, 0.99), weight_decay=decay, fused=True
        )
        return Trainee(sharded, [optimizer], sharded.clip_grad_norm_, is_local)

    return train(settings, prepare, seed, corpus, device, model_of(settings), objective)


def _strategy(name: str, settings: Settings) -> Strategy:
    steps = None if name == SYNCHRONOUS else local_steps(name)
    return Strategy("III", local_steps=steps, gpus_per_node=settings.gpus_per_node)
